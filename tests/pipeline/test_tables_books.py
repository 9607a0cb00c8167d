"""What a folder of tables promises to its writers, whatever the format; without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from fencepost.pipeline.tables.files import ROWS, UNBUCKETED, Book, File, Mark, TableChange
from fencepost.pipeline.tables.manifests import CommitConflictError
from fencepost.pipeline.tables.pieces import Format, book_of, written_files

COLUMNS = StructType([StructField("position", LongType())])


def _added(book: Book, name: str, positions: list[int]) -> dict[str, TableChange]:
    """A change that adds one new file of rows."""
    path = book.place(ROWS) / name / "part.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"position": pa.array(positions, pa.int64())}), path)
    relative = path.relative_to(book.root_of(ROWS)).as_posix()
    file = File(relative, UNBUCKETED, len(positions), path.stat().st_size)
    return {ROWS: TableChange(schema=COLUMNS.json(), add=(file,))}


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("commits_before", [0, 1])
def test_the_second_of_two_writers_is_refused_and_adds_nothing(
    tmp_path: Path, format: Format, commits_before: int
) -> None:
    first, second = book_of(tmp_path, format), book_of(tmp_path, format)
    for position in range(commits_before):
        first.commit(first.load(), _added(first, f"before-{position}", [position]), Mark(position))
    seen, seen_too = first.load(), second.load()
    rows, rows_too = _added(first, "one", [7, 8]), _added(second, "other", [7, 8])

    first.commit(seen, rows, Mark(8))
    with pytest.raises(CommitConflictError):
        second.commit(seen_too, rows_too, Mark(8))

    held = book_of(tmp_path, format).load()
    assert held.position == 8
    assert sum(file.rows for file in held.files_of(ROWS)) == commits_before + 2


def test_a_vacuum_while_a_commit_is_prepared_does_not_refuse_it(tmp_path: Path) -> None:
    from fencepost.pipeline.tables.delta import DeltaBook

    book = DeltaBook(tmp_path)
    book.commit(book.load(), _added(book, "kept", [0]), Mark(0))
    _added(book, "of-a-run-that-was-killed", [1])
    seen = book.load()

    removed = DeltaBook(tmp_path).vacuum(unnamed_seconds=0)
    book.commit(seen, _added(book, "next", [1]), Mark(1))

    assert len(removed) == 1
    assert book.load().position == 1


def test_what_a_slow_copy_of_a_task_still_writes_is_no_file_of_the_table(tmp_path: Path) -> None:
    attempt = tmp_path / "_temporary" / "0" / "_temporary" / "attempt_7"
    for folder in (tmp_path / "_bucket=1", attempt / "_bucket=1"):
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"position": [1, 2]}), folder / "part.parquet")
    (attempt / "torn.parquet").write_bytes(b"PAR1")

    files = written_files(tmp_path, tmp_path)

    assert [(file.path, file.bucket, file.rows) for file in files] == [
        ("_bucket=1/part.parquet", 1, 2)
    ]
