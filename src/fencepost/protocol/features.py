"""Negotiation: what a client needs of a server, held against what the server offers.

The server and the outbox decide by the same function, `check`: the server to refuse, the outbox to
make sure that an answer which says yes means it. A requirement is a version and floors; the first
one that is not met decides, in the order in which the client named them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from fencepost.protocol.meshes import DEDUPE_MODES, POLICIES, RETENTION_DAYS_MIN, MeshSettings
from fencepost.protocol.sends import SendLimits
from fencepost.protocol.strict_json import BadJson, parse

DEDUPE = "client_message_id_dedupe"
MAX_PAYLOAD = "max_payload"
POLICY = "concurrent_connection_policy"

PAYLOAD_BYTES_MIN = 1024
FEATURES_MAX = 32
"""Features that one negotiation may name."""

NOT_OFFERED = {
    "member_keypair_rotated_event": "members have no keypairs: there is no end-to-end encryption",
    "key_epoch": "keys have no epochs: there is no end-to-end encryption",
}
"""Features that the server knows by name and does not have, with the reason."""

_VERSIONS = {DEDUPE: 2, MAX_PAYLOAD: 1, POLICY: 1}
_FLOORS = {
    DEDUPE: {"dedupe_retention_days": RETENTION_DAYS_MIN},
    MAX_PAYLOAD: {"inline_bytes": PAYLOAD_BYTES_MIN, "blob_bytes": PAYLOAD_BYTES_MIN},
    POLICY: {},
}
_UNDERSTOOD = {
    DEDUPE: {
        "version",
        "mode",
        "dedupe_retention_days",
        "request_fingerprint",
        "tombstone_history_pruned_window_days",
    },
    MAX_PAYLOAD: {"version", "inline_bytes", "blob_bytes"},
    POLICY: {"version", "default_policy"},
}

Params = Mapping[str, Any]
Supported = Mapping[str, Params]
"""The params of each feature that a server has."""

FailureKind = Literal["feature_unavailable", "feature_param_invalid", "feature_param_below_floor"]
CLOSE_CODES: dict[FailureKind, int] = {
    "feature_unavailable": 4010,
    "feature_param_invalid": 4011,
    "feature_param_below_floor": 4012,
}


class FeatureRefused(NamedTuple):
    """A requirement is not met: which one, and why."""

    kind: FailureKind
    feature: str
    detail: str

    @property
    def close_code(self) -> int:
        return CLOSE_CODES[self.kind]


class Negotiated(NamedTuple):
    """Every requirement is met. `missing_optional` has the reason for each wish that is not."""

    supported: Supported
    missing_optional: dict[str, str]


class Wishes(NamedTuple):
    """What a client asks for: params by the name of the feature."""

    require: Mapping[str, object]
    optional: Mapping[str, object]


class BadWishes(NamedTuple):
    """The body is not a negotiation at all."""

    detail: str


def offered(settings: MeshSettings, limits: SendLimits, *, dedupes: bool) -> Supported:
    """What a mesh offers. With the switch for dedupe off, that feature is not there."""
    supported: dict[str, Params] = {
        MAX_PAYLOAD: {
            "version": 1,
            "inline_bytes": limits.inline_bytes_max,
            "blob_bytes": limits.blob_bytes_max,
        },
        POLICY: {"version": 1, "default_policy": settings.default_policy},
    }
    if dedupes:
        dedupe: dict[str, object] = {"version": 2, "mode": settings.dedupe_mode}
        if settings.dedupe_mode == "retention_scoped":
            dedupe["dedupe_retention_days"] = settings.dedupe_retention_days
        supported[DEDUPE] = {**dedupe, "request_fingerprint": True}
    return supported


def parse_wishes(data: bytes) -> Wishes | BadWishes:
    """The body of a negotiation; empty is to ask for nothing."""
    value = parse(data) if data else {}
    if isinstance(value, BadJson):
        return BadWishes(value.detail)
    return read_wishes(value)


def read_wishes(value: object) -> Wishes | BadWishes:
    """`require` and `optional` out of a JSON object that has no other fields."""
    if type(value) is not dict or not value.keys() <= {"require", "optional"}:
        return BadWishes("a negotiation is an object with require and optional")
    require, optional = value.get("require", {}), value.get("optional", {})
    if type(require) is not dict or type(optional) is not dict:
        return BadWishes("require and optional are objects: params by the name of the feature")
    if len(require) + len(optional) > FEATURES_MAX:
        return BadWishes(f"a negotiation names at most {FEATURES_MAX} features")
    return Wishes(require, optional)


def negotiate(wishes: Wishes, supported: Supported) -> Negotiated | FeatureRefused:
    """Whether `supported` is enough for a client."""
    for name, params in wishes.require.items():
        refused = check(name, params, supported)
        if refused is not None:
            return refused
    missing = {}
    for name, params in wishes.optional.items():
        refused = check(name, params, supported)
        if refused is not None:
            missing[name] = refused.detail
    return Negotiated(supported, missing)


def check(name: str, wanted: object, supported: Supported) -> FeatureRefused | None:
    """Why a requirement is not met; None when it is."""

    def refused(kind: FailureKind, detail: str) -> FeatureRefused:
        return FeatureRefused(kind, name, detail)

    has = supported.get(name)
    if has is None or name not in _VERSIONS:
        return refused("feature_unavailable", NOT_OFFERED.get(name, "the server does not have it"))
    if type(wanted) is not dict:
        return refused("feature_param_invalid", "the params of a feature are an object")
    for side, params in (("required", wanted), ("offered", has)):
        version = params.get("version")
        if name == DEDUPE and version == 1 and type(version) is int:
            return refused("feature_unavailable", f"{side} version 1 compares no fingerprints")
        if type(version) is not int or version != _VERSIONS[name]:
            known = _VERSIONS[name]
            return refused("feature_param_invalid", f"{side} version {version!r}, known is {known}")
    invalid = _invalid_wish(name, wanted) or _invalid_offer(name, has)
    if invalid is not None:
        return refused("feature_param_invalid", invalid)
    if name == POLICY:
        policy = wanted.get("default_policy", has["default_policy"])
        if policy != has["default_policy"]:
            return refused("feature_unavailable", f"the policy here is {has['default_policy']}")
    low = _below_floor(name, wanted, has)
    return None if low is None else refused("feature_param_below_floor", low)


def _invalid_wish(name: str, wanted: Params) -> str | None:
    unknown = sorted(wanted.keys() - _UNDERSTOOD[name])
    if unknown:
        return f"the param {unknown[0]!r} is unknown"
    for param in (*_FLOORS[name], "tombstone_history_pruned_window_days"):
        if param in wanted and not _is_count(wanted[param]):
            return f"{param} is a whole number from 0"
    if wanted.get("request_fingerprint", True) is not True:
        return "request_fingerprint is true"
    return _invalid_word(wanted)


def _invalid_offer(name: str, has: Params) -> str | None:
    needed = set(_FLOORS[name])
    if name == DEDUPE:
        if has.get("mode") == "permanent":
            needed = set()
        if "mode" not in has or has.get("request_fingerprint") is not True:
            return "the offer lacks mode or request_fingerprint"
    elif name == POLICY and "default_policy" not in has:
        return "the offer lacks default_policy"
    for param in needed:
        if not _is_count(has.get(param)):
            return f"the offer's {param} is no whole number from 0"
    return _invalid_word(has)


def _invalid_word(params: Params) -> str | None:
    for param, words in (("mode", DEDUPE_MODES), ("default_policy", POLICIES)):
        if param in params and params[param] not in words:
            return f"{param} is one of {', '.join(words)}"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _below_floor(name: str, wanted: Params, has: Params) -> str | None:
    if name == DEDUPE:
        if has["mode"] == "permanent":
            return None  # for ever is longer than any number of days
        if wanted.get("mode") == "permanent":
            return "mode is retention_scoped, and permanent is required"
    for param, floor in _FLOORS[name].items():
        least = max(floor, wanted.get(param, floor))
        if has[param] < least:
            return f"{param} is {has[param]}, at least {least} is required"
    return None


def supported_body(supported: Supported) -> dict[str, object]:
    """`GET …/features`."""
    return {"supported": {name: {"params": dict(params)} for name, params in supported.items()}}


def negotiated_body(negotiated: Negotiated) -> dict[str, object]:
    """The 200 of a negotiation, and the welcome of a session."""
    body = {**supported_body(negotiated.supported), "missing_required": []}
    if negotiated.missing_optional:
        body["missing_optional"] = negotiated.missing_optional
    return body


def refused_body(refused: FeatureRefused) -> dict[str, object]:
    """The 409 of a negotiation, beside its code and detail."""
    return {
        "close_code": refused.close_code,
        "kind": refused.kind,
        "feature": refused.feature,
        "detail": refused.detail,
        "missing_required": [refused.feature],
    }


def read_supported(data: bytes) -> Supported | BadWishes:
    """What a server says it has, out of its 200 or its welcome, to be checked again."""
    try:
        answer = _ANSWER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadWishes(f"the server's answer to the negotiation: {error}")
    return {name: feature.params for name, feature in answer.supported.items()}


class _Feature(msgspec.Struct):
    params: dict[str, Any]


class _Answer(msgspec.Struct):
    supported: dict[str, _Feature]


_ANSWER = msgspec.json.Decoder(_Answer)
