"""The format in sessions that Fencepost did not make, and in SQL."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fencepost
from fencepost.pipeline.java import find_java
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PLAIN = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
options = {"url": sys.argv[1], "stream": "auto/plain"}
rows = spark.createDataFrame([('{"a":1}',), ('{"a":2}',)], "value string")
rows.write.format("fencepost").mode("append").options(autoCreate="true", **options).save()
read = spark.read.format("fencepost").options(**options).load()
assert read.where("version = 1").count() == 1

from fencepost.pipeline import register

register(spark)
assert spark.read.format("fencepost").options(**options).load().count() == 2
"""


def test_a_session_of_ones_own_has_the_format_without_registering_it(
    server: ServerProcess, tmp_path: Path
) -> None:
    environment = {**os.environ, **find_java().environment(), "PYSPARK_PYTHON": sys.executable}

    ran = subprocess.run(
        [sys.executable, "-c", PLAIN, server.url],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert ran.returncode == 0, ran.stderr
    with fencepost.connect(server.url) as client:
        assert list(client.stream("auto/plain").read()) == [{"a": 1}, {"a": 2}]


@pytest.mark.soak  # each starts a Spark of its own
@pytest.mark.parametrize("check", ["connect", "pipelines", "pyfiles"])
def test_other_ways_into_spark_read_and_write(
    check: str, server: ServerProcess, tmp_path: Path
) -> None:
    """Spark Connect, declarative pipelines, --py-files: `tools.spark_smoke` has all the checks."""
    if check != "pyfiles":
        pytest.importorskip("grpc_status", reason="needs pip install 'pyspark[connect]'")
    source = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    code = (
        "import sys; from pathlib import Path; from tools import spark_smoke as smoke;"
        "smoke.CHECKS[sys.argv[1]](smoke.Place(sys.argv[2], Path(sys.argv[3])))"
    )
    environment = {**os.environ, "PYTHONPATH": source, "PYSPARK_PYTHON": sys.executable}
    environment["PYSPARK_DRIVER_PYTHON"] = sys.executable

    ran = subprocess.run(
        [sys.executable, "-c", code, check, server.url, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_wheel_has_the_module_that_spark_looks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "pyspark_fencepost" in project["tool"]["uv"]["build-backend"]["module-name"]


def test_sql_reads_by_views_and_says_so_of_tables(
    spark: SparkSession, server: ServerProcess
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("auto/sql").append_many([1, 2, 3])
    using = f"USING fencepost OPTIONS (url '{server.url}', stream 'auto/sql')"

    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW auto_sql {using}")
    found = spark.sql("SELECT CAST(value AS STRING) AS n FROM auto_sql WHERE version > 0").collect()
    with pytest.raises(Exception, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE auto_table {using}")

    assert [row["n"] for row in found] == ["2", "3"]
