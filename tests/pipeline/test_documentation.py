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

from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs/guides/pipeline.md"


@pytest.mark.usefixtures("spark")
def test_every_python_block_of_the_guide_runs(tmp_path: Path) -> None:
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) > 5
    namespace: dict[str, object] = {"__name__": "documentation"}
    with ServerProcess(tmp_path / "data") as server:
        for block in blocks:
            line = text[: block.start()].count("\n") + 1
            source = block[1].replace("http://localhost:4437", server.url)
            # Padded, so that a failure names the line of the page.
            code = compile("\n" * line + source, str(PAGE), "exec")
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
