"""A FastAPI application with durable streams, a producer, live pages and a worker.

    pip install fastapi uvicorn
    uvicorn --loop uvloop examples.fastapi_app:app

`POST /orders` stores an order through an idempotent producer and offers a task for it. A worker in
the same process claims the tasks and packs the orders. The page at `/` follows the stream of orders
with the browser's own EventSource. One process may open a data folder at a time, so run it with one
worker; the application decides who may come here.

The client talks to the streams as any other client does, over HTTP: ORDERS_URL says where this
application listens.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse

import fencepost
from fencepost.coordination import AsyncClaim, AsyncTaskClaims
from fencepost.server.embedding import embedded

DATA = Path("data")
URL = os.environ.get("ORDERS_URL", "http://127.0.0.1:8000")
RETRIES = fencepost.Retries(seconds_max=5.0)
"""When the application stops it listens no more: the client must not wait for it for long."""
PAGE = """<!doctype html><title>Orders</title><ul id="orders"></ul><script>
const source = new EventSource("/fencepost/v1/stream/orders?offset=-1&live=sse");
source.addEventListener("data", (event) => {
  for (const order of JSON.parse(event.data)) {
    document.querySelector("#orders").append(Object.assign(
      document.createElement("li"), { textContent: order.item }));
  }
});
</script>"""


class Shop:
    """The streams of the application: orders, and the tasks of packing them."""

    def __init__(self, client: fencepost.AsyncClient) -> None:
        self._client = client
        self.claims = AsyncTaskClaims(client.stream("packing"), "packer")
        self._producer: fencepost.AsyncIdempotentProducer | None = None
        self._opening = asyncio.Lock()

    async def order(self, item: str) -> str:
        """Store an order; when this returns it is on disk, once."""
        producer = await self._opened()
        number = uuid.uuid4().hex
        try:
            delivery = await producer.append({"id": number, "item": item})
            await delivery
        except fencepost.FencepostError:
            # A producer that could not store a message has stopped: the next order opens another.
            if self._producer is producer:
                self._producer = None
            raise
        await self.claims.offer(number)
        return number

    async def pack(self, _claim: AsyncClaim) -> dict[str, str]:
        """The work on one task. Another process would take it over if this one died in it."""
        return {"packed": "yes"}

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()

    async def _opened(self) -> fencepost.AsyncIdempotentProducer:
        """The producer. The application listens only after its lifespan has begun, so the streams
        are made with the first order."""
        async with self._opening:
            if self._producer is None:
                await self._client.create("packing")
                orders = await self._client.create("orders")
                self._producer = orders.producer("shop")
            return self._producer


@asynccontextmanager
async def lifespan(application: FastAPI) -> AsyncIterator[None]:
    async with (
        embedded(DATA) as streams,
        fencepost.connect_async(f"{URL}/fencepost", retries=RETRIES) as client,
    ):
        application.mount("/fencepost", streams)
        shop = application.state.shop = Shop(client)
        async with asyncio.TaskGroup() as group:
            worker = group.create_task(shop.claims.work(shop.pack, poll=0.2))
            yield
            worker.cancel()
        await shop.close()


app = FastAPI(lifespan=lifespan)


@app.get("/")
async def home() -> HTMLResponse:
    return HTMLResponse(PAGE)


@app.post("/orders")
async def order(item: str) -> dict[str, str]:
    shop: Shop = app.state.shop
    try:
        return {"id": await shop.order(item)}
    except fencepost.FencepostError as error:
        raise HTTPException(503, str(error)) from error


@app.get("/orders/{number}")
async def packing(number: str) -> dict[str, Any]:
    shop: Shop = app.state.shop
    task = await shop.claims.get(number)
    if task is None:
        raise HTTPException(404)
    return {"status": task.status, "by": task.owner, "result": task.result}
