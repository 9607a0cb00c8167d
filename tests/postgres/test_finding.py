"""Where tests get their PostgreSQL from: an address, the wheel, the machine; else a sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psycopg
import pytest

from fencepost.testing import postgres
from fencepost.testing.postgres import (
    ADDRESS,
    NoPostgresError,
    NotOursError,
    find_programs,
    shared_server,
)


@pytest.fixture(name="bare")
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with neither; what is put into this folder is on its PATH."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(postgres, "_installed", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


def test_an_address_comes_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    running = shared_server().dsn
    monkeypatch.setenv(ADDRESS, running)
    monkeypatch.setattr(postgres, "_shared", None)

    given = shared_server()

    assert given.dsn == running
    with psycopg.connect(given.new_database()) as connection:
        assert connection.execute("SELECT count(*) FROM streams").fetchone() == (0,)
    with pytest.raises(NotOursError):
        given.kill()
    given.close()


def test_the_wheel_comes_before_the_machine(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare, "postgres")
    program(bare, "initdb")
    place = tmp_path / "pgserver" / "__init__.py"
    spec = importlib.util.spec_from_file_location("pgserver", place)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)

    assert find_programs() == tmp_path / "pgserver" / "pginstall" / "bin"


def test_the_machine_s_own_is_taken_when_it_can_make_databases(bare: Path) -> None:
    program(bare, "postgres")
    with pytest.raises(NoPostgresError):
        find_programs()

    program(bare, "initdb")

    assert find_programs() == bare


def test_without_any_the_error_names_all_three_ways(bare: Path) -> None:
    with pytest.raises(NoPostgresError, match=rf"{ADDRESS}.*pgserver.*PATH"):
        find_programs()
