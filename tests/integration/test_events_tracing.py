"""Spans: an event, its handler and the effect are one trace, across processes and attempts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.events_support import Opening, listed
from tests.integration.events_support import opening as opening
from tests.unit.events.shop import Order, make_app

_numbers = itertools.count()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is traced; the global provider of OpenTelemetry can be set only once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str, **facts: str) -> list[ReadableSpan]:
    """Spans of a name; an app of one test sees the orders of the others too."""
    return [
        span
        for span in spans.get_finished_spans()
        if span.name == f"fencepost.{name}"
        and all(fact(span, key) == value for key, value in facts.items())
    ]


def fact(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(f"fencepost.{name}")


async def test_an_event_its_handler_and_the_effect_are_one_trace(
    opening: Opening, spans: InMemorySpanExporter
) -> None:
    name = f"traced{next(_numbers)}"
    async with opening(make_app(name)) as shop:
        done = await shop.do(Order.place, name, sku=name)
        await shop.settle()
        [effect] = await listed(shop.query(stream=f"stock/{name}"))

    [commit] = named(spans, "commit", stream=f"orders/{name}")
    [handle] = named(spans, "handle", stream=f"orders/{name}")
    [claim] = named(spans, "claim", target=f"stock/{name}")
    assert named(spans, "ack", target=f"stock/{name}")
    assert commit.context is not None
    assert handle.context is not None
    assert handle.parent is not None
    assert handle.parent.span_id == commit.context.span_id
    assert handle.links[0].context == claim.context
    trace_id = f"{commit.context.trace_id:032x}"
    assert done.events[0].meta["traceparent"].split("-")[1] == trace_id
    assert effect.meta["traceparent"].split("-")[1:3] == [
        trace_id,
        f"{handle.context.span_id:016x}",
    ]
    correlation = done.events[0].correlation
    assert {fact(commit, "correlation"), fact(handle, "correlation")} == {correlation}


async def test_a_failing_attempt_shows_its_error(
    opening: Opening, spans: InMemorySpanExporter
) -> None:
    name = f"traced{next(_numbers)}"
    async with opening(make_app(name)) as shop:
        await shop.do(Order.place, name, sku=name, quantity=101)
        await shop.settle()

    attempts = named(spans, "handle", stream=f"orders/{name}")
    assert [fact(span, "attempt") for span in attempts] == [1, 2, 3]
    assert {span.status.description for span in attempts} == {"InvariantError"}
    assert len(named(spans, "block", target=f"stock/{name}")) == 1


async def test_without_a_provider_events_carry_nothing(opening: Opening) -> None:
    name = f"traced{next(_numbers)}"
    async with opening(make_app(name)) as shop:
        done = await shop.do(Order.place, name, sku=name)

    assert set(done.events[0].meta) == {"correlation"}
