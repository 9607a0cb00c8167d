"""The whole surface on one screen: every path, who may use it, and the handler of each method.

To add a route, add a row here. `tests/integration/test_openapi.py` then asks for it in
openapi.json, and `test_auth_routes.py` for the verbs that it needs.

A path in braces is a part of the URL that the handler gets, as raw bytes: `{name}` is one segment,
`{name...}` is all that is left, slashes included.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, NamedTuple

from fencepost.http.messages import Answer, Request
from fencepost.protocol.fingerprints import Kind
from fencepost.server.groups.http import Groups
from fencepost.server.handlers.commits import Commits
from fencepost.server.handlers.fields import STREAM_ROOT
from fencepost.server.handlers.lists import Lists
from fencepost.server.handlers.logs import Logs
from fencepost.server.handlers.operations import Operations
from fencepost.server.handlers.staging import Staging
from fencepost.server.handlers.streams import Streams
from fencepost.server.handlers.tokens import Tokens
from fencepost.server.handlers.writers import Writers
from fencepost.server.mesh.http import Meshes
from fencepost.server.settings import AuthSettings
from fencepost.server.subscriptions.cluster import LedSubscriptions, OwnSubscriptions
from fencepost.server.subscriptions.http import SubscriptionHandlers as Subscription

Respond = Callable[[Answer], None]

_STREAM_START = len(STREAM_ROOT)

Who = Literal["all", "principals", "administrators", "wake token"]
"""Who may use a route. `all` needs no token. `principals` stands for all of them: the handler
checks the verbs, because only it knows the streams that a request is about. A wake token stands for
a principal."""


class Direct(NamedTuple):
    """A handler that answers through a callback, so that an append needs no task of its own.

    It is called with the request, the callback, and the parts of the path. Work that it returns is
    awaited for the answer.
    """

    call: Callable[..., Awaitable[Answer] | None]


Handler = Direct | Callable[..., Awaitable[Answer]]
"""A direct handler, or an async one: called with the request and the parts of the path."""


class Route:
    """One row: a path and the handlers of its methods, `"GET, HEAD"` for two with the same one."""

    __slots__ = ("allowed", "handlers", "path", "pattern", "who")

    def __init__(self, path: str, who: Who, **handlers: Handler) -> None:
        self.path = path
        self.who = who
        self.handlers = {
            method: handler
            for methods, handler in handlers.items()
            for method in methods.split("_or_")
        }
        self.allowed = ", ".join((*self.handlers, "OPTIONS"))
        """The value of the header Allow."""
        pattern = re.sub(r"\\\{\w+\\\.\\\.\\\.\\\}", "(.*)", re.escape(path))
        self.pattern = re.compile(re.sub(r"\\\{\w+\\\}", "([^/]*)", pattern).encode(), re.DOTALL)


class Handlers(NamedTuple):
    """Everything that answers requests."""

    streams: Streams
    commits: Commits
    staging: Staging
    logs: Logs
    lists: Lists
    writers: Writers
    tokens: Tokens
    groups: Groups
    meshes: Meshes
    operations: Operations
    subscriptions: OwnSubscriptions | LedSubscriptions


def routes(to: Handlers, auth: AuthSettings) -> tuple[Route, ...]:
    """Every route of the server. That of the streams comes first: most requests are theirs."""
    run = to.subscriptions.run_handler
    readyz: Who = "all" if auth.readyz_open else "administrators"
    metrics: Who = "all" if auth.metrics_open else "administrators"
    subscription = "/v1/stream/__ds/subscriptions/{id}"
    group = "/v1/groups/{group}"
    mesh, meshes = "/v1/mesh/{mesh}", to.meshes
    return (
        Route(
            "/v1/stream/{path...}",
            "principals",
            GET=to.streams.get,
            HEAD=to.streams.head,
            POST=Direct(to.streams.post),
            PUT=Direct(to.streams.put),
            DELETE=Direct(to.streams.delete),
        ),
        Route("/v1/commit", "principals", POST=Direct(to.commits.commit)),
        Route(
            "/v1/staging/{part...}",
            "principals",
            POST=Direct(to.staging.stage),
            DELETE=Direct(to.staging.unstage),
        ),
        Route("/v1/log", "principals", GET=to.logs.read, HEAD=to.logs.head),
        Route("/v1/log/plan", "principals", GET_or_HEAD=to.logs.plan),
        Route("/v1/streams", "principals", GET_or_HEAD=to.lists.streams),
        Route("/v1/producers", "principals", GET_or_HEAD=to.lists.producers),
        Route("/v1/keys", "principals", GET_or_HEAD=to.lists.keys),
        Route("/v1/writers", "principals", GET_or_HEAD=to.writers.list),
        Route(
            "/v1/writers/{name...}",
            "principals",
            GET_or_HEAD=to.writers.show,
            POST=to.writers.open,
            DELETE=to.writers.forget,
        ),
        Route("/v1/writer-history/{name...}", "principals", GET_or_HEAD=to.writers.history),
        Route("/v1/tokens", "principals", POST=to.tokens.make),
        Route("/v1/groups", "principals", GET_or_HEAD=to.groups.list),
        Route(
            group,
            "principals",
            GET_or_HEAD=to.groups.show,
            PUT=to.groups.put,
            DELETE=to.groups.delete,
        ),
        Route(f"{group}/correlate", "principals", POST=to.groups.correlate),
        Route(f"{group}/claim", "principals", POST=to.groups.claim),
        Route(f"{group}/ack", "principals", POST=to.groups.ack),
        Route(f"{group}/renew", "principals", POST=to.groups.renew),
        Route(f"{group}/release", "principals", POST=to.groups.release),
        Route(f"{group}/unblock", "principals", POST=to.groups.unblock),
        Route(f"{group}/reset", "principals", POST=to.groups.reset),
        Route(f"{group}/defer", "principals", POST=to.groups.defer),
        Route(f"{group}/prioritize", "principals", POST=to.groups.prioritize),
        Route(f"{group}/skip", "principals", POST=to.groups.skip),
        Route(f"{group}/park", "principals", POST=to.groups.park),
        Route(f"{group}/replay", "principals", POST=to.groups.replay),
        Route(f"{group}/streams", "principals", GET_or_HEAD=to.groups.streams),
        Route(f"{group}/parked", "principals", GET_or_HEAD=to.groups.parked),
        Route(f"{group}/workers", "principals", GET_or_HEAD=to.groups.workers),
        Route(f"{group}/stats", "principals", GET_or_HEAD=to.groups.stats),
        Route(f"{group}/events", "principals", GET_or_HEAD=to.groups.events),
        Route("/v1/mesh", "principals", GET_or_HEAD=meshes.list),
        Route(
            mesh,
            "principals",
            GET_or_HEAD=meshes.show,
            PUT=meshes.put,
            DELETE=meshes.delete,
        ),
        *_names(f"{mesh}/members", "member", meshes, "dm"),
        *_names(f"{mesh}/topics", "topic", meshes, "topic"),
        *_names(f"{mesh}/queues", "queue", meshes, "queue"),
        Route(f"{mesh}/topics/{{topic}}/members", "principals", GET_or_HEAD=meshes.topic_members),
        Route(
            f"{mesh}/topics/{{topic}}/members/{{member}}",
            "principals",
            GET_or_HEAD=meshes.show_member,
            PUT=meshes.join,
            DELETE=meshes.leave,
        ),
        Route(f"{mesh}/send", "principals", POST=Direct(meshes.send)),
        Route(f"{mesh}/sends", "principals", POST=meshes.send_all),
        Route(f"{mesh}/features", "principals", GET_or_HEAD=meshes.features),
        Route(f"{mesh}/negotiate", "principals", POST=meshes.negotiate),
        Route(f"{mesh}/session", "principals", GET_or_HEAD=meshes.session),
        Route(f"{mesh}/dedupe", "principals", GET_or_HEAD=meshes.dedupe),
        Route(f"{mesh}/check", "principals", POST=meshes.check),
        Route(f"{mesh}/rebuild", "principals", POST=meshes.rebuild),
        Route(f"{mesh}/sweep", "principals", POST=meshes.sweep),
        Route("/v1/subscriptions", "principals", GET_or_HEAD=run(Subscription.list)),
        Route(
            subscription,
            "principals",
            GET_or_HEAD=run(Subscription.get),
            PUT=run(Subscription.put),
            DELETE=run(Subscription.delete),
        ),
        Route(f"{subscription}/streams", "principals", POST=run(Subscription.link)),
        Route(f"{subscription}/streams/{{path...}}", "principals", DELETE=run(Subscription.unlink)),
        Route(f"{subscription}/claim", "principals", POST=run(Subscription.claim)),
        Route(f"{subscription}/ack", "wake token", POST=run(Subscription.ack)),
        Route(f"{subscription}/callback", "wake token", POST=run(Subscription.ack)),
        Route(f"{subscription}/release", "wake token", POST=run(Subscription.release)),
        Route("/v1/stream/__ds/jwks.json", "all", GET_or_HEAD=to.subscriptions.show_keys),
        Route("/v1/openapi.json", "principals", GET_or_HEAD=to.operations.openapi),
        Route("/healthz", "all", GET_or_HEAD=to.operations.healthz),
        Route("/readyz", readyz, GET_or_HEAD=to.operations.readyz),
        Route("/metrics", metrics, GET_or_HEAD=to.operations.metrics),
    )


def _names(path: str, noun: str, meshes: Meshes, kind: Kind) -> tuple[Route, Route]:
    """The routes of the members, topics or queues of a mesh."""
    return (
        Route(path, "principals", GET_or_HEAD=partial(meshes.names, kind=kind)),
        Route(
            f"{path}/{{{noun}}}",
            "principals",
            GET_or_HEAD=partial(meshes.show_name, kind=kind),
            PUT=partial(meshes.put_name, kind=kind),
            DELETE=partial(meshes.delete_name, kind=kind),
        ),
    )


def takes_websocket(path: bytes) -> bool:
    """Whether a request for this raw path may become a WebSocket: that of a session."""
    return path.startswith(b"/v1/mesh/") and path.endswith(b"/session")


class Table:
    """Finds the route of a path."""

    def __init__(self, rows: tuple[Route, ...]) -> None:
        self._streams, *others = rows
        self._fixed = {row.path.encode(): row for row in others if "{" not in row.path}
        self._patterns = [row for row in others if "{" in row.path]

    def find(self, request: Request) -> tuple[Route | None, tuple[bytes, ...]]:
        """The route of a request and the parts of its path; None when there is no such path."""
        path = request.path
        if path.startswith(STREAM_ROOT):
            name = path[_STREAM_START:]
            if name[:5] != b"__ds/":
                return self._streams, (name,)
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, ()
        for row in self._patterns:
            found = row.pattern.fullmatch(path)
            if found is not None:
                return row, found.groups()
        return None, ()
