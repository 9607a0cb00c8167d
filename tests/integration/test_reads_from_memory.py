"""Chunks in memory over HTTP: given to those alone who may read the stream, and counted."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.testing.postgres import shared_server
from tests.integration.auth_support import ANN, BOB, ROOT, Place, place


@pytest.fixture(params=["sqlite", "postgres"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    store = tmp_path / "data" if request.param == "sqlite" else shared_server().new_database()
    with place(store, ROOT, ANN, BOB) as made:
        yield made


def test_a_chunk_in_memory_is_given_to_those_alone_who_may_read_its_stream(here: Place) -> None:
    ann, path = here("ann"), "/v1/stream/orders/1"
    ann.create("orders/1")
    ann.append("orders/1", "one")
    answers = [ann.get(path) for _ in range(4)]

    refused, unknown = here("bob").get(path), here(None).get(path)
    metrics = here("root").get("/metrics").text
    ann.client.delete(path)

    assert {(answer.status_code, answer.text) for answer in answers} == {(200, '["one"]')}
    assert re.search(r"^fencepost_store_chunk_cache_hits_total 2.0$", metrics, re.M)
    assert (refused.status_code, unknown.status_code) == (403, 401)
    assert ann.get(path).status_code == 404
