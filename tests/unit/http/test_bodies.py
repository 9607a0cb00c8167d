"""Large bodies need a known sender and room, which they give back; small ones are counted."""

from __future__ import annotations

import pytest

from fencepost.http.bodies import Bodies, Place
from fencepost.http.settings import HttpSettings
from fencepost.http.wire import Refusal

NONE: frozenset[bytes] = frozenset()
LIMITS = HttpSettings(bodies_bytes_max=100, bodies_bytes_per_principal_max=60)


def bodies(settings: HttpSettings = LIMITS) -> Bodies:
    """Bodies whose senders give their names, or none."""

    def knows(headers: dict[bytes, bytes], _repeated: frozenset[bytes]) -> str | None:
        name = headers.get(b"name")
        return None if name is None else name.decode()

    return Bodies(settings, knows)


def of(found: Bodies, name: str, size: int) -> Place:
    return found.place({b"name": name.encode()}, NONE, size)


def test_a_sender_that_is_not_known_gets_no_room() -> None:
    with pytest.raises(Refusal) as refused:
        bodies().place({}, NONE, 1)

    assert (refused.value.status, refused.value.code) == (401, "unauthorized")


def test_one_principal_has_its_share_and_all_together_have_theirs() -> None:
    found = bodies()
    kept = [of(found, "ann", 50), of(found, "bob", 40)]

    for name, limit in (("ann", "bodies_bytes_per_principal_max"), ("cid", "bodies_bytes_max")):
        with pytest.raises(Refusal, match=limit) as refused:
            of(found, name, 11)
        assert (refused.value.status, refused.value.code) == (503, "too_many_bodies")
    assert found.bytes == 90
    del kept
    assert found.bytes == 0


def test_room_that_a_body_gives_back_is_there_for_the_next() -> None:
    found = bodies()
    for _ in range(10):
        place = of(found, "ann", 60)
        del place

    assert found.bytes == 0


def test_a_body_of_unknown_length_takes_room_as_it_grows() -> None:
    found = bodies()
    place = of(found, "ann", 20)
    place.grow(20)
    held = found.bytes
    with pytest.raises(Refusal):
        place.grow(30)

    assert held == found.bytes == 40


def test_one_body_fits_however_small_the_limits_are() -> None:
    found = bodies(HttpSettings(bodies_bytes_max=1, bodies_bytes_per_principal_max=1))
    place = of(found, "ann", 1000)

    assert found.bytes == 1000
    del place


def test_without_principals_all_clients_share_the_whole() -> None:
    found = Bodies(LIMITS, None)
    kept = [found.place({}, NONE, 50), found.place({}, NONE, 50)]

    with pytest.raises(Refusal, match="bodies_bytes_max"):
        found.place({}, NONE, 1)
    del kept


# Small bodies


def counted(found: Bodies, *kept: tuple[str | None, int]) -> Bodies:
    found.begin_count()
    for sender, size in kept:
        found.keep(sender, size)
    found.end_count()
    return found


def test_a_sender_whose_requests_fill_its_share_is_not_read_ahead() -> None:
    found = counted(bodies(), ("ann", 60), ("bob", 20))

    assert found.is_crowded
    assert not found.reads_ahead("ann")
    assert found.reads_ahead("bob")
    assert counted(found, ("bob", 20)).reads_ahead("ann")


def test_nobody_is_read_ahead_when_all_together_fill_the_whole() -> None:
    found = counted(bodies(), ("ann", 50), ("bob", 50))

    assert [name for name in ("ann", "bob") if found.reads_ahead(name)] == []


def test_large_and_small_bodies_share_their_limits() -> None:
    found = bodies()
    place = of(found, "ann", 30)
    counted(found, ("ann", 25))

    with pytest.raises(Refusal, match="bodies_bytes_per_principal_max"):
        place.grow(6)
    found.begin_count()
    refusal = found.refuse("ann", 31)
    assert refusal is not None
    assert "bodies_bytes_per_principal_max" in refusal.detail
    assert found.refuse("ann", 30) is None


def test_bodies_without_a_token_have_a_room_of_their_own() -> None:
    found = bodies(HttpSettings(open_bodies_bytes_max=10))
    found.begin_count()

    assert found.refuse(None, 10) is None
    refusal = found.refuse(None, 1)
    assert refusal is not None
    assert "open_bodies_bytes_max" in refusal.detail
    assert found.refuse("ann", 1000) is None


def test_what_is_refused_is_not_counted() -> None:
    found = bodies()
    found.begin_count()
    assert found.refuse("ann", 61) is not None
    found.end_count()

    assert found.small_bytes == 0
    assert not found.is_crowded
