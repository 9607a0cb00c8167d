"""Large bodies need a known sender and room, which they give back."""

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
