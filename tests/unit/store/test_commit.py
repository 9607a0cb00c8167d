"""Group commit with a journal in memory: who is answered when, and what a failure takes along.

The journal records what it is told and can be made to wait or fail at each step; the owner is a
list of numbers. Everything else (the loop, the writer thread) is real.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from fencepost.store.contract import Failed, Unknown
from fencepost.store.write.group_commit import (
    INLINE_BYTES_MAX,
    THREAD_COMMITS_AFTER_SLOW,
    DiskFullError,
    GroupCommit,
)

WAIT_SECONDS = 10.0
STIRRED = -1
"""What is written over the log after a commit of unknown outcome."""


class Numbers:
    """A group: the numbers to write."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.bytes = 0

    def is_empty(self) -> bool:
        return not self.values


class Memory:
    """A journal: `durable` is what a restart would find."""

    def __init__(self) -> None:
        self.durable: list[int] = []
        self.written: list[int] = []
        self.commits: list[list[int]] = []
        self.threads: dict[str, str] = {}
        self.fail_in: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.on_write: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None

    def _step(self, name: str) -> None:
        self.threads[name] = threading.current_thread().name
        if name == "write":
            self.on_write()
        elif name == "commit":
            self.on_commit()
        error = self.fail_in.pop(name, None)
        if error is not None:
            raise error

    def write(self, sealed: Numbers) -> None:
        self._step("begin")
        self.written = []
        self._step("write")
        self.written += sealed.values

    def commit(self) -> None:
        self.at_gate.set()
        assert self.gate.wait(WAIT_SECONDS)
        self._step("commit")
        self.durable += [number for number in self.written if number != STIRRED]
        self.commits.append(self.written)

    def rollback(self) -> None:
        self._step("rollback")
        self.written = []


class Decider:
    """An owner whose state is the sum of the numbers decided so far."""

    def __init__(self, journal: Memory) -> None:
        self.journal = journal
        self.decided: list[int] = []
        self.visible: list[int] = []
        self.groups: list[Numbers] = []
        self.resets = 0
        self.broken_by: BaseException | None = None

    def new_group(self) -> Numbers:
        group = Numbers()
        self.groups.append(group)
        return group

    def seal(self, group: Numbers) -> None:
        group.values = list(group.values)

    def committed(self, group: Numbers) -> None:
        # An owner keeps account of the groups under way; one that it does not know is a fault.
        self.groups.remove(group)
        self.visible += [number for number in group.values if number != STIRRED]

    def reset(self) -> None:
        self.resets += 1
        self.groups.clear()
        self.decided = list(self.journal.durable)

    def stir(self, group: Numbers) -> None:
        group.values.append(STIRRED)

    def broken(self, error: BaseException) -> None:
        self.broken_by = error


class DiskError(Exception):
    """The disk itself failed."""


