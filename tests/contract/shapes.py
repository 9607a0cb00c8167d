"""The answer to a commit that was carried out in slices, in the shape that it has otherwise.

It comes as text. What tests compare with an ordinary answer is in there; what is not, such as the
state of a producer, is left empty.
"""

from typing import Any

import msgspec

from fencepost.protocol.appends import AlreadyClosed, Appended, Duplicate, KeyRecord, Replayed
from fencepost.protocol.commits import CommitDuplicate, Committed, CommittedInSlices
from fencepost.protocol.offsets import Offset, parse_offset
from fencepost.protocol.streams import Remembered


def as_usual(outcome: Any) -> Any:
    """The outcome of a commit in the shape that it has when it is not sliced."""
    if not isinstance(outcome, CommittedInSlices):
        return outcome
    appends = msgspec.json.decode(outcome.answer)["appends"]
    if outcome.duplicate:
        return CommitDuplicate(tuple(map(_repeated, appends)))
    return Committed(
        tuple(
            Appended(
                _offset(one["offset"]),
                _offset(one["next_offset"]),
                one["closed"],
                None,
                one["position"],
            )
            for one in appends
        )
    )


def _repeated(one: dict[str, Any]) -> Duplicate | Replayed | AlreadyClosed:
    if "matches" in one:
        start = one["offset"]
        original = None if start is None else Remembered(_offset(start), b"")
        return Duplicate(Offset(0, 0), one["closed"], 0, 0, original, one["matches"])
    if "offset" in one:
        start, tail = _offset(one["offset"]), _offset(one["next_offset"])
        return Replayed(KeyRecord(b"", start, tail, one["closed"], one["position"], 0))
    return AlreadyClosed(_offset(one["next_offset"]))


def _offset(text: str) -> Offset:
    found = parse_offset(text)
    assert isinstance(found, Offset)
    return found
