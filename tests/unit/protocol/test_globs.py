"""Globs over stream paths, by table and against a slower matcher that is plainly right."""

import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencepost.protocol.automata import SETS_MAX, STEPS_MAX, Automaton
from fencepost.protocol.globs import BadGlob, Glob, Globs, parse_glob


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("events/a", "events/a"),
        ("events/*", "events/a"),
        ("*/a", "events/a"),
        ("**", "a"),
        ("**", "a/b/c"),
        ("events/**", "events"),
        ("events/**", "events/a/b"),
        ("**/z", "z"),
        ("**/z", "a/b/z"),
        ("a/**/z", "a/z"),
        ("a/**/z", "a/b/c/z"),
        ("a/**/b/**/c", "a/x/b/y/b/c"),
        ("user-*", "user-7"),
        ("user-*", "user-"),
        ("a*b*c", "a-b-b-c"),
        ("[a]?.{x}", "[a]?.{x}"),
        ("grüße/*", "grüße/welt"),
    ],
)
def test_a_pattern_takes_in_what_it_describes(pattern: str, path: str) -> None:
    assert Glob(pattern).matches(path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("events/a", "events/a/b"),
        ("events/a", "events"),
        ("events/*", "events"),
        ("events/*", "events/a/b"),
        ("events/**", "eventsa"),
        ("a/**/z", "a/b"),
        ("a/**/b/**/c", "a/b"),
        ("a/**/a", "a"),
        ("user-*", "user/7"),
        ("a*a", "a"),
        ("a*b*b", "ab"),
        ("[ab]", "a"),
    ],
)
def test_a_pattern_leaves_out_everything_else(pattern: str, path: str) -> None:
    assert not Glob(pattern).matches(path)


@pytest.mark.parametrize(
    "pattern",
    ["", "/", "/a", "a/", "a//b", "a**", "**a/b", "a/***", "a/../b", ".", "a\nb", "a\x7f"],
)
def test_what_is_no_pattern_is_refused_with_a_reason(pattern: str) -> None:
    outcome = parse_glob(pattern)

    assert isinstance(outcome, BadGlob)
    assert outcome.detail


def test_the_prefix_is_what_every_match_begins_with() -> None:
    assert Glob("a/b/*/c").prefix == ("a", "b")
    assert Glob("a/b-*").prefix == ("a",)
    assert Glob("**/a").prefix == ()
    assert Glob("a/b").prefix == ("a", "b")
    assert Glob("a/b").is_exact


segments = st.text("ab*", min_size=1, max_size=3).filter(lambda s: "**" not in s)
patterns = st.lists(st.one_of(segments, st.just("**")), min_size=1, max_size=5).map("/".join)
paths = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6).map("/".join)


@given(patterns, paths)
@example("a/**/b/**/**", "a/b")
def test_it_matches_exactly_what_a_regular_expression_would(pattern: str, path: str) -> None:
    """For any pattern and path, the answer is that of the pattern written out as an expression."""
    assert Glob(pattern).matches(path) == bool(_expression(pattern).fullmatch("/" + path))


def _expression(pattern: str) -> re.Pattern[str]:
    written = ""
    for segment in pattern.split("/"):
        if segment == "**":
            written += "(/[^/]+)*"
        else:
            written += "/" + "[^/]*".join(map(re.escape, segment.split("*")))
    return re.compile(written)


def test_a_pattern_made_to_take_for_ever_does_not() -> None:
    pattern = "/".join(["**", "*a*a*a*a*a*a*b"] * 20)

    assert not Glob(pattern).matches("/".join(["a" * 40] * 25))


@given(st.lists(patterns, max_size=12), paths)
@example(["a/**", "ab*", "a*"], "a")
@example(["a", "ab/**", "**/b"], "ab")
def test_several_patterns_take_what_any_of_them_takes(written: list[str], path: str) -> None:
    """For any patterns and path, one matcher of all of them answers like them one by one."""
    globs = [Glob(pattern) for pattern in written]

    assert Globs(globs).matches(path) == any(glob.matches(path) for glob in globs)


def test_a_path_is_compared_with_the_patterns_that_begin_like_it() -> None:
    tenants = [Glob(f"tenant-{number}/**") for number in range(256)]

    # tenant-25 begins like tenant-2, and like itself: `tenant-2/**` also takes `tenant-2`.
    assert Globs(tenants).comparisons_max == 3
    assert Globs([*tenants, Glob("**/x"), Glob("*/y")]).comparisons_max == 5
    assert Globs([Glob("a/*"), Glob("a/*")]).comparisons_max == 1
    assert Globs(()).comparisons_max == 0


@given(st.lists(patterns, min_size=2, max_size=6), st.lists(paths, max_size=40))
def test_what_an_automaton_remembers_changes_no_answer(
    written: list[str], several: list[str]
) -> None:
    """For any patterns and paths, one that forgets at every step answers like one that does not."""
    kept, forgetful = Automaton(written), Automaton(written)
    forgetful._sets_max = 1

    for path in several:
        expected = any(Glob(pattern).matches(path) for pattern in written)
        assert kept.takes(path) == forgetful.takes(path) == expected


def test_what_an_automaton_remembers_is_bounded() -> None:
    dice = random.Random(4)
    automaton = Automaton(f"**/*x{number}*y" for number in range(256))
    for _ in range(3_000):
        automaton.takes("".join(dice.choice("xy0123456789/") for _ in range(40)))

    assert len(automaton._remembered.places) <= SETS_MAX
    assert sum(map(len, automaton._remembered.steps.values())) <= STEPS_MAX


HOSTILE = ["/".join(["**", *["a"] * 250, "b", "**"]), "/".join(["**", *["*a*"] * 250, "*", "**"])]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_long_pattern_looks_at_each_character_of_a_path_once(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/".join(["a"] * 512)
    moves: list[str] = []
    moved = Automaton._moved

    def counted(self: Automaton, places: int, character: str) -> int:
        moves.append(character)
        return moved(self, places, character)

    monkeypatch.setattr(Automaton, "_moved", counted)
    Glob(pattern).matches(path)

    assert 0 < len(moves) <= 2 * len(path)
