"""What happens to streams while a subscription looks for those that exist."""

from fencepost.protocol.offsets import START, Offset
from fencepost.server.subscriptions.registry import Scan
from fencepost.store.contract import LiveStream

ONE, TWO = Offset(1, 10), Offset(2, 20)


def test_a_tail_is_the_newest_that_a_look_or_a_commit_has_told() -> None:
    scan = Scan()
    scan.tails = {1: ONE, 2: TWO}

    found = [LiveStream("a", 1, TWO), LiveStream("b", 2, ONE)]

    assert list(scan.streams(found, lambda _: True)) == [
        LiveStream("a", 1, TWO),
        LiveStream("b", 2, TWO),
    ]


def test_the_stream_at_a_path_is_its_newest_incarnation() -> None:
    scan = Scan()
    scan.created = {2: LiveStream("a", 2, START), 3: LiveStream("b", 3, START)}

    assert scan.at("a", None) == LiveStream("a", 2, START)
    assert scan.at("a", LiveStream("a", 1, ONE)) == LiveStream("a", 2, START)
    assert scan.at("a", LiveStream("a", 4, ONE)) == LiveStream("a", 4, ONE)
    assert scan.at("c", None) is None


def test_a_stream_that_went_meanwhile_is_not_there() -> None:
    scan = Scan()
    scan.created = {2: LiveStream("a", 2, START)}
    scan.removed = {1, 2}

    assert scan.at("a", LiveStream("a", 1, ONE)) is None
    assert list(scan.streams([LiveStream("a", 1, ONE)], lambda _: True)) == []
