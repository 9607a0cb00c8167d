"""Time to live, expiry, and a clock that is set back."""

import pytest

from fencepost.protocol.appends import Appended
from fencepost.protocol.creates import Created, Exists
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Missing, StreamInfo
from tests.contract.subject import Subject

TEN_SECONDS = Lifetime(ttl_s=10)


async def test_an_idle_stream_ends_when_its_time_to_live_is_over(subject: Subject) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)

    subject.clock.advance(9_999)
    assert isinstance(await subject.look("s"), StreamInfo)
    subject.clock.advance(1)

    assert await subject.look("s") == Missing()


async def test_looking_without_touching_does_not_prolong_a_life(subject: Subject) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)

    for _ in range(4):
        subject.clock.advance(2_000)
        await subject.info("s")
    subject.clock.advance(2_000)

    assert await subject.look("s") == Missing()


@pytest.mark.parametrize("use", ["read", "append", "close", "duplicate"])
async def test_a_use_starts_the_time_to_live_again(subject: Subject, use: str) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)
    await subject.appended("s", b"x", producer=("p", 0, 0))

    for _ in range(3):
        subject.clock.advance(8_000)
        match use:
            case "read":
                await subject.info("s", touch=True)
            case "append":
                await subject.appended("s", b"y")
            case "close":
                await subject.append("s", closes=True)
            case _:
                await subject.append("s", b"x", producer=("p", 0, 0))
    subject.clock.advance(9_999)

    assert isinstance(await subject.look("s"), StreamInfo)


async def test_a_fixed_end_is_not_moved_by_use(subject: Subject) -> None:
    end_ms = subject.clock.now_ms() + 10_000
    await subject.made("s", lifetime=Lifetime(expires_at_ms=end_ms))

    subject.clock.advance(9_999)
    await subject.appended("s", b"x")
    await subject.info("s", touch=True)
    subject.clock.advance(1)

    assert await subject.look("s") == Missing()


async def test_an_expired_path_is_free_again(subject: Subject) -> None:
    first = await subject.made("s", lifetime=TEN_SECONDS, body=b"old")
    subject.clock.advance(10_000)

    second = await subject.create("s", lifetime=TEN_SECONDS)

    assert isinstance(second, Created)
    assert second.stream.id != first.stream.id
    assert await subject.content("s") == b""


async def test_an_append_to_an_expired_stream_is_missing(subject: Subject) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)
    subject.clock.advance(10_000)

    assert await subject.append("s", b"x") == Missing()
    assert await subject.delete("s") == Missing()


async def test_a_create_just_before_the_end_finds_the_stream(subject: Subject) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)
    subject.clock.advance(9_999)

    assert isinstance(await subject.create("s", lifetime=TEN_SECONDS), Exists)


async def test_an_expiry_that_someone_saw_stays_after_a_restart_with_an_older_clock(
    subject: Subject,
) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)
    subject.clock.advance(10_000)
    assert await subject.look("s") == Missing()

    subject.clock.jump(-10_000)
    await subject.reopen()

    assert await subject.look("s") == Missing()


@pytest.mark.parametrize("ttl_s", [8, 1000])
async def test_a_restart_never_shortens_a_life(subject: Subject, ttl_s: int) -> None:
    """A read slides the end without a write; what is stored must cover it all the same."""
    await subject.made("s", lifetime=Lifetime(ttl_s=ttl_s))
    for _ in range(20):
        subject.clock.advance(ttl_s * 100)
        await subject.info("s", touch=True)

    await subject.reopen()
    subject.clock.advance(ttl_s * 1000 - 1)

    assert isinstance(await subject.look("s"), StreamInfo)


async def test_a_restart_prolongs_a_life_by_the_slack_at_most(subject: Subject) -> None:
    await subject.made("s", lifetime=Lifetime(ttl_s=80))

    await subject.reopen()
    subject.clock.advance(80_000 + 10_000)

    assert await subject.look("s") == Missing()


async def test_a_stream_that_lives_for_no_time_is_made_and_gone(subject: Subject) -> None:
    assert isinstance(await subject.create("s", lifetime=Lifetime(ttl_s=0)), Created)
    assert await subject.look("s") == Missing()


async def test_times_never_run_backwards_when_the_clock_does(subject: Subject) -> None:
    first = await subject.made("first")
    subject.clock.jump(-3_600_000)
    second = await subject.made("second")
    await subject.reopen()
    subject.clock.jump(-3_600_000)
    third = await subject.made("third")

    times = [made.stream.created_ms for made in (first, second, third)]
    assert times == sorted(times)
    assert isinstance(await subject.append("third", b"x"), Appended)


async def test_a_clock_set_back_ends_no_stream_early(subject: Subject) -> None:
    await subject.made("s", lifetime=TEN_SECONDS)
    subject.clock.jump(-3_600_000)
    await subject.made("later", lifetime=TEN_SECONDS)

    assert isinstance(await subject.look("s", touch=True), StreamInfo)
    assert isinstance(await subject.look("later", touch=True), StreamInfo)
