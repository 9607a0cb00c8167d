"""What a group may be made with, and how operators name its targets."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.groups import (
    FilterInvalid,
    Group,
    GroupExists,
    GroupInvalid,
    GroupLimits,
    GroupMade,
    GroupSettings,
    LimitExceeded,
    check_group_name,
    check_settings,
    check_text,
    decide_group,
    filter_glob,
    make_filter,
    suggest_glob,
)
from fencepost.protocol.timing import Backoff
from tests.unit.protocol.group_samples import PLAIN, group

LIMITS = GroupLimits()


def make(
    current: Group | None, settings: GroupSettings = PLAIN, *, groups_count: int = 0
) -> GroupMade | GroupExists | GroupInvalid | LimitExceeded:
    return decide_group(
        current,
        "billing",
        settings,
        group_id=7,
        groups_count=groups_count,
        limits=GroupLimits(groups_max=3),
        head=41,
        now_ms=5,
    )


@pytest.mark.parametrize("name", ["billing", "APP.orders.v2", "a-b_c", "...", ".a", "x" * 128])
def test_a_group_name_has_letters_digits_and_three_signs(name: str) -> None:
    assert check_group_name(name) is None


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "x" * 129, "mesh:m:queue:q", "a\0", "é", "a\n", ".", ".."]
)
def test_other_group_names_are_refused(name: str) -> None:
    assert isinstance(check_group_name(name), GroupInvalid)


def test_a_name_of_a_mesh_is_for_the_server_alone() -> None:
    assert check_group_name("mesh:m:inbox:ann", of_mesh=True) is None
    assert check_group_name("mesh:m:other:ann", of_mesh=True) is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sources": ()}, "sources"),
        ({"sources": ("a//b",)}, "sources"),
        ({"sources": tuple(f"s{n}" for n in range(65))}, "sources"),
        ({"names": ("",)}, "names"),
        ({"names": ("a\0b",)}, "names"),
        ({"names": tuple(f"n{n}" for n in range(65))}, "names"),
        ({"lease_ms": 999}, "lease_ms"),
        ({"lease_ms": 600_001}, "lease_ms"),
        ({"retries_max": -1}, "retries_max"),
        ({"retries_max": 1_001}, "retries_max"),
        ({"lost_max": -1}, "lost_max"),
        ({"backoff": Backoff("fixed", -1, 10)}, "backoff.base_ms"),
        ({"backoff": Backoff("fixed", 11, 10)}, "backoff.base_ms"),
        ({"backoff": Backoff("fixed", 1, 8 * 86_400_000)}, "backoff.cap_ms"),
        ({"backoff": Backoff("fixed", 1, 10, 1.5)}, "backoff.jitter"),
        ({"backoff": Backoff("fixed", 1, 10, float("nan"))}, "backoff.jitter"),
        ({"start": -2}, "start"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    refused = check_settings(msgspec.structs.replace(PLAIN, **changes), LIMITS)

    assert isinstance(refused, GroupInvalid)
    assert refused.detail.startswith(named)


def test_the_defaults_are_the_ones_of_the_drain() -> None:
    settings = GroupSettings(sources=("orders/**",))

    assert check_settings(settings, LIMITS) is None
    assert (settings.lease_ms, settings.retries_max, settings.on_exhausted) == (10_000, 3, "block")


@pytest.mark.parametrize("text", ["", "x" * 257, "a\0", "a\x7f"])
def test_a_short_text_has_a_length_and_no_control_characters(text: str) -> None:
    assert check_text("worker", text) is not None


def test_a_group_begins_at_the_first_event_at_the_head_or_at_a_position() -> None:
    starts = []
    for start in ("first", "now", 12):
        made = make(None, msgspec.structs.replace(PLAIN, start=start))
        assert isinstance(made, GroupMade)
        assert made.fresh
        assert made.group.start == made.group.watermark
        starts.append(made.group.start)

    assert starts == [-1, 41, 12]


def test_a_group_cannot_begin_past_the_head_of_the_log() -> None:
    refused = make(None, msgspec.structs.replace(PLAIN, start=42))

    assert isinstance(refused, GroupInvalid)


def test_the_same_settings_in_another_order_are_the_same_group() -> None:
    settings = msgspec.structs.replace(PLAIN, sources=("b", "a", "b"))
    first = make(None, settings)
    assert isinstance(first, GroupMade)

    again = make(first.group, msgspec.structs.replace(PLAIN, sources=("a", "b")))

    assert again == GroupMade(first.group, fresh=False)


def test_other_settings_are_refused_with_the_group_that_exists() -> None:
    there = group()

    assert make(there, msgspec.structs.replace(PLAIN, lost_max=9)) == GroupExists(there)


def test_the_number_of_groups_is_bounded() -> None:
    assert make(None, groups_count=3) == LimitExceeded("groups_max", 3)


def test_settings_come_through_json_unchanged() -> None:
    encoded = msgspec.json.encode(PLAIN)

    assert msgspec.json.decode(encoded, type=GroupSettings) == PLAIN


@pytest.mark.parametrize(
    ("regular", "glob"),
    [
        ("^webhooks-out-", "webhooks-out-*"),
        ("^orders/", "orders/**"),
        ("^orders/.*$", "orders/**"),
        (r"^a\.b\d+/x$", "a.b*/x"),
        ("foo$", "*foo"),
        (".*", "*"),
        ("^(a|b)/x$", "*/x"),
    ],
)
def test_a_regular_expression_is_refused_with_the_glob_to_use(regular: str, glob: str) -> None:
    refused = filter_glob("target", regular)

    assert isinstance(refused, FilterInvalid)
    assert f"use {glob!r}" in refused.detail


@pytest.mark.parametrize("text", ["orders/7", "orders/**", "$snapshots/*", "reports.*", "a@12"])
def test_exact_names_and_globs_are_no_regular_expressions(text: str) -> None:
    glob = filter_glob("target", text)

    assert not isinstance(glob, FilterInvalid)
    assert glob.text == text


@given(st.from_regex(r"[\^]?[a-z0-9/.*+\\d\[\]()|$-]{1,40}[$]?", fullmatch=True))
def test_a_suggested_glob_is_a_glob(regular: str) -> None:
    """Whatever was written, the sentence that refuses it proposes a pattern that is accepted."""
    glob = parse_glob(suggest_glob(regular))

    assert not isinstance(glob, BadGlob)


@pytest.mark.parametrize("field", ["target", "source", "lane"])
def test_a_filter_names_the_field_that_is_wrong(field: str) -> None:
    texts: dict[str, Any] = {field: "a//b"}

    refused = make_filter(**texts)

    assert isinstance(refused, FilterInvalid)
    assert refused.detail.startswith(field)


def test_a_filter_matches_what_all_its_fields_match() -> None:
    chosen = make_filter(target="orders/*", blocked=True, lane="slow")
    everything = make_filter()

    assert not isinstance(chosen, FilterInvalid)
    assert not isinstance(everything, FilterInvalid)
    assert chosen.matches("orders/7", "orders/7", "slow", blocked=True)
    assert not chosen.matches("orders/7", "orders/7", "slow", blocked=False)
    assert not chosen.matches("orders/7", "orders/7", "fast", blocked=True)
    assert everything.matches("x", "y", "z", blocked=False)
