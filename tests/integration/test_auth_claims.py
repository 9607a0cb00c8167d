"""Claims on a real server: who holds a producer id, who may take it over, and how many at once."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines import emptied
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, ROOT, Place, code, place, principal

ONE, TWO = principal("one", ("jobs/**", ALL)), principal("two", ("jobs/**", ALL))
HELD = (403, "producer_held")
GUARDED = (403, "epoch_guarded")
TOO_FAST = (429, "too_fast")
SHORT = {"match": "task:short*", "going_on": "holder", "raising": "stale", "stale_after_s": 0.3}
NEVER = {"match": "fixed:*", "going_on": "holder", "raising": "never"}


@pytest.fixture(scope="module")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        emptied(engine, tmp_path_factory.mktemp("claims")) as store,
        place(store, ROOT, ONE, TWO, rules=[SHORT, NEVER]) as found,
    ):
        yield found


@pytest.fixture
def here(server: Place) -> Place:
    server("root").client.delete("/v1/stream/jobs/1")
    server("one").create("jobs/1")
    return server


def until(look: Callable[[], httpx.Response], status: int) -> httpx.Response:
    """Ask until the answer is this; each try must be one that changes nothing until then."""
    deadline = time.monotonic() + 20
    while True:
        answer = look()
        if answer.status_code == status or time.monotonic() > deadline:
            assert answer.status_code == status, answer.text
            return answer


def test_a_claim_is_its_holders_alone(here: Place) -> None:
    one, two = here("one"), here("two")

    assert one.send("jobs/1", "task:a", 0, 0, "mine").status_code == 200
    assert code(two.send("jobs/1", "task:a", 0, 1)) == HELD
    assert code(two.send("jobs/1", "task:a", 0, 5)) == HELD
    assert one.send("jobs/1", "task:a", 0, 1, "heartbeat").status_code == 200


def test_who_comes_second_is_told_that_the_claim_is_not_theirs(here: Place) -> None:
    """The race for a claim: both send seq 0, and the answer to the second says whose it is."""
    here("one").send("jobs/1", "task:a", 0, 0, "nonce-1")

    again = here("one").send("jobs/1", "task:a", 0, 0, "nonce-1")
    second = here("two").send("jobs/1", "task:a", 0, 0, "nonce-2")

    assert (again.status_code, again.headers["Producer-Match"]) == (204, "true")
    assert (second.status_code, second.headers["Producer-Match"]) == (204, "false")


def test_rows_and_everything_else_are_shared_as_without_principals(here: Place) -> None:
    for producer in ("row:user:1", "checkout"):
        assert here("one").send("jobs/1", producer, 0, 0).status_code == 200
        assert here("two").send("jobs/1", producer, 0, 1).status_code == 200
        assert here("two").send("jobs/1", producer, 1, 0).status_code == 200
        assert code(here("one").send("jobs/1", producer, 0, 2))[1] == "producer_epoch_stale"


def test_an_epoch_is_raised_only_when_its_holder_is_gone(here: Place) -> None:
    here("one").send("jobs/1", "task:short", 0, 0)

    early = here("two").send("jobs/1", "task:short", 1, 0)
    taken = until(lambda: here("two").send("jobs/1", "task:short", 1, 0), 200)
    zombie = here("one").send("jobs/1", "task:short", 0, 1)

    assert code(early) == GUARDED
    assert early.headers["Retry-After"] == "1"
    assert taken.headers["Producer-Epoch"] == "1"
    assert code(zombie) == (403, "producer_epoch_stale")
    assert code(here("one").send("jobs/1", "task:short", 1, 1)) == HELD


def test_by_default_a_claim_is_safe_for_a_minute(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 0, 0)

    refused = here("two").send("jobs/1", "task:a", 1, 0)

    assert code(refused) == GUARDED
    assert 50 <= int(refused.headers["Retry-After"]) <= 60
    assert code(here("one").send("jobs/1", "task:a", 1, 0)) == GUARDED


def test_an_epoch_that_is_never_raised_is_raised_by_an_administrator_with_a_reason(
    here: Place,
) -> None:
    here("one").send("jobs/1", "fixed:a", 0, 0)

    for who in ("one", "two", "root"):
        refused = here(who).send("jobs/1", "fixed:a", 1, 0)
        assert code(refused) == GUARDED
        assert "Retry-After" not in refused.headers
    with_reason = here("two").send("jobs/1", "fixed:a", 1, 0, audit_reason="please")
    assert code(with_reason) == GUARDED
    override = here("root").send("jobs/1", "fixed:a", 1, 0, audit_reason="one is gone")
    assert override.status_code == 200


def test_a_released_claim_is_anybodys_and_a_completed_one_nobodys(here: Place) -> None:
    here("one").send("jobs/1", "task:r", 0, 0)
    here("one").send("jobs/1", "task:r", 0, 1, claim_end="released")
    here("one").send("jobs/1", "task:c", 0, 0)
    here("one").send("jobs/1", "task:c", 0, 1, claim_end="completed")

    assert here("two").send("jobs/1", "task:r", 0, 2).status_code == 200
    assert code(here("one").send("jobs/1", "task:r", 0, 3)) == HELD
    assert code(here("two").send("jobs/1", "task:c", 0, 2)) == HELD
    assert code(here("two").send("jobs/1", "task:c", 1, 0)) == GUARDED
    odd = here("one").send("jobs/1", "task:c", 0, 2, claim_end="given up")
    assert code(odd) == (400, "header_invalid")


def test_a_claim_that_is_ended_twice_in_one_request_is_refused(here: Place) -> None:
    one = here("one").client
    ends = [("Claim-End", "released"), ("Claim-End", "completed")]
    sent = [("Content-Type", "application/json"), *ends]

    appended = one.post("/v1/stream/jobs/1", headers=sent, content=b"1")
    committed = one.post(
        "/v1/commit",
        headers=sent,
        json={"appends": [{"stream": "jobs/1", "content_type": "application/json", "data": 1}]},
    )

    assert code(appended) == code(committed) == (400, "header_repeated")


def test_a_completed_claim_accepts_nothing_further_from_its_holder(here: Place) -> None:
    completed = (409, "claim_completed")
    here("one").send("jobs/1", "task:c", 0, 0)
    last = here("one").send("jobs/1", "task:c", 0, 1, claim_end="completed")
    again = here("one").send("jobs/1", "task:c", 0, 1, claim_end="completed")

    assert (last.status_code, again.status_code) == (200, 204)
    assert code(here("one").send("jobs/1", "task:c", 0, 2)) == completed
    assert code(here("root").send("jobs/1", "task:c", 0, 2, audit_reason="more")) == completed
    item = {"stream": "jobs/1", "data": 1, "producer": {"id": "task:c", "epoch": 0, "seq": 2}}
    assert code(here("one").commit(item)) == completed
    reopened = here("root").send("jobs/1", "task:c", 1, 0, audit_reason="it was not done")
    assert reopened.status_code == 200
    assert here("root").send("jobs/1", "task:c", 1, 1).status_code == 200


def test_a_completed_claim_is_told_in_its_place_among_the_refusals(here: Place) -> None:
    """Behind the holder, the epoch and the closure; before the type and the sequence."""
    completed = (409, "claim_completed")
    here("one").send("jobs/1", "task:c", 0, 0)
    here("one").send("jobs/1", "task:c", 0, 1, claim_end="completed")

    assert code(here("one").send("jobs/1", "task:c", 0, 9)) == completed
    number = {"Producer-Id": "task:c", "Producer-Epoch": "0", "Producer-Seq": "2"}
    typed = {"Content-Type": "text/plain", **number}
    posted = here("one").client.post("/v1/stream/jobs/1", headers=typed, content=b"x")
    assert code(posted) == completed
    assert code(here("two").send("jobs/1", "task:c", 0, 2)) == HELD
    assert code(here("one").send("jobs/1", "task:c", 1, 0)) == GUARDED
    here("one").client.post("/v1/stream/jobs/1", headers={"Stream-Closed": "true"})
    assert code(here("one").send("jobs/1", "task:c", 0, 2)) == (409, "stream_closed")


def test_the_rules_hold_inside_commits_as_well(here: Place) -> None:
    here("one").send("jobs/1", "task:a", 0, 0)

    def item(epoch: int, seq: int, **more: object) -> dict[str, object]:
        producer = {"id": "task:a", "epoch": epoch, "seq": seq}
        return {"stream": "jobs/1", "data": 1, "producer": producer, **more}

    assert code(here("two").commit(item(0, 1))) == HELD
    assert code(here("two").commit(item(1, 0))) == GUARDED
    free = {"stream": "jobs/1", "data": 2}
    assert here("two").commit(free, item(0, 1)).json()["item"] == 1
    assert here("one").get("/v1/stream/jobs/1").json() == [1]
    assert here("one").commit(item(0, 1, claim_end="released")).status_code == 200
    assert here("two").commit(item(0, 2)).status_code == 200


def test_who_holds_what_survives_a_restart(empty_store: Path | str) -> None:
    few = principal("one", ("jobs/**", ALL), open_claims_max=2)
    with place(empty_store, ROOT, few, TWO) as here:
        here("one").create("jobs/1")
        here("one").send("jobs/1", "task:1", 0, 0)
        here("one").send("jobs/1", "task:2", 0, 0)
        here("one").send("jobs/1", "task:2", 0, 1, claim_end="released")
        here.restart()

        assert code(here("two").send("jobs/1", "task:1", 0, 1)) == HELD
        assert here("two").send("jobs/1", "task:2", 0, 2).status_code == 200
        assert here("one").send("jobs/1", "task:3", 0, 0).status_code == 200
        assert code(here("one").send("jobs/1", "task:4", 0, 0)) == TOO_FAST
        assert metric(here, "fencepost_claims_open", "one") == 2


def metric(here: Place, name: str, who: str) -> float:
    for line in here("root").get("/metrics").text.splitlines():
        if line.startswith(f'{name}{{principal="{who}"}}'):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_only_so_many_claims_are_open_at_once(empty_store: Path | str) -> None:
    few = principal("one", ("jobs/**", ALL), open_claims_max=2)
    with place(empty_store, ROOT, few) as here:
        one = here("one")
        for path in ("jobs/1", "jobs/2"):
            one.create(path)
        one.send("jobs/1", "task:1", 0, 0)
        one.send("jobs/2", "tool:2", 0, 0)

        refused = one.send("jobs/1", "task:3", 0, 0)
        repeated = one.send("jobs/1", "task:1", 0, 0)
        heartbeat = one.send("jobs/1", "task:1", 0, 1)
        plain = one.send("jobs/1", "row:3", 0, 0)
        one.send("jobs/1", "task:1", 0, 2, claim_end="completed")
        room = one.send("jobs/1", "task:3", 0, 0)

        assert code(refused) == TOO_FAST
        assert "open_claims_max" in refused.json()["detail"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert [a.status_code for a in (repeated, heartbeat, plain, room)] == [204, 200, 200, 200]
        assert code(one.send("jobs/1", "task:4", 0, 0)) == TOO_FAST
        assert one.client.delete("/v1/stream/jobs/2").status_code == 204
        assert one.send("jobs/1", "task:4", 0, 0).status_code == 200


def test_a_commit_of_many_claims_counts_them_all(empty_store: Path | str) -> None:
    few = principal("one", ("jobs/**", ALL), open_claims_max=2)
    with place(empty_store, few) as here:
        here("one").create("jobs/1")

        def claims(*names: int) -> httpx.Response:
            return here("one").commit(
                *(
                    {
                        "stream": "jobs/1",
                        "data": 1,
                        "producer": {"id": f"task:{name}", "epoch": 0, "seq": 0},
                    }
                    for name in names
                )
            )

        refused = claims(1, 2, 3)
        taken = claims(1, 2)

        assert code(refused) == TOO_FAST
        assert refused.json()["item"] == 2
        assert taken.status_code == 200
        assert code(claims(3)) == TOO_FAST


@pytest.mark.parametrize(
    ("limit", "ids", "name"),
    [
        ("appends_per_s", ["a", "b"], "appends_per_s"),
        ("claims_per_s", ["task:a", "task:b"], "claims_per_s"),
    ],
)
def test_a_rate_is_held_for_each_principal_by_itself(
    empty_store: Path | str, limit: str, ids: list[str], name: str
) -> None:
    # Burst 1, and a minute and more until the next: no machine is slow enough to get two through.
    slow = principal("one", ("jobs/**", ALL), **{limit: 0.01})
    with place(empty_store, ROOT, slow, TWO) as here:
        here("two").create("jobs/1")
        first, second = (here("one").send("jobs/1", producer, 0, 0) for producer in ids)

        assert first.status_code == 200
        assert code(second) == TOO_FAST
        assert name in second.json()["detail"]
        assert 90 <= int(second.headers["Retry-After"]) <= 100
        for producer in ("x", "task:x", "task:y"):
            assert here("two").send("jobs/1", producer, 0, 0).status_code == 200
        assert len(here("two").get("/v1/stream/jobs/1").json()) == 4


def test_a_retry_of_a_stored_append_is_never_too_fast(empty_store: Path | str) -> None:
    """Three appends at once, and twenty minutes and more until the next."""
    slow = principal("one", ("jobs/**", ALL), appends_per_s=0.001)
    with place(empty_store, slow, burst_s="3000") as here:
        one = here("one")
        one.create("jobs/1")
        one.send("jobs/1", "p", 0, 0)
        one.append("jobs/1", 2, idempotency_key="k")
        retries = [
            *(one.send("jobs/1", "p", 0, 0) for _ in range(5)),
            *(one.append("jobs/1", 2, idempotency_key="k") for _ in range(5)),
            one.send("jobs/1", "p", 0, 0, producer_strict="true"),
            one.send("jobs/1", "p", 0, 0, "other", producer_strict="true"),
            one.append("jobs/1", "other", idempotency_key="k"),
            one.append("jobs/none"),
        ]
        last = one.send("jobs/1", "p", 0, 1)
        refused = [one.send("jobs/1", "p", 0, 2), one.append("jobs/new", stream_auto_create="true")]
        again = [one.send("jobs/1", "p", 0, 1), one.append("jobs/1", 2, idempotency_key="k")]

        statuses = [answer.status_code for answer in retries]
        assert statuses == [204] * 5 + [200] * 5 + [204, 409, 409, 404]
        assert last.status_code == 200
        assert [code(answer) for answer in refused] == [TOO_FAST, TOO_FAST]
        assert [answer.status_code for answer in again] == [204, 200]
        assert len(one.get("/v1/stream/jobs/1").json()) == 3


@pytest.mark.parametrize("appends", [2, 300])
def test_a_retry_of_a_stored_commit_is_never_too_fast(
    empty_store: Path | str, appends: int
) -> None:
    """One commit of this size at once; the larger one runs in slices."""
    slow = principal("one", ("jobs/**", ALL), appends_per_s=0.001)
    with place(empty_store, slow, burst_s=str(appends * 1000)) as here:
        one = here("one")
        one.create("jobs/1")

        def commit(epoch: int) -> httpx.Response:
            producers = [{"id": f"p{n}", "epoch": epoch, "seq": 0} for n in range(appends)]
            items = [{"stream": "jobs/1", "data": 1, "producer": one} for one in producers]
            return one.commit(*items)

        stored = commit(0)
        retries = [commit(0) for _ in range(3)]
        refused = commit(1)

        assert stored.json()["duplicate"] is False
        assert [answer.json()["duplicate"] for answer in retries] == [True] * 3
        assert code(refused) == TOO_FAST
        assert commit(0).json()["duplicate"] is True


def test_raises_have_a_rate_of_their_own(empty_store: Path | str) -> None:
    slow = principal("one", ("jobs/**", ALL), raises_per_s=0.01)
    with place(empty_store, slow) as here:
        here("one").create("jobs/1")
        for producer in ("a", "b"):
            here("one").send("jobs/1", producer, 0, 0)

        assert here("one").send("jobs/1", "a", 1, 0).status_code == 200
        refused = here("one").send("jobs/1", "b", 1, 0)
        assert code(refused) == TOO_FAST
        assert "raises_per_s" in refused.json()["detail"]
        assert here("one").send("jobs/1", "b", 0, 1).status_code == 200


def test_a_refusal_for_haste_costs_nothing_durable(empty_store: Path | str) -> None:
    slow = principal("one", ("jobs/**", ALL), claims_per_s=0.01)
    with place(empty_store, ROOT, slow) as here:
        here("one").create("jobs/1")
        here("one").send("jobs/1", "task:a", 0, 0)
        before = here("root").client.head("/v1/log").headers["Log-Head"]
        commits = commits_count(here)

        for number in range(50):
            assert code(here("one").send("jobs/1", f"task:{number}", 0, 0)) == TOO_FAST

        assert here("root").client.head("/v1/log").headers["Log-Head"] == before
        assert commits_count(here) == commits
        assert here.audit() == []


def commits_count(here: Place) -> float:
    for line in here("root").get("/metrics").text.splitlines():
        if line.startswith("fencepost_commit_seconds_count"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError("no such metric")


def test_who_abandons_its_claims_gets_no_more_for_a_while(empty_store: Path | str) -> None:
    careless = principal("one", ("jobs/**", ALL), abandon_ratio_max=0.5)
    rule = {"match": "task:*", "going_on": "holder", "raising": "always"}
    with place(empty_store, ROOT, careless, TWO, rules=[rule]) as here:
        here("one").create("jobs/1")
        for number in range(12):
            here("one").send("jobs/1", f"task:{number}", 0, 0)
        for number in range(5):
            here("two").send("jobs/1", f"task:{number}", 1, 0)
        assert here("one").send("jobs/1", "task:fine", 0, 0).status_code == 200
        for number in range(5, 8):
            here("two").send("jobs/1", f"task:{number}", 1, 0)

        refused = here("one").send("jobs/1", "task:more", 0, 0)

        assert code(refused) == TOO_FAST
        assert "abandon_ratio_max" in refused.json()["detail"]
        assert metric(here, "fencepost_claims_abandon_ratio", "one") == pytest.approx(8 / 13, 0.01)
        assert metric(here, "fencepost_claims_open", "one") == 5
        assert metric(here, "fencepost_claims_open", "two") == 8
        assert here("one").send("jobs/1", "row:1", 0, 0).status_code == 200