class Fixture:
    """A group commit with its two partners, and the answers it has given, in order."""

    def __init__(self, *, loop_commit_us_max: int = 0) -> None:
        self.journal = Memory()
        self.owner = Decider(self.journal)
        self.now_ns = 0
        self.commits = GroupCommit(
            self.journal,
            self.owner,
            is_disk_error=lambda error: isinstance(error, DiskError),
            clock_ns=lambda: self.now_ns,
            loop_commit_us_max=loop_commit_us_max,  # 0: always in the thread
        )
        self.answers: list[tuple[str, object]] = []

    def decide(self, number: int, *, size: int = 1) -> None:
        """Accept a number: its answer is called by the number."""
        self.owner.decided.append(number)
        self.commits.group.values.append(number)
        self.commits.group.bytes += size
        self.ask(str(number))

    def ask(self, name: str) -> None:
        """A decision that changes nothing: a refusal, a duplicate."""
        self.commits.after(lambda outcome: self.answers.append((name, outcome)), "yes")

    def pass_us(self, us: int) -> None:
        """Let time pass."""
        self.now_ns += us * 1000

    def hold(self) -> None:
        """Let the next COMMIT wait."""
        self.journal.gate.clear()
        self.journal.at_gate.clear()

    async def committing(self) -> None:
        """Return once a COMMIT is under way."""
        assert await asyncio.to_thread(self.journal.at_gate.wait, WAIT_SECONDS)

    def release(self) -> None:
        self.journal.gate.set()

    async def settled(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await self.commits.settled()


@pytest.fixture
async def fixture() -> AsyncIterator[Fixture]:
    made = Fixture()
    yield made
    made.release()
    async with asyncio.timeout(WAIT_SECONDS):
        await made.commits.close()


async def test_requests_of_one_turn_share_one_commit(fixture: Fixture) -> None:
    for number in range(5):
        fixture.decide(number)
    assert fixture.answers == []

    await fixture.settled()

    assert fixture.journal.commits == [[0, 1, 2, 3, 4]]
    assert fixture.answers == [(str(number), "yes") for number in range(5)]


async def test_an_answer_waits_until_its_commit_is_on_disk(fixture: Fixture) -> None:
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()

    assert fixture.answers == []
    assert fixture.owner.visible == []

    fixture.release()
    await fixture.settled()
    assert fixture.answers == [("1", "yes")]
    assert fixture.owner.visible == [1]


async def test_a_refusal_waits_for_the_commit_that_its_reason_is_in(fixture: Fixture) -> None:
    fixture.decide(1)
    fixture.ask("refused because of 1")

    assert fixture.answers == []
    await fixture.settled()
    assert fixture.answers == [("1", "yes"), ("refused because of 1", "yes")]


async def test_a_refusal_waits_for_the_commit_that_is_under_way(fixture: Fixture) -> None:
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()

    fixture.ask("refused because of 1")

    assert fixture.answers == []
    fixture.release()
    await fixture.settled()
    assert fixture.answers == [("1", "yes"), ("refused because of 1", "yes")]


async def test_a_refusal_with_nothing_to_wait_for_is_answered_at_once(fixture: Fixture) -> None:
    fixture.ask("refused")

    assert fixture.answers == [("refused", "yes")]
    assert fixture.journal.commits == []


async def test_what_arrives_during_a_commit_joins_the_next_one(fixture: Fixture) -> None:
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()
    for number in (2, 3, 4):
        fixture.decide(number)

    fixture.release()
    await fixture.settled()

    assert fixture.journal.commits == [[1], [2, 3, 4]]
    assert [name for name, _ in fixture.answers] == ["1", "2", "3", "4"]


async def test_readers_see_a_group_before_its_answers_leave(fixture: Fixture) -> None:
    seen: list[list[int]] = []
    fixture.commits.group.values.append(1)
    fixture.commits.after(lambda _: seen.append(list(fixture.owner.visible)))

    await fixture.settled()

    assert seen == [[1]]


@pytest.mark.parametrize("step", ["begin", "write"])
@pytest.mark.parametrize("size", [1, INLINE_BYTES_MAX + 1], ids=["inline", "in the thread"])
async def test_a_failed_write_is_undone_and_said_to_have_changed_nothing(
    fixture: Fixture, step: str, size: int
) -> None:
    fixture.journal.fail_in[step] = RuntimeError("as the test asked")
    fixture.decide(1, size=size)

    await fixture.settled()

    assert fixture.answers == [("1", Failed(full=False))]
    assert fixture.journal.durable == []
    assert fixture.owner.resets == 1
    assert "rollback" in fixture.journal.threads


async def test_a_failed_commit_has_an_unknown_outcome(fixture: Fixture) -> None:
    fixture.journal.fail_in["commit"] = RuntimeError("as the test asked")
    fixture.decide(1)

    await fixture.settled()

    assert fixture.answers == [("1", Unknown())]
    assert fixture.owner.resets == 1


async def test_after_an_unknown_outcome_nothing_is_answered_before_the_log_is_written_over(
    fixture: Fixture,
) -> None:
    """The lost commit may come back after a crash; no refusal must be given without it."""
    seen: list[list[list[int]]] = []

    def told(_: object) -> None:
        fixture.commits.after(lambda _: seen.append(list(fixture.journal.commits)))

    fixture.journal.fail_in["commit"] = RuntimeError("as the test asked")
    fixture.commits.group.values.append(1)
    fixture.commits.after(told)

    await fixture.settled()

    assert seen == [[[STIRRED]]]


async def test_a_failed_rollback_has_an_unknown_outcome(fixture: Fixture) -> None:
    fixture.journal.fail_in = {"write": RuntimeError("one"), "rollback": RuntimeError("two")}
    fixture.decide(1)

    await fixture.settled()

    assert fixture.answers == [("1", Unknown())]


@pytest.mark.parametrize("step", ["write", "commit"])
async def test_a_full_disk_is_said_and_changes_nothing(
    fixture: Fixture, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.journal.fail_in[step] = DiskFullError("as the test asked")
    fixture.decide(1)

    await fixture.settled()

    [said] = caplog.records
    assert said.getMessage() == "a commit failed because the disk has no room: as the test asked"
    assert said.exc_info is None, "a traceback for each commit, as long as the disk is full"
    assert fixture.answers == [("1", Failed(full=True))]
    assert fixture.journal.durable == []
    assert fixture.owner.resets == 1


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (RuntimeError("as the test asked"), Unknown()),
        (DiskFullError("as the test asked"), Failed(full=True)),
    ],
)
async def test_a_failed_group_takes_along_what_was_decided_on_top_of_it(
    fixture: Fixture, error: Exception, first: Unknown | Failed
) -> None:
    """Those requests never reached a transaction, so for them the outcome is certain."""
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()
    fixture.decide(2)
    fixture.ask("refused because of 2")
    fixture.journal.fail_in["commit"] = error

    fixture.release()
    await fixture.settled()

    void = Failed(full=isinstance(error, DiskFullError))
    assert fixture.answers == [("1", first), ("2", void), ("refused because of 2", void)]
    assert fixture.journal.durable == []
    assert fixture.owner.decided == []


