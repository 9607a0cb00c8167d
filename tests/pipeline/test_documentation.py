"""The Spark pages of the documentation and the example, run top to bottom as a reader would.

`session()` gives back the session of these tests; the documented address is replaced by that of the
test's server.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    "docs/guides/pipeline.md",
    "docs/reference/pipeline-source.md",
    "docs/reference/pipeline-sink.md",
    "docs/reference/pipeline-jobs.md",
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("spark")
def test_every_python_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} has no Python in it"
    namespace: dict[str, object] = {
        "__name__": "documentation",
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    with ServerProcess(tmp_path / "data") as server:
        for block in blocks:
            line = text[: block.start()].count("\n") + 1
            source = block[1].replace("http://localhost:4437", server.url)
            # Padded, so that a failure names the line of the page.
            code = compile("\n" * line + source, str(ROOT / page), "exec")
            exec(code, namespace)  # noqa: S102  (running the documentation is the point)


def test_the_example_runs_as_it_is(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """examples.pipeline: what a notebook would run, cell by cell."""
    with ServerProcess(tmp_path / "data") as server:
        monkeypatch.setenv("FENCEPOST_URL", server.url)
        found = runpy.run_path(str(ROOT / "examples/pipeline.py"))

    assert found["report"].is_clean
    assert found["spark"] is spark
