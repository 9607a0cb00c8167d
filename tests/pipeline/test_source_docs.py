"""The reference of the source is true: its code runs, and it names every option there is."""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import SparkSession

from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.source.options import source_options
from tests.serving import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pipeline-source.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_of_the_page_runs(spark: SparkSession, server: ServerProcess) -> None:
    namespace: dict[str, object] = {"__name__": "documentation"}
    blocks = BLOCK.findall(PAGE.read_text())
    assert blocks
    for block in blocks:
        code = block.replace("http://localhost:4437", server.url)
        exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102  (that is the point)


def test_the_page_names_every_option_and_no_other() -> None:
    try:
        source_options({"stream": "a", "no-such-option": "1"})
        raise AssertionError("an unknown option was taken")
    except OptionError as error:
        _, _, listed = str(error).partition("the options are ")
    section = PAGE.read_text().split("## Options")[1].split("## Columns")[0]

    named = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))

    assert named == set(listed.split(", "))