@pytest.mark.parametrize("step", ["begin", "write", "commit"])
async def test_the_next_request_after_a_failure_is_committed_and_answered(
    fixture: Fixture, step: str
) -> None:
    fixture.journal.fail_in[step] = RuntimeError("as the test asked")
    fixture.decide(1)
    await fixture.settled()

    fixture.decide(2)
    await fixture.settled()

    assert fixture.answers[1:] == [("2", "yes")]
    assert fixture.journal.durable == [2]
    assert fixture.owner.visible == [2]


async def test_state_is_rebuilt_before_anyone_hears_of_the_failure(fixture: Fixture) -> None:
    heard: list[int] = []
    fixture.journal.fail_in["commit"] = RuntimeError("as the test asked")
    fixture.commits.group.values.append(1)
    fixture.commits.after(lambda _: heard.append(fixture.owner.resets))

    await fixture.settled()

    assert heard == [1]


async def test_a_request_sent_again_from_its_own_failure_is_decided_anew(fixture: Fixture) -> None:
    fixture.journal.fail_in["commit"] = RuntimeError("as the test asked")
    fixture.commits.group.values.append(1)
    fixture.commits.after(lambda _: fixture.decide(1))

    await fixture.settled()

    assert fixture.answers == [("1", "yes")]
    assert fixture.journal.durable == [1]


@pytest.mark.parametrize("step", ["write", "commit"])
async def test_a_disk_error_stops_the_owner_instead_of_resetting_it(
    fixture: Fixture, step: str
) -> None:
    error = DiskError("as the test asked")
    fixture.journal.fail_in[step] = error
    fixture.decide(1)

    await fixture.settled()

    assert fixture.owner.broken_by is error
    assert fixture.owner.resets == 0
    [(_, outcome)] = fixture.answers
    assert isinstance(outcome, Failed | Unknown)


async def test_an_answer_that_raises_does_not_keep_the_others_from_theirs(fixture: Fixture) -> None:
    def raises(_: object) -> None:
        raise RuntimeError("as the test asked")

    fixture.commits.group.values.append(1)
    fixture.commits.after(raises)
    fixture.decide(2)

    await fixture.settled()

    assert fixture.answers == [("2", "yes")]


async def test_little_data_is_written_on_the_loop_and_much_in_the_thread(fixture: Fixture) -> None:
    here = threading.current_thread().name
    fixture.decide(1, size=INLINE_BYTES_MAX)
    await fixture.settled()
    small = dict(fixture.journal.threads)

    fixture.decide(2, size=INLINE_BYTES_MAX + 1)
    await fixture.settled()
    large = dict(fixture.journal.threads)

    assert (small["write"], large["write"] != here) == (here, True)
    assert small["commit"] == large["commit"] == large["write"]


