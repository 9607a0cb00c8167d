"""What a driver remembers of a run between its batches."""

from __future__ import annotations

import threading
from pathlib import Path

from fencepost.pipeline.sink.identity import Identity, notes_folder, run_file

URL = "http://localhost:4437"


def identity(run: str, name: str = "sink") -> Identity:
    return Identity(name, "query", 0, run)


def test_a_note_is_there_for_the_next_batch_of_the_same_run_only(tmp_path: Path) -> None:
    with run_file(tmp_path, URL, identity("one")) as file:
        file.note.epoch = 7
        file.note.mismatches = 1_000_000
        file.save()
    with run_file(tmp_path, URL, identity("one")) as file:
        assert file.note.epoch == 7
        file.note.mismatches = 0  # a shorter text must not leave the end of the longer one
        file.save()

    with run_file(tmp_path, URL, identity("one")) as file:
        assert (file.note.epoch, file.note.mismatches) == (7, 0)
    for other in (identity("two"), identity("one", "another")):
        with run_file(tmp_path, URL, other) as file:
            assert file.note.epoch is None
    with run_file(tmp_path, "http://elsewhere:4437", identity("one")) as file:
        assert file.note.epoch is None


def test_a_note_has_one_holder_at_a_time(tmp_path: Path) -> None:
    """Two writes of one foreachBatch may commit at once, from two processes."""
    first_is_done = threading.Event()
    seen: list[int | None] = []

    def second() -> None:
        with run_file(tmp_path, URL, identity("one")) as file:
            assert first_is_done.is_set()
            seen.append(file.note.epoch)

    with run_file(tmp_path, URL, identity("one")) as file:
        thread = threading.Thread(target=second)
        thread.start()
        file.note.epoch = 3
        file.save()
        first_is_done.set()
    thread.join(30)

    assert seen == [3]


def test_notes_lie_in_the_drivers_scratch_folder_or_else_in_one_of_the_users_own(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "gone"

    assert notes_folder({"SPARK_LOCAL_DIRS": f"{gone},{tmp_path}"}).parent == tmp_path
    assert notes_folder({"SPARK_LOCAL_DIRS": str(gone)}) == notes_folder({})
    assert notes_folder({}).name.startswith("fencepost-runs-")
