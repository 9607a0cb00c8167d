"""When a worker that has died is started again, and when the parent gives up."""

import pickle
from pathlib import Path

from fencepost.cli.settings import load
from fencepost.cli.workers import FAILED_STARTS_MAX, FIRST_WAIT_S, WAIT_S_MAX, Care, Plan


def test_all_are_ready_once_and_only_once() -> None:
    care = Care()

    assert not care.ready(1, 2)
    assert care.ready(2, 2)
    care.died(2)
    assert not care.ready(2, 2)


def test_a_worker_that_cannot_start_at_first_ends_it_all() -> None:
    care = Care()
    care.ready(1, 2)

    assert care.died(2) is None


def test_a_worker_that_dies_later_is_started_again_after_longer_and_longer() -> None:
    care = Care()
    care.ready(1, 2)
    care.ready(2, 2)

    waits = [care.died(2) for _ in range(20)]

    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits[-1] == WAIT_S_MAX


def test_one_that_became_ready_again_begins_anew() -> None:
    care = Care()
    care.ready(1, 1)
    for _ in range(3):
        care.died(1)

    care.ready(1, 1)

    assert care.died(1) == FIRST_WAIT_S


def test_the_parent_gives_up_when_none_is_left_and_none_comes_up() -> None:
    care = Care()
    care.ready(1, 2)
    care.ready(2, 2)

    first = [care.died(1) for _ in range(FAILED_STARTS_MAX + 5)]
    care.died(2)
    last = [care.died(1), *(care.died(2) for _ in range(FAILED_STARTS_MAX))]

    assert None not in first, "the other worker still serves"
    assert last[0] is None
    assert last[-1] is None


def test_what_the_workers_are_to_serve_reaches_another_process(tmp_path: Path) -> None:
    """Settings with everything in them survive the way to a worker."""
    file = tmp_path / "fencepost.toml"
    file.write_text(
        """
        [[retention]]
        match = "sessions/**"
        max_age_s = 60
        [[principals]]
        name = "ops"
        token_sha256 = "%s"
        grants = [{ streams = ["**"], verbs = ["admin"] }]
        """
        % ("0" * 64)
    )
    settings, store = load(file, folder=None, url="postgresql://db/name", overrides={})
    plan = Plan(settings, store, "127.0.0.1", 1, 2, True, "info", True)

    there: Plan = pickle.loads(pickle.dumps(plan))  # noqa: S301  what multiprocessing does

    [policy] = there.store.retention
    assert there.settings == settings
    assert policy.glob.matches("sessions/1")
    assert not policy.glob.matches("orders/1")
    assert there._replace(store=store) == plan
