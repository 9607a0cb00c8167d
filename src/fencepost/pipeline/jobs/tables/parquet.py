"""Writing the rows of a table to new Parquet files, and reading those that a commit names.

Executors write; the driver only looks at the footers of what they wrote, so that a commit can say
how many rows there are. New files go to a folder of their own below the table's, whose name no
other attempt has: whatever is not named by a commit afterwards is nobody's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from fencepost.pipeline.jobs.tables.files import File, sync_folder

BUCKET = "_bucket"
UNBUCKETED = -1
UNFINISHED = "_temporary"
"""Below a folder that Spark writes to: what tasks have not handed over yet."""
_IN_PATH = re.compile(rf"{BUCKET}=(\d+)/")


def struct_of(ddl: str) -> StructType:
    """A schema from its DDL, as in `name string, total double`."""
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def bucket_in(path: str) -> int:
    """The bucket that a file holds, by its path."""
    found = _IN_PATH.search(path)
    return int(found[1]) if found else UNBUCKETED


def write_bucketed(
    rows: DataFrame, bucket: Column, touched: int, place: Path, root: Path
) -> tuple[File, ...]:
    """Write rows to one new file for each bucket that has any."""
    folder = _new_folder(place)
    parted = rows.withColumn(BUCKET, bucket).repartition(max(1, touched), F.col(BUCKET))
    parted.write.partitionBy(BUCKET).parquet(str(folder))
    return written_files(folder, root)


def write_plain(rows: DataFrame, place: Path, root: Path) -> tuple[File, ...]:
    """Write rows to new files as they are partitioned."""
    folder = _new_folder(place)
    rows.write.parquet(str(folder))
    return written_files(folder, root)


def read_files(
    spark: SparkSession, schema: StructType, root: Path, files: Iterable[File]
) -> DataFrame:
    """The rows of some files of a table."""
    paths = [str(root / file.path) for file in files]
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*paths)


def _new_folder(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place / os.urandom(8).hex()


def written_files(folder: Path, root: Path) -> tuple[File, ...]:
    """The files that a write left, made durable; files without rows are not worth naming.

    An attempt that lost to its copy may still be writing, where Spark has it write.
    """
    files = []
    for path in sorted(folder.rglob("*.parquet")):
        if UNFINISHED in path.relative_to(folder).parts:
            continue
        rows = pq.read_metadata(path).num_rows
        if not rows:
            continue
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
        sync_folder(path.parent)
        relative = path.relative_to(root).as_posix()
        files.append(File(relative, bucket_in(relative), rows, path.stat().st_size))
    if files:
        sync_folder(folder)
    return tuple(files)
