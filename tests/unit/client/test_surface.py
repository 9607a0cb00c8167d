"""What the package shows: every public name, the same for sync and async, and nothing heavy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import fencepost

TWINS = [
    (fencepost.Client, fencepost.AsyncClient),
    (fencepost.Stream, fencepost.AsyncStream),
    (fencepost.Group, fencepost.AsyncGroup),
    (fencepost.Reading, fencepost.AsyncReading),
    (fencepost.Listing, fencepost.AsyncListing),
    (fencepost.LogReading, fencepost.AsyncLogReading),
    (fencepost.IdempotentProducer, fencepost.AsyncIdempotentProducer),
    (fencepost.Delivery, fencepost.AsyncDelivery),
    (fencepost.Subscription, fencepost.AsyncSubscription),
    (fencepost.Wake, fencepost.AsyncWake),
    (fencepost.WebhookVerifier, fencepost.AsyncWebhookVerifier),
]
ASYNC_ONLY = {"AsyncDelivery": {"wake"}}
"""What the producer calls on its own batches."""


def test_what_is_listed_is_importable_and_sorted() -> None:
    assert fencepost.__all__ == sorted(fencepost.__all__)
    public = {
        name
        for name, value in vars(fencepost).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(fencepost.__all__) == public


def test_every_error_is_public_has_a_docstring_and_one_root() -> None:
    from fencepost.client import errors

    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    for name, value in classes.items():
        assert issubclass(value, fencepost.FencepostError)
        assert getattr(fencepost, name) is value
        assert value.__doc__, name


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS)
def test_sync_and_async_have_the_same_names_and_signatures(
    sync: type[Any], asynchronous: type[Any]
) -> None:
    extra = ASYNC_ONLY.get(asynchronous.__name__, set())
    assert _public(asynchronous) - extra == _public(sync)
    for name in _public(sync):
        ours, theirs = getattr(sync, name), getattr(asynchronous, name)
        assert type(ours) is type(theirs), name
        if not inspect.isfunction(ours):
            continue
        ours_seen, theirs_seen = inspect.signature(ours), inspect.signature(theirs)
        assert _parameters(ours_seen) == _parameters(theirs_seen), name
        renamed = str(theirs_seen.return_annotation).replace("Async", "")
        assert str(ours_seen.return_annotation).replace("Async", "") == renamed, name
        assert inspect.getdoc(ours) == inspect.getdoc(theirs), name


def test_the_two_front_doors_are_alike() -> None:
    ours, theirs = (inspect.signature(f) for f in (fencepost.connect, fencepost.connect_async))
    assert _parameters(ours) == _parameters(theirs)


def test_importing_the_package_loads_the_client_only() -> None:
    heavy = "apsw uvloop pyspark pyarrow typer rich prometheus_client cryptography httpcore jwt"
    program = (
        "import sys, fencepost\n"
        f"heavy = set({heavy!r}.split())\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('fencepost.')}\n"
        "print(sorted(heavy & loaded), sorted(ours))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] ['client', 'clock']"


def _public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def _plain(annotation: str) -> str:
    return annotation.replace("Async", "").replace("asyncio.", "threading.")


def _parameters(signature: inspect.Signature) -> list[tuple[str, object, object, str]]:
    return [
        (one.name, one.kind, one.default, _plain(str(one.annotation)))
        for one in signature.parameters.values()
    ]
