"""Try the pipeline on several versions of PySpark: `python -m tools.spark_smoke 4.0.5 4.3.0`.

Each version is installed beside the others, into FOLDER/VERSION, unless it is there. Each check
then runs in a process of its own, with that folder and this source tree on PYTHONPATH, against one
server that all of them share. The table at the end says what works; what a version lacks is said in
the words that a user would see. `--python` takes another interpreter, which needs Fencepost's other
dependencies. `connect` and `pipelines` also need `grpcio-status`, `googleapis-common-protos`,
`zstandard`, `pyyaml` and `graphviz`: `--also FOLDER` is where they are.

`--py-files` is tried by `pyfiles`: the source tree as a zip, and no source tree on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHECK_SECONDS_MAX = 600
ROWS = 100
SCHEMA = "n BIGINT, word STRING"
PIPELINE = """
name: smoke
catalog: spark_catalog
database: default
storage: file://{folder}/storage
libraries:
  - glob:
      include: source/**
"""
DEFINITIONS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

from fencepost.pipeline import register

spark = SparkSession.active()
register(spark)
dp.create_sink("out", "fencepost", {{"url": "{url}", "stream": "{name}/out", "autoCreate": "true"}})


@dp.append_flow(target="out")
def copied():
    read = spark.readStream.format("fencepost").options(url="{url}", stream="{name}/in")
    return read.options(startingPosition="earliest").load().selectExpr("value")

"""
PY_FILES = """
import sys

from fencepost.pipeline import register
import fencepost
from pyspark.sql import SparkSession

assert ".zip" in fencepost.__file__, fencepost.__file__
spark = SparkSession.builder.getOrCreate()
register(spark)
url, name, checkpoint = sys.argv[1:]
read = spark.read.format("fencepost").options(url=url, stream=name + "/in").load()
assert read.count() == 100
options = dict(url=url, stream=name + "/out", autoCreate="true", jobId=name)
read.select("value").write.format("fencepost").mode("append").options(**options).save()
if spark.version >= "4.2":
    rows = spark.readStream.format("fencepost").options(url=url, stream=name + "/in")
    rows = rows.option("startingPosition", "earliest").load().select("value")
    query = rows.writeStream.format("fencepost").options(url=url, stream=name + "/out")
    query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
"""


class Place:
    """What a check works with: a server, streams of its own, a folder of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.name = f"smoke/{uuid.uuid4().hex}"

    def fill(self) -> None:
        """Messages to read, in the stream `in`."""
        import fencepost

        with fencepost.connect(self.url) as client:
            rows = [{"n": n, "word": "x" * (n % 7)} for n in range(ROWS)]
            client.create(f"{self.name}/in").append_many(rows)

    def written(self, stream: str = "out") -> list[Any]:
        """What is in a stream."""
        import fencepost

        with fencepost.connect(self.url) as client:
            return [*client.stream(f"{self.name}/{stream}").read()]

    def options(self, stream: str, **more: str) -> dict[str, str]:
        return {"url": self.url, "stream": f"{self.name}/{stream}", **more}

    def json(self) -> dict[str, str]:
        return self.options("in", format="json", schema=SCHEMA)


def batch(place: Place) -> None:
    """Read and write as a batch, with and without our own session."""
    spark = _session()
    place.fill()
    read = spark.read.format("fencepost").options(**place.json()).load()
    assert read.where("value.n < 10").count() == 10
    assert read.count() == ROWS
    options = place.options("out", autoCreate="true", jobId=place.name)
    for _again in range(2):
        rows = read.select("value.*").repartition(3)
        rows.write.format("fencepost").mode("append").options(**options).save()
    assert sorted(row["n"] for row in place.written()) == [*range(ROWS)]


def sql(place: Place) -> None:
    """SQL over a view, in a session that did not register the format."""
    from pyspark.sql import SparkSession

    from fencepost.pipeline.java import find_java

    os.environ.update(find_java().environment())
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    place.fill()
    options = ", ".join(f"{name} '{value}'" for name, value in place.options("in").items())
    spark.sql(f"CREATE TEMPORARY VIEW smoke USING fencepost OPTIONS ({options})")
    assert spark.sql("SELECT * FROM smoke WHERE version > 9").count() == ROWS - 10


def stream(place: Place) -> None:
    """A query from source to sink, stopped and started again, with its progress."""
    spark = _session()
    place.fill()

    def run() -> Any:
        read = spark.readStream.format("fencepost").options(**place.json())
        read = read.options(startingPosition="earliest", maxRowsPerTrigger="30")
        writer = read.load().select("value.*").writeStream.format("fencepost")
        writer = writer.options(**place.options("out", autoCreate="true"))
        writer = writer.option("checkpointLocation", str(place.folder / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query.lastProgress

    first = run()
    run()
    assert [row["n"] for row in place.written()] == [*range(ROWS)]
    assert "behind_rows" in str(first.sources[0].latestOffset), first


def sink(place: Place) -> None:
    """The sink behind a source of Spark's own."""
    spark = _session()
    folder = place.folder / "rows"
    spark.range(ROWS).coalesce(1).write.parquet(str(folder))
    for _again in range(2):
        writer = spark.readStream.schema("id BIGINT").parquet(str(folder)).writeStream
        writer = writer.format("fencepost").options(**place.options("out", autoCreate="true"))
        writer = writer.option("checkpointLocation", str(place.folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
    assert sorted(row["id"] for row in place.written()) == [*range(ROWS)]


def foreach(place: Place) -> None:
    """Batch writes inside foreachBatch, once for each batch."""
    spark = _session()
    folder = place.folder / "rows"
    spark.range(ROWS).coalesce(1).write.parquet(str(folder))

    def write(rows: Any, _batch: int) -> None:
        options = place.options("out", autoCreate="true", sinkName=place.name)
        rows.write.format("fencepost").mode("append").options(**options).save()

    reading = spark.readStream.schema("id BIGINT").parquet(str(folder))
    writer = reading.writeStream.foreachBatch(write)
    writer = writer.option("checkpointLocation", str(place.folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert sorted(row["id"] for row in place.written()) == [*range(ROWS)]


def jobs(place: Place) -> None:
    """A table of what is there, and an audit."""
    from fencepost.pipeline import tables
    from fencepost.pipeline.audit import audit

    spark = _session()
    place.fill()
    options = {"url": place.url}
    asked: dict[str, Any] = {"match": f"{place.name}/**", "options": options}
    for kind in ("parquet", "delta"):
        to = place.folder / kind
        tables.backfill(spark, to, kind="rows", format=kind, schema=SCHEMA, **asked)
        assert tables.read(spark, to).count() == ROWS
    report = audit(spark, **asked)
    assert report.is_clean, report.samples


def connect(place: Place) -> None:
    """Spark Connect: batch and stream."""
    from pyspark.sql import SparkSession

    from fencepost.pipeline import register
    from fencepost.pipeline.java import find_java

    os.environ.update(find_java().environment())
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    place.fill()
    read = spark.read.format("fencepost").options(**place.json()).load()
    assert read.count() == ROWS
    options = place.options("out", autoCreate="true", jobId=place.name)
    read.select("value.*").write.format("fencepost").mode("append").options(**options).save()
    if _offers_streams(spark.version):
        reading = spark.readStream.format("fencepost").options(**place.json())
        reading = reading.option("startingPosition", "earliest")
        writer = reading.load().select("value.*").writeStream.format("fencepost")
        writer = writer.options(**place.options("out"))
        writer = writer.option("checkpointLocation", str(place.folder / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(120)
    times = 2 if _offers_streams(spark.version) else 1
    assert sorted(row["n"] for row in place.written()) == sorted([*range(ROWS)] * times)
    spark.stop()


def pipelines(place: Place) -> None:
    """Declarative pipelines: our format as a source, as a sink, and `register` in a definition."""
    place.fill()
    source = place.folder / "source"
    source.mkdir()
    texts = {"url": place.url, "name": place.name}
    (source / "defined.py").write_text(DEFINITIONS.format(**texts))
    specification = place.folder / "spark-pipeline.yml"
    specification.write_text(PIPELINE.format(folder=place.folder))
    try:
        _spark("spark-pipelines", "run", "--spec", str(specification), folder=place.folder)
    except RuntimeError as failure:
        # PySpark 4.3.0 ends so when the flow is done: its client does not know the answer that
        # carries what the Python workers counted. What the flow wrote is looked at below.
        if "__python_accumulator__" not in str(failure):
            raise
    assert sorted(row["n"] for row in place.written()) == [*range(ROWS)]


def pyfiles(place: Place) -> None:
    """spark-submit --py-files: our source as a zip, for the driver and the executors."""
    place.fill()
    archive = place.folder / "fencepost.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in sorted((ROOT / "src").rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                zipped.write(file, file.relative_to(ROOT / "src"))
    job = place.folder / "job.py"
    job.write_text(PY_FILES)
    path = os.pathsep.join(
        p for p in os.environ["PYTHONPATH"].split(os.pathsep) if str(ROOT) not in p
    )
    # The process of a source on the driver has PYTHONPATH and no --py-files.
    given = {"PYTHONPATH": os.pathsep.join((path, str(archive)))}
    arguments = ["--master", "local-cluster[1,1,1024]", "--conf", "spark.ui.enabled=false"]
    arguments += ["--py-files", str(archive), str(job), place.url, place.name]
    arguments += [str(place.folder / "checkpoint")]
    _spark("spark-submit", *arguments, folder=place.folder, environment=given)
    times = 2 if _offers_streams(_version()) else 1
    assert sorted(row["n"] for row in place.written()) == sorted([*range(ROWS)] * times)


CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (batch, sql, stream, sink, foreach, jobs, connect, pipelines, pyfiles)
}


def _session() -> Any:
    from fencepost.pipeline import session

    made = session("smoke", master="local[2,4]", conf={"spark.ui.enabled": False})
    made.sparkContext.setLogLevel("OFF")
    return made


def _version() -> str:
    from pyspark.version import __version__ as found

    return str(found)


def _offers_streams(version: str) -> bool:
    return version >= "4.2"


def _spark(
    script: str, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a program of Spark's own."""
    import pyspark

    from fencepost.pipeline.java import find_java

    found = {**os.environ, **find_java().environment()}
    program = Path(pyspark.__file__).parent / "bin" / script
    ran = subprocess.run(
        ["/bin/bash", program, *arguments],
        cwd=folder,
        env={**found, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(ran.stdout)


# The process that starts the checks.


def main() -> int:
    """Run the checks and print a table; 1 if one failed."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("versions", nargs="+", help="versions of PySpark, such as 4.2.1")
    asked.add_argument("--folder", type=Path, default=Path("sparks"), help="where they are put")
    asked.add_argument("--also", type=Path, help="a folder with what Spark Connect needs")
    asked.add_argument("--python", type=Path, default=Path(sys.executable))
    asked.add_argument("--check", nargs="+", choices=[*CHECKS], default=[*CHECKS])
    options = asked.parse_args()
    results: dict[str, dict[str, str]] = {}
    with _server() as url:
        for version in options.versions:
            paths = [_installed(version, options.folder), options.also, ROOT / "src", ROOT]
            path = os.pathsep.join(str(one.absolute()) for one in paths if one)
            for name in options.check:
                result = _tried(name, url, options.python, path)
                results.setdefault(version, {})[name] = result
                print(f"{version} {name}: {result}", flush=True)
    failed = [found for one in results.values() for found in one.values() if found != "ok"]
    return 1 if failed else 0


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fencepost", "serve", "--port", "0", "--data", folder]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := re.search(r"listening on (https?://\S+?:\d+)", line):
                    # What it says later would stop it once the pipe is full.
                    threading.Thread(target=server.stdout.read, daemon=True).start()
                    yield found[1]
                    return
            raise RuntimeError("the server did not start")
        finally:
            server.terminate()
            server.wait()


def _installed(version: str, folder: Path) -> Path:
    place = folder / version
    if not (place / "pyspark").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place)]
        subprocess.run([*pip, f"pyspark=={version}"], check=True)
    return place


def _tried(name: str, url: str, python: Path, path: str) -> str:
    """`ok`, or the last thing that was said before it failed."""
    environment = {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": str(python)}
    environment["PYSPARK_DRIVER_PYTHON"] = str(python)
    environment.pop("SPARK_HOME", None)
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys; from pathlib import Path; from tools import spark_smoke as smoke;"
            "smoke.CHECKS[sys.argv[1]](smoke.Place(sys.argv[2], Path(sys.argv[3])))"
        )
        ran = subprocess.Popen(
            [python, "-c", code, name, url, folder],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = ran.communicate(timeout=CHECK_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            # With all that it started: the programs of Spark start others.
            os.killpg(ran.pid, signal.SIGKILL)
            ran.communicate()
            return f"not done after {CHECK_SECONDS_MAX} s"
    if ran.returncode == 0:
        return "ok"
    said = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in said if not line.startswith(("at ", "..."))] or said
    ours = [line for line in said if re.search(r"fencepost\.\S+Error: ", line)]
    wrong = [line for line in said if "Error" in line or "EXCEPTION" in line.upper()]
    return " ".join((ours or wrong or said or ["it said nothing"])[-1].split())[:400]


if __name__ == "__main__":
    sys.exit(main())
