"""The audit stream: what it holds, who reads it, and that no principal writes to it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.engines import server_at
from tests.integration.auth_support import ALL, FORBIDDEN, ROOT, As, Place, code, place, principal
from tests.serving import ServerProcess

ONE, TWO = principal("one", ("jobs/**", ALL)), principal("two", ("jobs/**", ALL))
# It may read everything that is not the audit stream.
EVERY = principal("every", ("**", ALL))
AUDITOR = principal("auditor", ("__audit", ["admin"]))
ALWAYS = {"match": "task:*", "going_on": "holder", "raising": "always"}


@pytest.fixture
def here(empty_store: Path | str) -> Iterator[Place]:
    with place(empty_store, ROOT, ONE, TWO, EVERY, AUDITOR, rules=[ALWAYS]) as found:
        found("one").create("jobs/1")
        yield found


def test_a_raise_is_told_with_who_what_and_why_in_the_same_commit(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 3, 0)
    raised = here("two").send("jobs/1", "task:a", 4, 0, audit_reason="one went away")

    [event] = here.audit()

    assert event.pop("at").endswith("Z")
    assert event == {
        "type": "epoch_raised",
        "principal": "two",
        "stream": "jobs/1",
        "producer": "task:a",
        "old_epoch": 3,
        "new_epoch": 4,
        "holder": "one",
        "reason": "one went away",
    }
    rows = here("root").get("/v1/log").text.splitlines()
    assert '"stream":"__audit"' in rows[-1]
    # Right behind the raise, and so in the transaction that its answer waited for.
    assert f'"position":{int(raised.headers["Stream-Position"]) + 1},' in rows[-1]


def test_ordinary_appends_are_not_told(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 0, 0)
    here("one").send("jobs/1", "task:a", 0, 1)
    here("one").send("jobs/1", "row:a", 0, 0)
    here("two").send("jobs/1", "row:a", 0, 1)
    here("two").send("jobs/1", "task:a", 0, 0)

    assert here.audit() == []


def test_raises_of_ids_that_are_no_claims_are_told_too(here: Place) -> None:
    """An override of a shared row is a raise of `row:...`, and has to be seen."""
    here("one").send("jobs/1", "row:a", 0, 0)
    here("two").send("jobs/1", "row:a", 1, 0, audit_reason="wrong price")
    here("two").commit(
        {"stream": "jobs/1", "data": 1, "producer": {"id": "row:a", "epoch": 2, "seq": 0}}
    )

    told = [(event["type"], event["producer"], event["new_epoch"]) for event in here.audit()]

    assert told == [("epoch_raised", "row:a", 1), ("epoch_raised", "row:a", 2)]


def test_without_principals_raises_are_counted_and_logged(empty_store: Path | str) -> None:
    with server_at(empty_store) as server, As(server.url, None) as client:
        client.create("jobs/1")
        client.send("jobs/1", "row:a", 0, 0)
        client.send("jobs/1", "row:a", 0, 1)
        client.send("jobs/1", "row:a", 1, 0)
        client.commit(
            {"stream": "jobs/1", "data": 1, "producer": {"id": "row:a", "epoch": 2, "seq": 0}}
        )
        metrics = client.get("/metrics").text.splitlines()

        assert "fencepost_epochs_raised_total 2.0" in metrics
    said = "the epoch of producer 'row:a' in stream 'jobs/1' was raised from"
    assert f"{said} 0 to 1" in server.output
    assert f"{said} 1 to 2" in server.output


def test_an_override_is_told_as_one(empty_store: Path | str) -> None:
    with place(empty_store, ROOT, ONE, TWO) as here:
        here("one").create("jobs/1")
        here("one").send("jobs/1", "task:a", 0, 0)
        here("root").send("jobs/1", "task:a", 0, 1, audit_reason="finish it")
        here("root").send("jobs/1", "task:a", 1, 0, audit_reason="stuck")

        assert [(event["type"], event["reason"]) for event in here.audit()] == [
            ("override", "finish it"),
            ("override", "stuck"),
        ]


def test_raises_inside_a_commit_are_told_when_it_is_done_and_not_when_it_is_refused(
    here: Place,
) -> None:
    def item(name: str, epoch: int, **more: object) -> dict[str, object]:
        producer = {"id": f"task:{name}", "epoch": epoch, "seq": 0}
        return {"stream": "jobs/1", "data": 1, "producer": producer, **more}

    here("one").commit(item("a", 0), item("b", 0))
    refused = here("two").commit(item("a", 1), item("b", 1, if_match="-1"))
    assert refused.status_code == 412
    assert here.audit() == []
    done = here("two").commit(item("a", 1), item("b", 1), audit_reason="both")

    assert done.status_code == 200
    assert [(event["producer"], event["reason"]) for event in here.audit()] == [
        ("task:a", "both"),
        ("task:b", "both"),
    ]


def test_refusals_are_told_but_only_so_many_a_second(empty_store: Path | str) -> None:
    with place(empty_store, ROOT, ONE, TWO, EVERY, audit_refusals_per_s=0.5) as here:
        here("one").create("jobs/1")
        here("one").send("jobs/1", "task:a", 0, 0)
        started = time.monotonic()
        for _ in range(40):
            assert here("two").send("jobs/1", "task:a", 1, 0).status_code == 403
        assert here("two").send("jobs/1", "task:a", 0, 1).status_code == 403
        # Another one's refusals are not lost in the noise.
        here("every").send("jobs/1", "task:a", 0, 1)
        seconds = time.monotonic() - started
        here("root").send("jobs/1", "task:a", 1, 0, audit_reason="end it")
        events = here.audit()

    mine = [event for event in events if event["principal"] == "two"]
    assert 1 <= len(mine) <= 1 + 0.5 * seconds + 1
    assert {(event["type"], event["code"]) for event in mine} == {("refused", "epoch_guarded")}
    assert [event["code"] for event in events if event["principal"] == "every"] == ["producer_held"]
    assert events[-1]["type"] == "override"


def test_what_was_left_out_is_counted_in_the_next_event(empty_store: Path | str) -> None:
    with place(empty_store, ROOT, ONE, TWO, audit_refusals_per_s=0.01, rules=[ALWAYS]) as here:
        here("one").create("jobs/1")
        here("one").send("jobs/1", "task:a", 0, 0)
        for _ in range(5):
            here("two").send("jobs/1", "task:a", 0, 1)
        here("two").send("jobs/1", "task:a", 1, 0)

        assert [event.get("refusals_left_out") for event in here.audit()] == [None, 4]


def test_administrators_read_it_and_nobody_else(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 0, 0)
    here("two").send("jobs/1", "task:a", 1, 0)

    for who in ("root", "auditor"):
        assert len(here(who).get("/v1/stream/__audit").json()) == 1
        assert here(who).client.head("/v1/stream/__audit").status_code == 200
        assert len(here(who).get("/v1/log?match=__audit").text.splitlines()) == 1
        live = here(who).get("/v1/stream/__audit?live=long-poll&offset=-1")
        assert live.status_code == 200
    for who in ("one", "every"):
        assert code(here(who).get("/v1/stream/__audit")) == FORBIDDEN
        assert code(here(who).get("/v1/stream/__audit?live=sse&offset=-1")) == FORBIDDEN
        assert "__audit" not in here(who).get("/v1/log").text
        assert "__audit" not in here(who).get("/v1/streams").text
        assert here(who).get("/v1/log?match=__audit").text == ""


@pytest.mark.parametrize("path", ["__audit", "__audit/more", "%5F%5Faudit", "_%5faudit"])
def test_nobody_writes_to_it_not_even_administrators(here: Place, path: str) -> None:
    for who in ("root", "auditor", "every"):
        client = here(who).client
        json_ = {"Content-Type": "application/json"}
        for answer in (
            client.post(f"/v1/stream/{path}", content=b"1", headers=json_),
            client.put(f"/v1/stream/{path}", headers=json_),
            client.delete(f"/v1/stream/{path}"),
            client.post(f"/v1/stream/{path}?truncate&before=now"),
            client.post(f"/v1/stream/{path}", headers={"Stream-Closed": "true"}),
            here(who).commit({"stream": "__audit", "data": 1}),
            here(who).commit({"stream": "__audit/more", "data": 1, "auto_create": True}),
        ):
            assert code(answer) == (400, "path_reserved")
        wakes = {"type": "pull-wake", "pattern": "jobs/*", "wake_stream": "__audit"}
        made = client.put("/v1/stream/__ds/subscriptions/s", json=wakes)
        assert made.status_code == 400


@pytest.mark.parametrize("reason", ["", "x" * 257, "a\tb"])
def test_a_reason_is_one_short_line(here: Place, reason: str) -> None:
    answer = here("one").send("jobs/1", "task:a", 0, 0, audit_reason=reason)

    assert answer.status_code == 400


def test_the_path_is_reserved_without_principals_too(tmp_path: Path) -> None:
    """Else a client could make the stream before there are principals."""
    import httpx

    with ServerProcess(tmp_path) as process:
        made = httpx.put(f"{process.url}/v1/stream/__audit")

        assert code(made) == (400, "path_reserved")
        assert httpx.get(f"{process.url}/v1/stream/__audit").status_code == 404


def test_what_it_holds_survives_a_kill(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 0, 0)
    here("two").send("jobs/1", "task:a", 1, 0)
    here.process.kill()
    here.close()
    here.process.restart()

    assert [event["new_epoch"] for event in here.audit()] == [1]
    assert code(here("one").send("jobs/1", "task:a", 1, 1)) == (403, "producer_held")
