"""Meshes: names, streams, settings."""

import pytest

from fencepost.protocol.meshes import (
    DAY_MS,
    BadMesh,
    Member,
    Mesh,
    MeshCreated,
    MeshDiffers,
    MeshSame,
    MeshSettings,
    Queue,
    Topic,
    decide_mesh,
    destination_path,
    is_managed,
    parse_settings,
    refuse_name,
)

SHOP = Mesh(1, "shop", MeshSettings(), 5)


def test_a_new_mesh_is_made_and_the_same_again_is_the_same() -> None:
    made = decide_mesh(None, "shop", MeshSettings(), mesh_id=1, now_ms=5)

    assert made == MeshCreated(SHOP)
    assert decide_mesh(SHOP, "shop", MeshSettings(), mesh_id=2, now_ms=6) == MeshSame(SHOP)


def test_a_mesh_with_other_settings_differs() -> None:
    other = MeshSettings(default_policy="prefer_oldest")

    assert decide_mesh(SHOP, "shop", other, mesh_id=2, now_ms=6) == MeshDiffers(SHOP)


def test_an_empty_body_stands_for_the_defaults() -> None:
    assert parse_settings(b"") == parse_settings(b"{}") == MeshSettings()
    assert MeshSettings() == MeshSettings("retention_scoped", 365, "prefer_newest")


def test_settings_are_read() -> None:
    body = b'{"dedupe_mode":"permanent","dedupe_retention_days":7,"default_policy":"prefer_oldest"}'

    assert parse_settings(body) == MeshSettings("permanent", 7, "prefer_oldest")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"dedupe_mode":"sometimes"}',
        b'{"dedupe_retention_days":6}',
        b'{"dedupe_retention_days":7.0}',
        b'{"dedupe_retention_days":true}',
        b'{"dedupe_retention_days":1000000}',
        b'{"default_policy":"prefer_me"}',
        b'{"dedupe_mode":"permanent","dedupe_mode":"permanent"}',
        b'{"colour":"red"}',
    ],
)
def test_settings_that_are_none_are_refused(body: bytes) -> None:
    assert isinstance(parse_settings(body), BadMesh)


def test_a_row_expires_after_the_days_of_its_mesh_or_never() -> None:
    week = Mesh(1, "shop", MeshSettings(dedupe_retention_days=7), 0)
    for_ever = Mesh(1, "shop", MeshSettings(dedupe_mode="permanent"), 0)

    assert week.expires_ms(1000) == 1000 + 7 * DAY_MS
    assert for_ever.expires_ms(1000) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a:b", "x" * 65, "é", "a\n", "*", ".", ".."])
def test_a_bad_name_is_refused(name: str) -> None:
    refused = refuse_name("topic", name)

    assert refused is not None
    assert refused.field == "topic"


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "...", "x" * 64])
def test_a_good_name_is_taken(name: str) -> None:
    assert refuse_name("topic", name) is None


def test_names_stand_for_streams_and_groups() -> None:
    assert Topic("shop", "alerts", 0).path == "__mesh/shop/topic/alerts"
    assert Member("shop", "ann", 0).path == "__mesh/shop/inbox/ann"
    assert Member("shop", "ann", 0).group == "mesh:shop:inbox:ann"
    assert Queue("shop", "mail", 0).path == "__mesh/shop/queue/mail"
    assert Queue("shop", "mail", 0).group == "mesh:shop:queue:mail"
    assert destination_path("shop", "dm", "ann") == "__mesh/shop/inbox/ann"


@pytest.mark.parametrize(
    ("path", "managed"),
    [
        ("__mesh", True),
        ("__mesh/shop", True),
        ("__mesh/shop/topic/alerts", True),
        ("__meshes/shop", False),
        ("orders/__mesh", False),
    ],
)
def test_only_sends_write_below_the_reserved_segment(path: str, managed: bool) -> None:
    assert is_managed(path) == managed
