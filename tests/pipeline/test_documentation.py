"""The guide to the pipeline and the example, run top to bottom as a reader would.

`session()` gives back the session of these tests; the documented address is replaced by that of the
test's server.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fencepost
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = ROOT / "docs/guides/pipeline.md"
OPERATIONS = ROOT / "docs/guides/pipeline-operations.md"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_page(page: Path, server: ServerProcess) -> None:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        source = block[1].replace("http://localhost:4437", server.url)
        # Padded, so that a failure names the line of the page.
        code = compile("\n" * line + source, str(page), "exec")
        exec(code, namespace)  # noqa: S102  (running the documentation is the point)


@pytest.mark.usefixtures("spark")
def test_every_python_block_of_the_guide_runs_and_runs_again(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        run_page(GUIDE, server)
        run_page(GUIDE, server)

        with fencepost.connect(server.url) as client:
            assert {
                info.path: len(list(client.stream(info.path).read())) for info in client.streams()
            } == {
                "shop/orders": 1_000,
                "shop/priced/de": 666,
                "shop/priced/gb": 334,
            }


@pytest.mark.usefixtures("spark")
def test_every_python_block_of_the_page_on_operations_runs(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, fencepost.connect(server.url) as client:
        client.create("of-the-guide", messages=[1, 2, 3, 4])

        run_page(OPERATIONS, server)

        for path in ("sold", "sold-again"):
            assert len(list(client.stream(path).read())) == 3


def test_the_example_runs_as_it_is_and_runs_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """examples.pipeline: what a notebook would run, cell by cell."""
    with ServerProcess(tmp_path / "data") as server:
        monkeypatch.setenv("FENCEPOST_URL", server.url)
        for _ in range(2):
            found = runpy.run_path(str(ROOT / "examples/pipeline.py"))

            assert found["report"].is_clean
            assert found["spark"] is spark
