"""Applications inside other programs, on one database: they find each other as servers do."""

import httpx

from fencepost.server.embedding import embedded
from fencepost.store.settings import PostgresSettings

PATH = "/v1/stream/__ds/subscriptions/s"
PULL = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}


async def test_an_application_that_does_not_lead_passes_requests_on_to_one_that_does(
    postgres_dsn: str,
) -> None:
    settings = PostgresSettings(url=postgres_dsn, poll_interval_ms=100, reader_threads=1)
    async with (
        embedded(store_settings=settings) as first,
        embedded(store_settings=settings) as second,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(first), base_url="https://one.example"
        ) as one,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(second, root_path="/mounted"),
            base_url="https://two.example",
        ) as two,
    ):
        made = await two.put(PATH, json=PULL)
        hook = {"type": "webhook", "pattern": "x/*", "webhook": {"url": "https://hook.invalid/"}}
        shown = await two.put(PATH + "-hook", json=hook)
        found = await one.get(PATH)

    assert made.status_code == 201
    assert found.status_code == 200
    signing = shown.json()["webhook"]["signing"]
    assert signing["jwks_url"].startswith("https://two.example/")
