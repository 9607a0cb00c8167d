"""Spans of OpenTelemetry, where an application has its API installed; without it nothing happens.

A commit, a claim, a handler and an ack are spans. The context of a commit goes with its events in
`meta` (`traceparent`), so the handler of an event is a child of the commit that stored it, in
whichever process it runs, and is linked to the lease under which it ran. Attributes name app,
stream, target and correlation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

trace: Any = None
"""The API, or None: then the application does not trace."""
propagate: Any = None
with suppress(ImportError):
    trace = import_module("opentelemetry.trace")
    propagate = import_module("opentelemetry.propagate")

Carrier = dict[str, Any]
"""What goes with events so that their handlers know the span that they came from."""
PREFIX = "fencepost."
FIELDS = frozenset(("traceparent", "tracestate"))
"""The only values of a propagator that are stored with events: baggage may hold secrets."""


@contextmanager
def span(
    name: str, attributes: Mapping[str, Any], *, cause: Mapping[str, Any] | None = None
) -> Iterator[Carrier]:
    """Run a block in a span; what it gives goes into the `meta` of events that the block stores.

    With `cause`, the `meta` of an event, the span is a child of the one that stored the event.
    """
    if trace is None:
        yield {}
        return
    tracer = trace.get_tracer("fencepost.events")
    parent, links = None, []
    if cause is not None:
        # The writer of the event wrote this, so it may be anything.
        carried = {
            key: value for key, value in cause.items() if key in FIELDS and isinstance(value, str)
        }
        if carried:
            parent = propagate.extract(carried)
            links = [trace.Link(trace.get_current_span().get_span_context())]
    with tracer.start_as_current_span(
        f"{PREFIX}{name}", context=parent, links=links, attributes=_named(attributes)
    ):
        found: Carrier = {}
        propagate.inject(found)
        yield {key: value for key, value in found.items() if key in FIELDS}


def mark(name: str, attributes: Mapping[str, Any]) -> None:
    """Show a moment as a span without a length, within the span that is current."""
    if trace is not None:
        tracer = trace.get_tracer("fencepost.events")
        tracer.start_span(f"{PREFIX}{name}", attributes=_named(attributes)).end()


def failed(error: Exception) -> None:
    """Note an error on the span that is current."""
    if trace is not None:
        current = trace.get_current_span()
        current.record_exception(error)
        current.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{PREFIX}{key}": value for key, value in attributes.items() if value is not None}
