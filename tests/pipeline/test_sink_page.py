"""The reference page of the sink: its Python runs, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.sink import commit as sink_commit
from fencepost.pipeline.sink.options import sink_options
from tests.pipeline.sink_support import messages, schema_of
from tests.serving import ServerProcess

# The first test waits for Spark to start, on a machine that may be busy with the rest.
pytestmark = pytest.mark.timeout(300)

PAGE = (Path(__file__).parents[2] / "docs/reference/pipeline-sink.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_page_runs(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    namespace: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint")}
    for block in BLOCK.finditer(PAGE):
        source = block[1].replace("http://localhost:4437", server.url)
        exec(source, namespace)  # noqa: S102  (running the documentation is the point)

    expected = [{"country": "de", "id": n, "eur": n * 2.5} for n in range(4)]
    assert messages(server.url, "orders") == expected
    assert messages(server.url, "by-country/de") == expected
    assert messages(server.url, "orders-de") == expected


def test_the_page_names_every_option_and_every_limit() -> None:
    with pytest.raises(OptionError, match="the options are") as refused:
        sink_options(
            {"stream": "s", "nonsense": "1"}, schema_of("value string"), False, streaming=False
        )
    options = str(refused.value).rpartition("the options are ")[2].split(", ")

    assert [name for name in options if f"`{name}`" not in PAGE] == []
    limits = [name for name in vars(sink_commit) if name.startswith("COMMIT_")]
    assert limits
    assert [name for name in limits if f"`{name}`" not in PAGE] == []
