"""Settings of the server: principals, grants, rates, and the settings of its parts.

A limit that has no name here does not exist: what a client can make the server hold or wait for is
bounded by one of these numbers, and going past one has its own answer. Settings are made once,
by the program that starts the server; nothing down here reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost.http.settings import HttpSettings
from fencepost.protocol.groups import GroupLimits
from fencepost.protocol.limits import Limits
from fencepost.protocol.sends import MeshLimits
from fencepost.protocol.sessions import SessionLimits
from fencepost.protocol.shares import Shares
from fencepost.server.subscriptions.settings import SubscriptionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSettings:
    """Verbs on the streams that some globs take."""

    streams: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalSettings:
    """How a principal is recognised, what it may do, and how fast; None is what [auth] says."""

    name: str
    token_sha256: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    producers: tuple[str, ...] = ("*",)
    grants: tuple[GrantSettings, ...] = ()
    appends_per_s: float | None = None
    claims_per_s: float | None = None
    raises_per_s: float | None = None
    open_claims_max: int | None = None
    abandon_ratio_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRuleSettings:
    """What holds for the producer ids that a glob takes."""

    match: str
    going_on: str = "shared"
    raising: str = "always"
    stale_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Who may do what. Without principals every request may do everything."""

    principals: tuple[PrincipalSettings, ...] = ()
    producer_rules: tuple[ProducerRuleSettings, ...] = ()

    jwt_keys: str = ""
    """File with the public keys that JWTs are signed with: a JWKS, or one key as PEM."""

    jwt_issuer: str = ""
    """The `iss` that a JWT must have."""

    jwt_audience: str = ""
    """The `aud` that a JWT must have, or have among others."""

    jwt_algorithms: tuple[str, ...] = ("EdDSA", "ES256", "RS256")
    """Signatures that are accepted; only asymmetric ones can be."""

    jwt_leeway_s: int = 30
    """How far the clocks of issuer and server may be apart."""

    metrics_open: bool = False
    """Whether `/metrics` needs no token; else it is for administrators."""

    readyz_open: bool = False
    """Whether `/readyz` needs no token; else it is for administrators."""

    claim_globs: tuple[str, ...] = ("task:*", "tool:*")
    """Producer ids that are claims."""

    stale_after_s: int = 60
    """How long the holder of a claim must have sent nothing for others to raise its epoch."""

    appends_per_s: float = 0.0
    """Appends a second of one principal; 0 is no limit."""

    claims_per_s: float = 1000.0
    """Claims a second of one principal; 0 is no limit."""

    raises_per_s: float = 1000.0
    """Raised epochs a second of one principal; 0 is no limit."""

    burst_s: float = 2.0
    """How many seconds' worth of a rate may come at once."""

    open_claims_max: int = 10_000
    """Claims of one principal that are open at once; 0 is no limit."""

    abandon_ratio_max: float = 0.0
    """The share of its claims that may be taken from a principal before it gets no more; 0: all."""

    read_token_s_max: int = 3_600
    """How long a read token (`POST /v1/tokens`) may be good."""

    audit_refusals_per_s: float = 10.0
    """Refusals a second that the audit stream keeps; what is beyond is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server behaves towards its readers and writers."""

    http: HttpSettings = field(default_factory=HttpSettings)
    limits: Limits = field(default_factory=Limits)
    subscriptions: SubscriptionSettings = field(default_factory=SubscriptionSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    groups: GroupLimits = field(default_factory=GroupLimits)
    mesh: MeshLimits = field(default_factory=MeshLimits)
    shares: Shares = field(default_factory=Shares)
    sessions: SessionLimits = field(default_factory=SessionLimits)

    long_poll_ms: int = 30_000
    """How long a long-poll waits for data before it is answered 204."""

    sse_ms: int = 60_000
    """How long an SSE connection lives, so that proxies can fold new readers into one."""

    drain_ms: int = 10_000
    """How long a stopping server waits for requests in flight."""

    allowed_origins: tuple[str, ...] = ("localhost",)
    """Without principals: origins whose pages may read and append. `localhost` stands for every
    origin on the machine of the browser, `*` for all."""

    allowed_hosts: tuple[str, ...] = ()
    """Without principals: host names that the server answers to, beside addresses and localhost.
    Empty: only those when it listens on this machine, every name otherwise."""

    node_host: str = ""
    """The name of this machine for other servers on the same database; they pass requests on to the
    one of them that leads. Empty: the address it listens on, or what the machine calls itself."""

    worker_port: int = 0
    """With several workers: the first has this port to itself beside the shared one, the second the
    next, and so on, so that each can be asked for its own metrics. 0: the system picks them."""
