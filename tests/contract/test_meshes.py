"""What a store promises about sends: one message, one row, one delivery each, or nothing."""

import asyncio

import pytest

from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.meshes import (
    DAY_MS,
    MeshCreated,
    MeshDiffers,
    MeshSame,
    MeshSettings,
    inbox_path,
    queue_path,
    topic_path,
)
from fencepost.protocol.offsets import Offset
from fencepost.protocol.sends import (
    DestinationNotFound,
    IdReused,
    MeshNotFound,
    Repeated,
    Sent,
)
from fencepost.store.contract import Missing
from fencepost.store.group_contract import DeleteGroup, GroupDeleted, GroupMissing
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.mesh_contract import (
    Done,
    DropMesh,
    DropName,
    EndMesh,
    JoinTopic,
    MakeMesh,
    MakeName,
    MeshEnding,
    NameMade,
    NameMissing,
)
from tests.contract.grouping import a
from tests.contract.meshing import a_mesh, a_send, ask, held, named, send
from tests.contract.subject import Subject, answered

TOPIC = topic_path("shop", "alerts")
ANN, BEA = inbox_path("shop", "ann"), inbox_path("shop", "bea")


async def test_a_mesh_is_made_once_and_kept(subject: Subject) -> None:
    first = a(MeshCreated, await ask(subject, MakeMesh("shop", MeshSettings())))
    await subject.reopen()

    assert await ask(subject, MakeMesh("shop", MeshSettings())) == MeshSame(first.mesh)
    other = MeshSettings(dedupe_mode="permanent")
    assert await ask(subject, MakeMesh("shop", other)) == MeshDiffers(first.mesh)


async def test_a_send_is_stored_once_and_delivered_to_every_member(subject: Subject) -> None:
    await a_mesh(subject)

    sent = a(Sent, await send(subject, a_send()))
    again = a(Repeated, await send(subject, a_send()))

    [message] = await held(subject, TOPIC)
    assert message["broker_message_id"] == sent.sealed.broker_message_id
    assert message["client_message_id"] == "m-1"
    assert message["body"] == "hello"
    for inbox in (ANN, BEA):
        [entry] = await held(subject, inbox)
        assert entry["broker_message_id"] == sent.sealed.broker_message_id
        assert entry["sender"] == "bob"
    assert again.row == sent.row
    assert again.history_available


async def test_another_message_under_a_used_id_is_refused(subject: Subject) -> None:
    await a_mesh(subject)
    await send(subject, a_send())

    refused = a(IdReused, await send(subject, a_send(body="other")))

    assert len(refused.broker_fingerprint_prefix) == 16
    assert len(await held(subject, TOPIC)) == 1


async def test_a_send_is_recognised_after_a_restart(subject: Subject) -> None:
    await a_mesh(subject)
    sent = a(Sent, await send(subject, a_send()))

    await subject.reopen()

    assert a(Repeated, await send(subject, a_send())).row == sent.row
    assert isinstance(await send(subject, a_send(body="other")), IdReused)


async def test_of_fifty_sends_with_one_id_one_is_stored(subject: Subject) -> None:
    await a_mesh(subject)
    from fencepost.store.mesh_contract import SendRequest

    asked = [subject.ask(subject.store.send, SendRequest("shop", a_send())) for _ in range(50)]
    outcomes = [await answered(answer) for answer in asked]

    assert [isinstance(outcome, Sent) for outcome in outcomes].count(True) == 1
    assert len(await held(subject, TOPIC)) == 1
    assert len(await held(subject, ANN)) == 1


async def test_two_senders_and_two_meshes_may_use_one_id(subject: Subject) -> None:
    await a_mesh(subject)
    await a_mesh(subject, "yard")

    first = await send(subject, a_send())
    second = await send(subject, a_send(sender="eve"))
    third = await send(subject, a_send(), mesh="yard")

    assert all(isinstance(outcome, Sent) for outcome in (first, second, third))
    assert [entry["sender"] for entry in await held(subject, ANN)] == ["bob", "eve"]
    assert len(await held(subject, inbox_path("yard", "ann"))) == 1


