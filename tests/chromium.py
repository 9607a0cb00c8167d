"""A headless Chromium for tests of pages, and a small web server that serves a page to it.

A machine without Chromium is told what to install: a test that silently does not run proves
nothing.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS_MAX = 120


def program() -> str:
    """The path of the browser."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.fail(
        "This test needs Chromium. Install it (Debian: apt install chromium; macOS: brew install"
        " --cask chromium).",
        pytrace=False,
    )


class Site:
    """A web site for the browser: files, handlers for paths, and POST /report for its findings."""

    def __init__(self, files: dict[str, str], handlers: dict[str, Callable[[], object]]) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                if path in handlers:
                    answer = handlers[path]()
                    if answer is None:
                        self.send_error(502, "the application is away")
                    else:
                        self._answer("application/json", json.dumps(answer))
                elif path in files:
                    kind = "text/html" if path == "/" else "text/javascript"
                    self._answer(kind, files[path])
                else:
                    self.send_error(404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                site.reports.put(json.loads(body))
                self._answer("application/json", "{}")

            def _answer(self, kind: str, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def report(self) -> Any:
        """What the page says next; a page that threw fails the test with its error."""
        found = self.reports.get(timeout=SECONDS_MAX)
        if isinstance(found, dict) and "threw" in found:
            pytest.fail(f"the page threw {found['threw']}", pytrace=False)
        return found


PAGE = """<!doctype html><meta charset="utf-8"><title>test</title><script type="module">
const report = (found) => fetch("/report", { method: "POST", body: JSON.stringify(found) });
try {
%s
} catch (error) {
  await report({ threw: String(error) + " " + (error.stack ?? "") });
}
</script>"""


@contextmanager
def browsing(
    folder: Path,
    script: str,
    *,
    files: dict[str, str] | None = None,
    handlers: dict[str, Callable[[], object]] | None = None,
    host: str = "localhost",
) -> Iterator[Site]:
    """A page with `script` in a browser, at an origin with this host; it calls `report`."""
    with Site({"/": PAGE % script, **(files or {})}, handlers or {}) as site:
        browser = subprocess.Popen(
            [
                program(),
                "--headless=new",
                "--no-sandbox",  # tests may run as root, for whom Chromium has no sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--no-proxy-server",
                f"--user-data-dir={folder / 'profile'}",
                "--host-resolver-rules=MAP *.example 127.0.0.1",
                f"http://{host}:{site.port}/",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield site
        finally:
            browser.kill()
            browser.wait()
