"""Every Python block of the documentation runs, top to bottom, against a real server.

The blocks of a page share one namespace, as a reader's session would. The documented address is
replaced by that of the test's server.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [
    "docs/guides/closing.md",  # first: groups that other pages leave would lag on its streams
    "docs/start.md",
    "docs/start-events.md",
    "docs/guides/events.md",
    "docs/guides/connecting.md",
    "docs/guides/idempotency.md",
    "docs/guides/producer.md",
    "docs/guides/projections.md",
    "docs/guides/reading.md",
    "docs/guides/subscriptions.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_of_a_page_runs(
    page: str, server_process: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} has no Python in it"
    module = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, "documentation", module)  # where classes look for their names
    namespace = vars(module)
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        source = block[1].replace("http://localhost:4437", server_process.url)
        # Padded, so that a failure names the line of the page.
        code = compile("\n" * line + source, str(ROOT / page), "exec", dont_inherit=True)
        exec(code, namespace)  # noqa: S102  (running the documentation is the point)


def test_the_first_screen_of_the_documentation_is_the_one_that_was_promised() -> None:
    first = BLOCK.search((ROOT / "docs/start.md").read_text())
    assert first is not None
    assert first[1] == (
        "import fencepost\n"
        "\n"
        'with fencepost.connect("http://localhost:4437") as client:\n'
        '    orders = client.create("orders")                   '
        "# JSON unless told otherwise; fine if it exists\n"
        '    with orders.producer("checkout-1") as producer:    '
        "# pipelined, exactly once, survives restarts of the server\n"
        "        for n in range(100_000):\n"
        '            producer.append({"order": n})\n'
        '    assert [m["order"] for m in orders.read()] == list(range(100_000))\n'
    )


def test_the_first_screen_of_events_is_strictly_typed(tmp_path: Path) -> None:
    first = BLOCK.search((ROOT / "docs/start-events.md").read_text())
    assert first is not None
    program = tmp_path / "shop.py"
    program.write_text(first[1])

    assert "Success" in mypy_of(program)


SEVERAL = """
from fencepost.events import App, AsyncContext, Context, Event, Recorded, Transaction


class Placed(Event):
    sku: str


class Returned(Event):
    reason: str


class Lost(Event):
    pass


app = App("shop")


@app.reaction(Placed, Returned, to=lambda event: event.stream)
def two(event: Recorded[Placed | Returned], context: Context) -> None:
    if isinstance(event.data, Placed):
        print(event.data.sku)


@app.reaction(Placed, Returned, Lost)
async def three(event: Recorded[Placed | Returned | Lost], context: AsyncContext) -> None:
    await context.append("noted", event.data)


@app.projection("listed", schema="create table {listed} (sku text)")
def listed(event: Recorded[Placed | Lost], db: Transaction) -> None:
    pass
"""


def test_handlers_of_several_events_are_strictly_typed(tmp_path: Path) -> None:
    program = tmp_path / "several.py"
    program.write_text(SEVERAL)

    assert mypy_of(program) == "Success: no issues found in 1 source file\n"


def test_a_handler_of_other_events_than_its_reaction_is_no_type(tmp_path: Path) -> None:
    program = tmp_path / "several.py"
    program.write_text(SEVERAL.replace("Recorded[Placed | Returned | Lost],", "Recorded[Placed],"))

    assert "arg-type" in mypy_of(program)


def mypy_of(program: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return checked.stdout