async def test_a_send_to_nowhere_leaves_its_id_free(subject: Subject) -> None:
    await a_mesh(subject)
    lost = a_send(kind="queue", ref="later")

    assert await send(subject, lost) == DestinationNotFound("queue", "later")
    await named(subject, "queue", "later")

    assert isinstance(await send(subject, lost), Sent)
    assert isinstance(await send(subject, lost, mesh="none"), MeshNotFound)


async def test_direct_messages_and_queues_have_one_stream(subject: Subject) -> None:
    await a_mesh(subject)

    await send(subject, a_send("d-1", kind="dm", ref="ann"))
    await send(subject, a_send("q-1", kind="queue", ref="jobs", priority="now"))

    assert [entry["client_message_id"] for entry in await held(subject, ANN)] == ["d-1"]
    assert await held(subject, BEA) == []
    [job] = await held(subject, queue_path("shop", "jobs"))
    assert job["priority"] == "now"


async def test_a_large_body_lies_in_the_topic_and_the_inbox_says_where(subject: Subject) -> None:
    await a_mesh(subject)

    await send(subject, a_send(body="x" * 5_000))

    [entry] = await held(subject, ANN)
    assert "body" not in entry
    assert entry["body_at"]["stream"] == TOPIC
    assert entry["body_at"]["bytes"] == 5_000


async def test_history_is_available_as_long_as_the_message_can_be_read(subject: Subject) -> None:
    await a_mesh(subject)
    await send(subject, a_send())
    await send(subject, a_send("m-2"))
    info = await subject.info(TOPIC)

    cut = asyncio.get_running_loop().create_future()
    subject.store.truncate(TOPIC, info.tail, cut.set_result)
    await answered(cut)

    assert not a(Repeated, await send(subject, a_send())).history_available


async def test_a_topic_that_was_made_again_has_no_history_of_the_one_before(
    subject: Subject,
) -> None:
    await a_mesh(subject)
    await send(subject, a_send())

    assert await ask(subject, DropName("shop", "topic", "alerts")) == Done()
    gone = a(Repeated, await send(subject, a_send()))
    await named(subject, "topic", "alerts")
    other = a(Repeated, await send(subject, a_send()))

    assert (gone.history_available, other.history_available) == (False, False)
    assert isinstance(await send(subject, a_send("m-2")), Sent)
    assert len(await held(subject, ANN)) == 1  # the new topic has no members


async def test_a_row_counts_until_it_is_swept_also_past_its_time(subject: Subject) -> None:
    await a_mesh(subject, settings=MeshSettings(dedupe_retention_days=7))
    await send(subject, a_send())
    upkeep = Upkeep(subject.kept, subject.clock)

    assert await upkeep.sweep_sends() == 0
    subject.clock.advance(8 * DAY_MS)
    assert isinstance(await send(subject, a_send()), Repeated)
    assert await upkeep.sweep_sends() == 1

    assert isinstance(await send(subject, a_send()), Sent)


async def test_rows_of_a_permanent_mesh_are_never_swept(subject: Subject) -> None:
    await a_mesh(subject, settings=MeshSettings(dedupe_mode="permanent"))
    await send(subject, a_send())

    subject.clock.advance(4_000 * DAY_MS)

    assert await Upkeep(subject.kept, subject.clock).sweep_sends() == 0
    assert isinstance(await send(subject, a_send()), Repeated)


async def test_who_leaves_a_topic_gets_no_more_of_it(subject: Subject) -> None:
    await a_mesh(subject)

    assert await ask(subject, JoinTopic("shop", "alerts", "ann", leaves=True)) == Done()
    await send(subject, a_send())

    assert await held(subject, ANN) == []
    assert len(await held(subject, BEA)) == 1
    again = await ask(subject, JoinTopic("shop", "alerts", "ann", leaves=True))
    assert again == NameMissing("dm", "ann")


