"""The programs in examples/, run as their first lines say."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chromium import browsing
from tests.serving import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
START_SECONDS_MAX = 60


def test_streams_embedded_in_a_web_application_survive_its_restart(tmp_path: Path) -> None:
    url = "/fencepost/v1/stream/orders"
    json = {"content-type": "application/json"}

    with Uvicorn(tmp_path) as host:
        made = host.put(url, headers=json)
        host.post(url, headers=json, content=b'[{"order": 1}]')
        beside = host.get("/")
    with Uvicorn(tmp_path) as host:
        kept = host.get(url)

    assert made.status_code == 201
    assert made.headers["location"] == f"http://{made.request.url.netloc.decode()}{url}"
    assert beside.text.startswith("streams are below")
    assert kept.json() == [{"order": 1}]


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_an_open_live_reader_does_not_hold_up_the_end_of_its_host(
    tmp_path: Path, live: str
) -> None:
    """Events last a minute and long-polls half of one, unless the server ends them."""
    url = "/fencepost/v1/stream/orders"
    with Uvicorn(tmp_path) as host:
        host.put(url, headers={"content-type": "application/json"})
        reader = httpx.Client(base_url=host.base_url, timeout=START_SECONDS_MAX)
        threading.Thread(target=reader.get, args=(f"{url}?offset=-1&live={live}",)).start()
        while "fencepost_waiters 1.0" not in host.get("/fencepost/metrics").text:
            pass
        asked = time.monotonic()
    took = time.monotonic() - asked
    reader.close()

    assert took < 20


@pytest.fixture(name="orders")
def _orders(tmp_path: Path) -> Iterator[httpx.Client]:
    """The FastAPI application, which has to know its own address before it starts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Uvicorn(tmp_path, "examples.fastapi_app:app", port=port, ORDERS_URL=url) as host:
        yield host


SHOWN = """
// The page of the application, with the address of the application in its links.
const page = new DOMParser().parseFromString(await (await fetch("/page")).json(), "text/html");
const script = document.createElement("script");
script.textContent = page.querySelector("script").textContent.replaceAll('"/', '"%s/');
document.body.append(page.querySelector("#orders"));
new MutationObserver(() => report(
  [...document.querySelectorAll("#orders li")].map((one) => one.textContent)
)).observe(document.querySelector("#orders"), { childList: true });
document.body.append(script);
"""


def test_a_fastapi_application_stores_orders_shows_them_live_and_has_them_packed(
    tmp_path: Path, orders: httpx.Client
) -> None:
    """Under uvicorn with uvloop: streams mounted, an async producer, events in a real browser,
    and a worker that claims tasks."""
    first = orders.post("/orders", params={"item": "tea"}).json()["id"]

    page = orders.get("/").text
    url = str(orders.base_url).rstrip("/")
    with browsing(tmp_path, SHOWN % url, handlers={"/page": lambda: page}) as site:
        assert site.report() == ["tea"]
        second = orders.post("/orders", params={"item": "milk"}).json()["id"]
        assert site.report() == ["tea", "milk"]

    for number in (first, second):
        while (task := orders.get(f"/orders/{number}").json())["status"] != "completed":
            continue
        assert task == {"status": "completed", "by": "packer", "result": {"packed": "yes"}}
    assert orders.get("/orders/unknown").status_code == 404
    stored = orders.get("/fencepost/v1/stream/orders").json()
    assert [order["item"] for order in stored] == ["tea", "milk"]


def test_an_order_that_cannot_be_stored_does_not_end_the_application(orders: httpx.Client) -> None:
    assert orders.post("/orders", params={"item": "tea"}).status_code == 200
    orders.delete("/fencepost/v1/stream/orders").raise_for_status()

    answers = [orders.post("/orders", params={"item": item}).status_code for item in ("a", "b")]

    assert answers == [503, 200]
    assert [one["item"] for one in orders.get("/fencepost/v1/stream/orders").json()] == ["b"]


def test_the_shop_ends_its_day_with_everything_done_once(tmp_path: Path) -> None:
    """`python examples/shop.py`, whose workers load examples.shop: it asserts what it promises."""
    folder = tmp_path / "work"
    folder.mkdir()
    with ServerProcess(tmp_path / "data") as server:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "shop.py")],
            cwd=folder,
            env={**os.environ, "FENCEPOST_URL": server.url},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )

    said = done.stdout.splitlines()
    assert "59 orders are through, although a worker was killed" in said
    assert "parked: NonRetryableError: the post does not go to AQ" in said
    assert "sold: [('coffee', 5), ('tea', 50)]" in said
    archived = sorted((folder / "archive").iterdir())
    assert len(archived) == 55
    assert {file.read_text() for file in archived} == {"Placed Completed\n"}


def test_every_example_is_tested() -> None:
    here = Path(__file__)
    beside = here.with_name("test_outbox_example.py")
    on_spark = here.parents[1] / "pipeline" / "test_documentation.py"
    tested = "".join(file.read_text() for file in (here, beside, on_spark))

    untested = [
        file.name for file in EXAMPLES.glob("*.py") if f"examples.{file.stem}:" not in tested
    ]

    assert untested == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Uvicorn:
    """`uvicorn examples.embedded:app`, in a folder of its own."""

    def __init__(
        self, folder: Path, app: str = "examples.embedded:app", *, port: int = 0, **more: str
    ) -> None:
        self._folder = folder
        self._arguments = ("--port", str(port), "--loop", "uvloop", app)
        self._more = more

    def __enter__(self) -> httpx.Client:
        command = [sys.executable, "-m", "uvicorn", *self._arguments]
        paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | self._more
        self._process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"running on (http://\S+)", line)
            if found:
                self._client = httpx.Client(base_url=found[1], timeout=START_SECONDS_MAX)
                return self._client
        raise AssertionError("uvicorn did not start")

    def __exit__(self, *exc: object) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stderr is not None
        rest = self._process.stderr.read()
        self._process.stderr.close()
        # Uvicorn ends itself by the signal that it was sent, once it has shut down cleanly.
        assert self._process.wait(START_SECONDS_MAX) in (0, -signal.SIGTERM), rest
        assert "Application shutdown complete" in rest, rest
