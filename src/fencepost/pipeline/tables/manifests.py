"""Tables as Parquet files, and the manifests that say which files a table is.

A manifest is a small JSON file with a number. It names every file of every table in its folder, and
the position up to which they hold the log: data and checkpoint are one file, so they change
together or not at all. Files are written first, then the manifest under a temporary name. The
manifest then gets its number, unless another manifest has it. Readers go to the highest number and
see only what it names; what a writer that was killed left behind is never read, and `vacuum`
removes it.

The folder is one that driver and executors share: a disk of this machine, or a mounted one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from fencepost.pipeline.tables.files import (
    Contents,
    Mark,
    TableChange,
    TableContents,
    TableError,
    folder_name,
    sync_folder,
    write_synced,
)

FOLDER = "_manifests"
DATA = "data"
DIGITS = 20
ATTEMPTS_MAX = 16
NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
"""What file systems without hard links say."""


class CommitConflictError(TableError):
    """Another writer committed to the table first. Stop one of the two, then run this one again."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to know about a folder of tables at one version of it."""

    version: int
    position: int
    query: str | None = None
    batch: int | None = None
    tables: dict[str, TableContents] = {}


class ManifestBook:
    """The tables of one folder, as its manifests have them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / FOLDER

    def load(self) -> Contents:
        """The tables as the newest manifest names them; empty before the first commit."""
        found = self.newest()
        if found is None:
            return Contents()
        return Contents(
            version=found.version,
            position=found.position,
            query=found.query,
            batch=found.batch,
            tables=found.tables,
        )

    def place(self, name: str) -> Path:
        """The folder below which new files of a table go."""
        return self._root / DATA / folder_name(name)

    def root_of(self, name: str) -> Path:
        """The folder that the paths of a table's files are relative to."""
        del name
        return self._root

    def commit(self, before: Contents, changes: Mapping[str, TableChange], mark: Mark) -> Contents:
        """Make the next version: what `before` had, with files added and removed."""
        tables = dict(before.tables)
        for name, change in changes.items():
            gone = {file.path for file in change.remove}
            known = tables[name].files if name in tables else ()
            kept = tuple(file for file in known if file.path not in gone)
            tables[name] = TableContents(
                schema=change.schema, position=mark.position, files=kept + change.add
            )
        manifest = Manifest(
            version=before.version + 1,
            position=mark.position,
            query=mark.query,
            batch=mark.batch,
            tables=tables,
        )
        self._publish(manifest)
        return Contents(
            version=manifest.version,
            position=mark.position,
            query=mark.query,
            batch=mark.batch,
            tables=tables,
        )

    # Manifests

    def newest(self) -> Manifest | None:
        """The manifest with the highest number; it may be vacuumed away while we look."""
        for _attempt in range(ATTEMPTS_MAX):
            versions = self.versions()
            if not versions:
                return None
            try:
                return self.manifest(versions[-1])
            except FileNotFoundError:
                continue
        raise TableError(f"the manifests of {self._root} change faster than they can be read")

    def versions(self) -> list[int]:
        """The numbers that there are, in order."""
        if not self._folder.is_dir():
            return []
        names = (name.partition(".json") for name in os.listdir(self._folder))
        return sorted(int(number) for number, ending, _ in names if ending and number.isdigit())

    def manifest(self, version: int) -> Manifest:
        raw = self._path(version).read_bytes()
        try:
            return msgspec.json.decode(raw, type=Manifest)
        except msgspec.DecodeError as error:
            raise TableError(
                f"{self._path(version)} is no manifest ({error}): remove the table's folder and"
                " make it again"
            ) from None

    def _path(self, version: int) -> Path:
        return self._folder / f"{version:0{DIGITS}d}.json"

    def _publish(self, manifest: Manifest) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._path(manifest.version)
        draft = self._folder / f".{target.name}.{os.urandom(8).hex()}"
        write_synced(draft, msgspec.json.format(msgspec.json.encode(manifest)))
        try:
            _give_name(draft, target)
        except FileExistsError:
            raise CommitConflictError(
                f"version {manifest.version} of {self._root} was committed by another writer;"
                " only one may follow a table"
            ) from None
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self._folder)

    # What is no longer needed

    def vacuum(self, *, keep_versions: int, unnamed_seconds: float, now: float) -> list[Path]:
        """Remove old manifests and files that none of those kept names; what was removed.

        A file younger than `unnamed_seconds` stays: its manifest may be about to be written.
        """
        kept = self.versions()[-max(1, keep_versions) :]
        named = {
            self._root / file.path
            for version in kept
            for table in self.manifest(version).tables.values()
            for file in table.files
        }
        removed = list(self._old_manifests(kept))
        for path in removed:
            path.unlink(missing_ok=True)
        for path in _files_below(self._root / DATA):
            if path not in named and _age(path, now) >= unnamed_seconds:
                path.unlink(missing_ok=True)
                removed.append(path)
        _remove_empty_folders(self._root / DATA, now - unnamed_seconds)
        return removed

    def _old_manifests(self, kept: Iterable[int]) -> Iterator[Path]:
        keeping = set(kept)
        return (self._path(one) for one in self.versions() if one not in keeping)


def _give_name(draft: Path, target: Path) -> None:
    """Let `target` be `draft`, unless it exists: linking is the one way that refuses atomically."""
    try:
        os.link(draft, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError(target) from None
        os.rename(draft, target)


def _age(path: Path, now: float) -> float:
    """Seconds since a file was written; none when its writer has just moved it elsewhere."""
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return -1.0


def _files_below(folder: Path) -> list[Path]:
    return [Path(base) / name for base, _folders, names in os.walk(folder) for name in names]


def _remove_empty_folders(folder: Path, before: float) -> None:
    for base, _folders, _names in os.walk(folder, topdown=False):
        path = Path(base)
        if path != folder and not any(path.iterdir()) and path.stat().st_mtime <= before:
            shutil.rmtree(path, ignore_errors=True)
