"""What targets were told of, against a model that remembers everything.

The machine lets workers with notes and workers without them tell two targets of events in any
order, and lets targets get on, be sent back, and get on again. The model knows of each position
whether a target was told of it, may have been told of it, or was not. What lies ahead of a target
must bring every event that it was told of, and leave open exactly what is not known.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fencepost.protocol import leases
from fencepost.protocol.group_operations import decide_reset
from fencepost.protocol.groups import GroupInvalid
from fencepost.protocol.leases import (
    Correlated,
    CorrelationDecision,
    Target,
    decide_correlate,
)
from fencepost.protocol.told import NOTE_BYTES_MAX, Stretch, Told, check_note, stretches
from tests.unit.protocol.group_samples import NOW_MS, group
from tests.unit.protocol.test_leases_property import checked

NAMES = ("a", "b")
SOURCE = "orders/**"


def correlate(
    current: Any, rows: dict[str, Target], *found: Correlated, until: int
) -> CorrelationDecision | GroupInvalid:
    decision = decide_correlate(
        current,
        rows,
        found,
        after=current.watermark,
        until=until,
        head=until,
        targets_max=10,
        lanes_max=2,
        now_ms=NOW_MS,
    )
    assert isinstance(decision, CorrelationDecision | GroupInvalid)
    return decision


class Telling(RuleBasedStateMachine):
    """One group of two computed targets, driven at random and checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.group = group(targets="computed")
        self.rows: dict[str, Target] = {}
        self.told: dict[str, dict[int, Told]] = {name: {} for name in NAMES}
        # The model: by target, which events it was told of with a note and without one.
        self.noted: dict[str, set[int]] = {name: set() for name in NAMES}
        self.vague: dict[str, set[int]] = {name: set() for name in NAMES}
        self.knows_from: dict[str, int] = dict.fromkeys(NAMES, 0)

    @rule(
        events=st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=4),
        notes=st.booleans(),
    )
    def tell(self, events: list[set[str]], notes: bool) -> None:
        first = self.group.watermark + 1
        found = [
            Correlated(name, SOURCE, first + n, note="n" if notes else None)
            for n, names in enumerate(events)
            for name in sorted(names)
        ]
        until = first + len(events) - 1
        before = {name: self.rows.get(name) for name in NAMES}
        decision = correlate(self.group, self.rows, *reversed(found), until=until)
        assert isinstance(decision, CorrelationDecision)
        self.group = decision.group
        self.rows.update(decision.rows)
        for one in decision.told:
            self.told[one.target][one.position] = one
        for item in found:
            if notes:
                self.noted[item.target].add(item.position)
                continue
            # Without a note it may be any event behind the work that was known before.
            row = before[item.target]
            low = 0 if row is None else max(row.at, row.work_to) + 1
            self.vague[item.target].update(range(low, item.position + 1))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def get_on(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[name]
        if row.has_work:
            at = data.draw(st.integers(row.at, row.work_to))
            self.rows[name] = row.moved(at)
            self.told[name] = {p: one for p, one in self.told[name].items() if p > at}
            self.noted[name] = {position for position in self.noted[name] if position > at}
            self.vague[name] = {position for position in self.vague[name] if position > at}

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def send_back(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[name]
        back_to = data.draw(st.integers(-1, max(row.at, -1)))
        self.rows[name] = decide_reset(self.group, row, at=back_to, now_ms=NOW_MS)
        # What it has got past is gone; only what a row still covers is known.
        covered = {
            position
            for one in self.told[name].values()
            for position in range(one.covers_from, one.position + 1)
        }
        self.vague[name] |= set(range(back_to + 1, row.at + 1)) - covered

    @invariant()
    def what_lies_ahead_is_what_was_told(self) -> None:
        for name, row in self.rows.items():
            if row.at >= row.work_to:
                continue
            told = [self.told[name][at] for at in sorted(self.told[name])]
            pieces = stretches(told, row.at, row.work_to)
            given = {piece.position for piece in pieces if isinstance(piece, Told)}
            open_to = {
                position
                for piece in pieces
                if isinstance(piece, Stretch)
                for position in range(piece.first, piece.last + 1)
            }
            assert given == {position for position in self.noted[name] if position > row.at}
            wanted = {position for position in self.vague[name] if position > row.at}
            assert open_to == wanted, "what is not known is left open, and nothing else"
            ends = [piece.position if isinstance(piece, Told) else piece.last for piece in pieces]
            assert ends == sorted(set(ends)), "in order, each position once"
            assert ends[-1] == row.work_to


def test_targets_get_what_the_model_says_that_they_were_told_of() -> None:
    checked(Telling, 200)


@pytest.mark.parametrize("covers_from", [0, None], ids=["too much", "too little"])
def test_rows_that_cover_other_positions_are_found(
    covers_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much: what was told without a note is passed over. Too little: others' events come."""
    original = leases._tell

    def broken(current: Any, row: Any, item: Any, told: list[Told]) -> GroupInvalid | None:
        refused = original(current, row, item, told)
        if told:
            low = told[-1].position if covers_from is None else covers_from
            told[-1] = told[-1]._replace(covers_from=low)
        return refused

    monkeypatch.setattr(leases, "_tell", broken)

    with pytest.raises(AssertionError):
        checked(Telling, 200, phases=[Phase.generate], derandomize=True)


def test_a_note_tells_of_one_event_and_no_note_of_everything_before() -> None:
    first = correlate(group(targets="computed"), {}, Correlated("a", SOURCE, 3), until=3)
    assert isinstance(first, CorrelationDecision)
    noted = Correlated("a", SOURCE, 7, note="n")

    second = correlate(first.group, dict(first.rows), noted, until=9)

    assert isinstance(second, CorrelationDecision)
    assert (first.told, second.told) == ([], [Told("a", 7, 4, "n")])
    assert stretches(second.told, -1, 7) == [Stretch(0, 3), Told("a", 7, 4, "n")]


def test_a_target_is_told_of_an_event_once_and_only_if_it_is_computed() -> None:
    twice = [Correlated("a", SOURCE, 3, note="n")] * 2
    refused = correlate(group(targets="computed"), {}, *twice, until=3)
    assert refused == GroupInvalid("the target 'a' is told of 3 twice")
    refused = correlate(group(), {}, Correlated("a", "a", 3, note="n"), until=3)
    assert refused == GroupInvalid("the target 'a' has a note, and is not computed")


def test_a_note_is_short_and_has_no_control_characters() -> None:
    assert check_note("") is None
    assert check_note("é" * (NOTE_BYTES_MAX // 2)) is None
    assert check_note("é" * (NOTE_BYTES_MAX // 2 + 1)) is not None
    assert check_note("a\0b") is not None
