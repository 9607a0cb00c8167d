"""The guide docs/guides/browsers.md in a real browser: its code, another origin, authorization."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import npm
from tests.chromium import browsing
from tests.integration.auth_support import ANN, As, asked_token, token
from tests.serving import ServerProcess

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "browsers.md"
JSON = {"Content-Type": "application/json"}
STREAM = "orders/7"

pytestmark = pytest.mark.timeout(npm.INSTALL_SECONDS_MAX + 300)


def shown(name: str) -> str:
    """The module of this name that the guide shows."""
    found = re.search(rf"```js\n// {re.escape(name)}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found, f"{GUIDE} shows no {name}"
    return found[1]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with a principal, whose event connections end every second."""
    environment = {
        "FENCEPOST_PRINCIPALS": json.dumps([ANN]),
        "FENCEPOST_SERVER_SSE_MS": "1000",
    }
    with ServerProcess(tmp_path / "data", environment=environment) as server:
        yield server


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_an_event_source_gets_every_message_once_across_reconnects_and_tokens(
    tmp_path: Path, guarded: ServerProcess
) -> None:
    tokens: list[str] = []
    script = """
    const { follow } = await import("/follow.js");
    const seen = [];
    follow(
      "/url",
      (message) => { seen.push(message.n); report(seen.length); },
      () => report({ seen }),
    );
    """

    away = iter((True, False, True))

    def url() -> object:
        # Before the first token and before the second one the application is away for a moment.
        if next(away, False):
            return None
        # Good for two seconds: the page has to ask for another one in between.
        made = asked_token(ann, STREAM, ttl_s=2).json()
        tokens.append(made["token"])
        return {"url": made["url"]}

    with As(guarded.url, "ann") as ann:
        ann.create(STREAM)
        with browsing(
            tmp_path, script, files={"/follow.js": shown("follow.js")}, handlers={"/url": url}
        ) as site:
            for number in range(4):
                ann.append(STREAM, {"n": number})
                assert site.report() == number + 1
                asked = len(tokens)
                while number == 1 and len(tokens) == asked:
                    ann.get("/healthz")  # until the token has ended and the page has a new one
            ann.append(STREAM, {"n": 4}, stream_closed="true")
            found = site.report()
            while not isinstance(found, dict):
                found = site.report()

    assert found == {"seen": [0, 1, 2, 3, 4]}
    assert len(tokens) > 1


def test_the_npm_client_follows_with_an_authorization_header_from_another_origin(
    tmp_path: Path, guarded: ServerProcess
) -> None:
    npm.node()
    bundle = subprocess.run(
        [
            npm.FOLDER / "node_modules" / ".bin" / "esbuild",
            "--bundle",
            "--format=esm",
            "--loader=js",
        ],
        input=shown("client.js"),
        cwd=npm.FOLDER,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    script = f"""
    const {{ followWithClient }} = await import("/client.js");
    const seen = [];
    const url = "{guarded.url}/v1/stream/{STREAM}";
    const following = followWithClient(url, "{token("ann")}", (message) => {{
      seen.push(message.n);
      report(seen.length);
    }});
    await following;
    report({{ seen }});
    """
    with As(guarded.url, "ann") as ann:
        ann.create(STREAM)
        with browsing(tmp_path, script, files={"/client.js": bundle}) as site:
            for number in range(3):
                ann.append(STREAM, {"n": number})
                assert site.report() == number + 1
            ann.append(STREAM, {"n": 3}, stream_closed="true")
            found = site.report()
            while not isinstance(found, dict):
                found = site.report()

    assert found == {"seen": [0, 1, 2, 3]}


def test_a_browser_reads_what_was_appended_although_it_has_read_before(
    tmp_path: Path, open_server: ServerProcess
) -> None:
    httpx.put(f"{open_server.url}/v1/stream/s", headers=JSON, content=b'[{"n":1}]')
    script = f"""
    const url = "{open_server.url}/v1/stream/s";
    const read = async () => (await fetch(url)).json();
    const before = await read();
    await fetch(url, {{
      method: "POST", headers: {{ "Content-Type": "application/json" }}, body: '{{"n":2}}',
    }});
    report({{ before, after: await read() }});
    """

    with browsing(tmp_path, script) as site:
        found = site.report()

    assert found == {"before": [{"n": 1}], "after": [{"n": 1}, {"n": 2}]}


def test_a_foreign_page_can_neither_read_nor_change_an_open_server(
    tmp_path: Path, open_server: ServerProcess
) -> None:
    url = f"{open_server.url}/v1/stream/s"
    httpx.put(url, headers=JSON, content=b'["secret"]')
    rebound = url.replace("127.0.0.1", "evil.example")
    script = f"""
    const outcomes = {{}};
    const attempt = async (name, url, options) => {{
      try {{
        const answer = await fetch(url, options);
        outcomes[name] = answer.ok ? await answer.text() : answer.status;
      }} catch (error) {{
        outcomes[name] = "failed";
      }}
    }};
    await attempt("read", "{url}");
    await attempt("silently", "{url}", {{ mode: "no-cors", cache: "force-cache" }});
    await attempt("cached", "{url}", {{ cache: "force-cache" }});
    await attempt("append", "{url}", {{ method: "POST", body: "1" }});
    await attempt("delete", "{url}", {{ method: "DELETE" }});
    await attempt("rebound", "{rebound}", {{ method: "DELETE" }});
    await attempt("form", "{url}", {{ method: "POST", body: "1", mode: "no-cors" }});
    report(outcomes);
    """

    with browsing(tmp_path, script, host="evil.example") as site:
        found = site.report()

    assert "secret" not in json.dumps(found)
    assert found["read"] in (403, "failed")
    assert found["delete"] == found["rebound"] == "failed"
    assert httpx.get(url).json() == ["secret"]