async def test_a_deleted_member_is_in_no_topic_and_has_no_group(subject: Subject) -> None:
    await a_mesh(subject)

    assert await ask(subject, DropName("shop", "dm", "ann")) == Done()

    assert isinstance(await subject.look(ANN), Missing)
    assert isinstance(await send(subject, a_send()), Sent)
    assert await ask(subject, JoinTopic("shop", "alerts", "ann")) == NameMissing("dm", "ann")
    group = subject.ask(subject.store.work, DeleteGroup("mesh:shop:inbox:ann"))
    assert await answered(group) == GroupMissing()
    other = subject.ask(subject.store.work, DeleteGroup("mesh:shop:inbox:bea"))
    assert await answered(other) == GroupDeleted()


async def test_what_is_there_is_made_once(subject: Subject) -> None:
    await a_mesh(subject)

    again = a(NameMade, await ask(subject, MakeName("shop", "dm", "ann")))

    assert not again.fresh
    assert await ask(subject, JoinTopic("shop", "alerts", "ann")) == Done(changed=False)
    assert await ask(subject, JoinTopic("shop", "none", "ann")) == NameMissing("topic", "none")
    assert await ask(subject, MakeName("none", "dm", "ann")) == MeshNotFound()


async def test_a_mesh_that_ends_is_found_no_more_and_its_name_is_free_afterwards(
    subject: Subject,
) -> None:
    await a_mesh(subject)
    await send(subject, a_send())
    paths = [TOPIC, ANN, BEA, queue_path("shop", "jobs")]

    assert await ask(subject, EndMesh("shop")) == Done()
    assert isinstance(await send(subject, a_send()), MeshNotFound)
    assert await ask(subject, MakeMesh("shop", MeshSettings())) == MeshEnding()
    assert await ask(subject, DropMesh("shop", paths, is_last=True)) == Done()
    await a_mesh(subject)

    assert await held(subject, TOPIC) == []
    assert isinstance(await send(subject, a_send()), Sent)


async def test_a_member_joins_between_two_sends_of_one_commit(subject: Subject) -> None:
    await a_mesh(subject)
    from fencepost.store.mesh_contract import SendRequest

    asked = [
        subject.ask(subject.store.send, SendRequest("shop", a_send("m-1"))),
        subject.ask(subject.store.mesh, MakeName("shop", "dm", "cleo")),
        subject.ask(subject.store.mesh, JoinTopic("shop", "alerts", "cleo")),
        subject.ask(subject.store.send, SendRequest("shop", a_send("m-2"))),
    ]
    for answer in asked:
        await answered(answer)

    cleo = await held(subject, inbox_path("shop", "cleo"))
    assert [entry["client_message_id"] for entry in cleo] == ["m-2"]


async def test_the_offset_of_a_message_is_its_place(subject: Subject) -> None:
    await a_mesh(subject)

    first = a(Sent, await send(subject, a_send("m-1")))
    second = a(Sent, await send(subject, a_send("m-2")))

    assert first.sealed.offset == Offset(0, 0)
    assert second.sealed.offset == Offset(1, len(first.message))
    assert (await subject.info(TOPIC)).tail.messages == 2


@pytest.mark.parametrize("count", [3])
async def test_a_topic_takes_no_more_members_than_a_send_may_reach(
    subject: Subject, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_mesh(subject)
    meshes = subject.store.decider.meshes  # type: ignore[attr-defined]
    from dataclasses import replace

    monkeypatch.setattr(meshes, "_limits", replace(meshes._limits, recipients_max=count))
    await named(subject, "dm", "m3", "m4")

    assert await ask(subject, JoinTopic("shop", "alerts", "m3")) == Done()
    refused = await ask(subject, JoinTopic("shop", "alerts", "m4"))

    assert refused == LimitExceeded("recipients_max", count)
