"""The filter of keys: it may doubt, but it never calls a used key new."""

from hypothesis import given
from hypothesis import strategies as st

from fencepost.store.write.keys import BYTES_MIN, BYTES_PER_KEY, KeyFilter

PLACES = st.tuples(st.integers(0, 2**40), st.text(max_size=5), st.text(max_size=20))


def complete() -> KeyFilter:
    keys = KeyFilter()
    keys.learn([], None)
    return keys


@given(st.sets(PLACES, max_size=200))
def test_a_key_that_was_used_is_never_called_new(used: set[tuple[int, str, str]]) -> None:
    keys = complete()
    for place in used:
        keys.add(place)

    assert not any(keys.is_new(place) for place in used)


def test_nothing_is_called_new_before_all_keys_on_disk_are_known() -> None:
    keys = KeyFilter()
    assert not keys.is_new((1, "", "a"))

    keys.learn([hash((1, "", "b"))], (1, "", "b"))
    assert not keys.is_new((1, "", "a"))

    keys.learn([hash((1, "", "c"))], None)
    assert keys.is_new((1, "", "a"))
    assert not keys.is_new((1, "", "b"))
    assert not keys.is_new((1, "", "c"))


def test_keys_used_while_it_learns_are_known_afterwards() -> None:
    keys = KeyFilter()
    keys.add((7, "", "early"))
    keys.learn([], None)

    assert not keys.is_new((7, "", "early"))


def test_most_new_keys_are_called_new_even_when_it_is_full() -> None:
    keys = complete()
    number = 0
    while not keys.is_full:
        keys.add((1, "p", f"used-{number}"))
        number += 1

    wrong = sum(not keys.is_new((1, "p", f"new-{other}")) for other in range(20_000))

    assert number == BYTES_MIN // BYTES_PER_KEY
    assert wrong < 20_000 * 0.05


def test_made_anew_it_is_large_enough_for_what_is_there_and_what_comes() -> None:
    keys = complete()
    keys.begin_again(1_000_000, [(1, "", "kept")])
    called_new = keys.is_new((1, "", "x"))

    keys.learn((hash((1, "", str(number))) for number in range(1_000)), None)

    assert not called_new, "it has to learn the keys on disk first"
    assert not keys.is_full
    assert keys.is_new((1, "", "x"))
    assert not keys.is_new((1, "", "999"))
    assert not keys.is_new((1, "", "kept")), "its row may lie in a piece that was read before"
