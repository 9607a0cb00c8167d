"""Negotiation: requirements held against offers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.features import (
    DEDUPE,
    MAX_PAYLOAD,
    NOT_OFFERED,
    POLICY,
    BadWishes,
    FeatureRefused,
    Negotiated,
    Wishes,
    check,
    negotiate,
    negotiated_body,
    offered,
    parse_wishes,
    read_supported,
    refused_body,
)
from fencepost.protocol.meshes import MeshSettings
from fencepost.protocol.sends import SendLimits

LIMITS = SendLimits(inline_bytes_max=2048, blob_bytes_max=4096)
OFFER = offered(MeshSettings(dedupe_retention_days=30), LIMITS, dedupes=True)
FOR_EVER = offered(MeshSettings(dedupe_mode="permanent"), LIMITS, dedupes=True)
V2 = {"version": 2}


def kind_of(name: str, params: object, supported: Any = OFFER) -> str | None:
    refused = check(name, params, supported)
    return None if refused is None else refused.kind


def test_a_mesh_offers_three_features_with_their_params() -> None:
    assert OFFER == {
        DEDUPE: {
            "version": 2,
            "mode": "retention_scoped",
            "dedupe_retention_days": 30,
            "request_fingerprint": True,
        },
        MAX_PAYLOAD: {"version": 1, "inline_bytes": 2048, "blob_bytes": 4096},
        POLICY: {"version": 1, "default_policy": "prefer_newest"},
    }


@pytest.mark.parametrize(
    ("name", "params"),
    [
        (DEDUPE, V2),
        (DEDUPE, {**V2, "mode": "retention_scoped", "dedupe_retention_days": 30}),
        (DEDUPE, {**V2, "request_fingerprint": True}),
        (DEDUPE, {**V2, "tombstone_history_pruned_window_days": 3}),
        (MAX_PAYLOAD, {"version": 1, "inline_bytes": 2048}),
        (POLICY, {"version": 1, "default_policy": "prefer_newest"}),
        (POLICY, {"version": 1}),
    ],
)
def test_a_requirement_that_is_met_is_welcome(name: str, params: dict[str, object]) -> None:
    assert check(name, params, OFFER) is None


@pytest.mark.parametrize(
    ("name", "params", "kind"),
    [
        ("teleport", {"version": 1}, "feature_unavailable"),
        (DEDUPE, {"version": 1}, "feature_unavailable"),
        (POLICY, {"version": 1, "default_policy": "prefer_oldest"}, "feature_unavailable"),
        (DEDUPE, {}, "feature_param_invalid"),
        (DEDUPE, [], "feature_param_invalid"),
        (DEDUPE, {"version": 3}, "feature_param_invalid"),
        (DEDUPE, {"version": "2"}, "feature_param_invalid"),
        (DEDUPE, {"version": 2.0}, "feature_param_invalid"),
        (MAX_PAYLOAD, {"version": True}, "feature_param_invalid"),
        (DEDUPE, {**V2, "mode": "sometimes"}, "feature_param_invalid"),
        (DEDUPE, {**V2, "request_fingerprint": False}, "feature_param_invalid"),
        (DEDUPE, {**V2, "request_fingerprint": 1}, "feature_param_invalid"),
        (DEDUPE, {**V2, "dedupe_retention_days": "30"}, "feature_param_invalid"),
        (DEDUPE, {**V2, "colour": "red"}, "feature_param_invalid"),
        (POLICY, {"version": 1, "default_policy": "prefer_me"}, "feature_param_invalid"),
        (DEDUPE, {**V2, "dedupe_retention_days": 31}, "feature_param_below_floor"),
        (DEDUPE, {**V2, "mode": "permanent"}, "feature_param_below_floor"),
        (MAX_PAYLOAD, {"version": 1, "blob_bytes": 4097}, "feature_param_below_floor"),
    ],
)
def test_a_requirement_that_is_not_met_says_why(name: str, params: object, kind: str) -> None:
    assert kind_of(name, params) == kind


def test_for_ever_is_longer_than_any_number_of_days() -> None:
    params = {**V2, "mode": "retention_scoped", "dedupe_retention_days": 100_000}

    assert kind_of(DEDUPE, params, FOR_EVER) is None


@pytest.mark.parametrize(
    ("offer", "kind"),
    [
        ({"version": 1}, "feature_unavailable"),
        ({"version": 9}, "feature_param_invalid"),
        (V2, "feature_param_invalid"),
        ({**V2, "mode": "permanent"}, "feature_param_invalid"),
        ({**V2, "mode": "retention_scoped", "request_fingerprint": True}, "feature_param_invalid"),
        ({**V2, "mode": "x", "request_fingerprint": True}, "feature_param_invalid"),
        (
            {
                **V2,
                "mode": "retention_scoped",
                "dedupe_retention_days": 6,
                "request_fingerprint": True,
            },
            "feature_param_below_floor",
        ),
    ],
)
def test_a_daemon_checks_the_offer_of_a_server_by_the_same_rules(
    offer: dict[str, object], kind: str
) -> None:
    assert kind_of(DEDUPE, V2, {DEDUPE: offer}) == kind


def test_with_dedupe_switched_off_the_feature_is_not_there() -> None:
    off = offered(MeshSettings(), LIMITS, dedupes=False)

    refused = negotiate(Wishes({DEDUPE: V2}, {}), off)

    assert isinstance(refused, FeatureRefused)
    assert (refused.close_code, refused.kind, refused.feature) == (
        4010,
        "feature_unavailable",
        DEDUPE,
    )
    assert refused_body(refused)["missing_required"] == [DEDUPE]


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_feature_that_is_not_offered_has_a_reason(name: str) -> None:
    required = negotiate(Wishes({name: {"version": 1}}, {}), OFFER)
    wished = negotiate(Wishes({}, {name: {"version": 1}}), OFFER)

    assert isinstance(required, FeatureRefused)
    assert "encryption" in required.detail
    assert isinstance(wished, Negotiated)
    assert negotiated_body(wished)["missing_optional"] == {name: NOT_OFFERED[name]}


def test_the_first_requirement_that_is_not_met_decides() -> None:
    refused = negotiate(Wishes({MAX_PAYLOAD: {"version": 7}, "teleport": {}}, {}), OFFER)

    assert isinstance(refused, FeatureRefused)
    assert (refused.close_code, refused.feature) == (4011, MAX_PAYLOAD)


def test_the_answer_of_a_server_can_be_checked_again() -> None:
    wishes = Wishes({DEDUPE: V2}, {MAX_PAYLOAD: {"version": 1}})
    agreed = negotiate(wishes, OFFER)
    assert isinstance(agreed, Negotiated)
    body = negotiated_body(agreed)
    assert body["missing_required"] == []
    assert "missing_optional" not in body

    read = read_supported(json.dumps(body).encode())

    assert read == OFFER
    assert negotiate(wishes, read) == agreed


@pytest.mark.parametrize(
    "data", [b"[]", b"{", b'{"want":{}}', b'{"require":[]}', b'{"require":{"a":1,"a":1}}']
)
def test_a_body_that_is_no_negotiation_is_refused(data: bytes) -> None:
    assert isinstance(parse_wishes(data), BadWishes)


def test_an_empty_body_asks_for_nothing() -> None:
    assert parse_wishes(b"") == parse_wishes(b"{}") == Wishes({}, {})


def test_too_many_features_are_refused() -> None:
    many = json.dumps({"require": {f"f{number}": {} for number in range(33)}}).encode()

    assert isinstance(parse_wishes(many), BadWishes)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 40) | st.sampled_from(["permanent", "x"]),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
PARAMS = st.dictionaries(
    st.sampled_from(
        ["version", "mode", "dedupe_retention_days", "request_fingerprint", "inline_bytes", "x"]
    ),
    VALUES,
)


@given(
    st.sampled_from([DEDUPE, MAX_PAYLOAD, POLICY, "key_epoch", "x"]),
    PARAMS | VALUES,
    st.dictionaries(st.sampled_from([DEDUPE, MAX_PAYLOAD, POLICY]), PARAMS) | st.just(OFFER),
)
def test_whatever_is_asked_and_offered_there_is_an_answer(
    name: str, params: object, supported: Any
) -> None:
    """No params, however odd, on either side make the check fail; and dedupe without fingerprints
    is never agreed on."""
    refused = check(name, params, supported)

    if name == DEDUPE and refused is None:
        assert supported[DEDUPE]["request_fingerprint"] is True
        assert supported[DEDUPE]["version"] == 2