async def test_exclusive_work_runs_between_transactions(fixture: Fixture) -> None:
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()
    found: list[list[int]] = []

    work = asyncio.create_task(
        fixture.commits.exclusively(lambda: found.append(list(fixture.journal.durable)))
    )
    fixture.release()
    async with asyncio.timeout(WAIT_SECONDS):
        await work

    assert found == [[1]]


async def test_requests_wait_behind_exclusive_work_and_are_then_answered(fixture: Fixture) -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert release.wait(WAIT_SECONDS)

    working = asyncio.create_task(fixture.commits.exclusively(work))
    assert await asyncio.to_thread(started.wait, WAIT_SECONDS)
    fixture.decide(1)
    fixture.ask("refused")
    await asyncio.sleep(0)
    assert fixture.answers == []

    release.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await working
    await fixture.settled()

    assert fixture.answers == [("1", "yes"), ("refused", "yes")]


async def test_exclusive_work_that_fails_lets_the_next_commit_through(fixture: Fixture) -> None:
    def work() -> None:
        raise RuntimeError("as the test asked")

    with pytest.raises(RuntimeError, match="as the test asked"):
        await fixture.commits.exclusively(work)

    fixture.decide(1)
    await fixture.settled()
    assert fixture.answers == [("1", "yes")]


async def test_two_pieces_of_exclusive_work_do_not_overlap(fixture: Fixture) -> None:
    running: list[int] = []
    most: list[int] = []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        running.pop()

    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(fixture.commits.exclusively(work) for _ in range(5)))

    assert most == [1] * 5


async def test_closing_commits_what_was_decided() -> None:
    fixture = Fixture()
    fixture.decide(1)

    async with asyncio.timeout(WAIT_SECONDS):
        await fixture.commits.close()

    assert fixture.journal.durable == [1]
    assert fixture.answers == [("1", "yes")]


async def test_closing_waits_for_the_commit_under_way_and_the_one_after() -> None:
    fixture = Fixture()
    fixture.hold()
    fixture.decide(1)
    await fixture.committing()
    fixture.decide(2)

    closing = asyncio.create_task(fixture.commits.close())
    fixture.release()
    async with asyncio.timeout(WAIT_SECONDS):
        await closing

    assert fixture.journal.durable == [1, 2]
    assert [name for name, _ in fixture.answers] == ["1", "2"]


# Where the commits run


async def commits_in(fixture: Fixture, numbers: range) -> list[str]:
    """The threads that the commits of some numbers ran in, one commit each."""
    threads = []
    for number in numbers:
        fixture.decide(number)
        await fixture.settled()
        threads.append(fixture.journal.threads["commit"])
    return threads


async def test_a_fast_disk_moves_the_commits_to_the_loop_and_a_slow_one_back() -> None:
    here = threading.current_thread().name
    fixture = Fixture(loop_commit_us_max=100)

    first = await commits_in(fixture, range(THREAD_COMMITS_AFTER_SLOW))
    fast = await commits_in(fixture, range(100, 103))
    fixture.journal.on_commit = lambda: fixture.pass_us(100)
    slow = await commits_in(fixture, range(200, 203))
    await fixture.commits.close()

    assert here not in first
    assert fast == [here] * 3
    assert (slow[0], here in slow[1:]) == (here, False)


async def test_refusals_say_nothing_about_the_disk() -> None:
    fixture = Fixture(loop_commit_us_max=100)
    for number in range(2 * THREAD_COMMITS_AFTER_SLOW):
        fixture.commits.flush()
        fixture.ask(str(number))
        await fixture.settled()

    [thread] = await commits_in(fixture, range(1))
    await fixture.commits.close()

    assert thread != threading.current_thread().name


async def test_a_commit_is_measured_as_a_whole_and_the_disk_apart(fixture: Fixture) -> None:
    measured: list[tuple[int, int, int]] = []
    fixture.commits.on_commit = lambda *numbers: measured.append(numbers)
    fixture.journal.on_write = lambda: fixture.pass_us(3)
    fixture.journal.on_commit = lambda: fixture.pass_us(5)

    fixture.decide(1)
    fixture.ask("refused")
    await fixture.settled()

    assert measured == [(2, 8_000, 5_000)]
