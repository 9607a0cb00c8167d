"""`fencepost migrate` and `serve --no-migrate` as an operator runs them, on both kinds of store."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import apsw
import psycopg
import pytest

from fencepost.store.sql import load_migrations
from fencepost.store.sqlite.connection import FILE
from fencepost.testing.postgres import shared_server
from tests.acceptance.test_serve_command import fencepost, refusal
from tests.serving import ServerProcess

KINDS = ("sqlite", "postgres")


def package_of(kind: str) -> str:
    return f"fencepost.store.{kind}.migrations"


def newest(kind: str) -> int:
    return load_migrations(package_of(kind))[-1][0]


class Place:
    """A store that is still empty, and what the command line calls it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.newest = newest(kind)
        if kind == "sqlite":
            self.options = ["--data", str(folder)]
            self.shown = str(folder)
        else:
            self.shown = shared_server().new_database(migrated=False)
            self.options = ["--store", self.shown]
        self._folder = folder

    def version(self) -> int:
        """What the store itself says; -1 when it is not there or has no tables."""
        if self.kind == "sqlite":
            file = self._folder / FILE
            if not file.exists():
                return -1
            connection = sqlite3.connect(file)
            try:
                return int(connection.execute("PRAGMA user_version").fetchone()[0])
            finally:
                connection.close()
        with psycopg.connect(self.shown) as connected:
            row = connected.execute("SELECT to_regclass('migrations')::text").fetchone()
            assert row is not None
            if row[0] is None:
                return -1
            row = connected.execute("SELECT max(number) FROM migrations").fetchone()
            assert row is not None
            return int(row[0])


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path / "data")


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_an_empty_store_gets_every_step_and_the_second_time_none(place: Place) -> None:
    first = result_of(fencepost("migrate", *place.options, "--json"))
    again = result_of(fencepost("migrate", *place.options, "--json"))

    steps = [{"number": number, "name": name} for number, name, _ in load_of(place)]
    assert first == {
        "store": place.shown,
        "version": place.newest,
        "newest": place.newest,
        "steps": steps,
        "dry_run": False,
    }
    assert again["steps"] == []
    assert place.version() == place.newest


def load_of(place: Place) -> list[tuple[int, str, str]]:
    return load_migrations(package_of(place.kind))


def test_a_dry_run_shows_the_sql_and_runs_nothing(place: Place) -> None:
    done = fencepost("migrate", *place.options, "--dry-run")

    assert done.returncode == 0, done
    for number, name, script in load_of(place):
        assert f"-- {number:04}_{name}\n" in done.stdout
        assert script.strip() in done.stdout
    assert f"from version 0 to {place.newest}; nothing was run" in done.stdout
    assert place.version() == -1


def test_a_store_that_is_up_to_date_is_said_to_be(place: Place) -> None:
    fencepost("migrate", *place.options)

    done = fencepost("migrate", *place.options)

    assert done.stdout == f"{place.shown}: up to date at version {place.newest}\n"


def test_no_migrate_refuses_an_older_schema_and_says_what_to_run(place: Place) -> None:
    said = refusal("--port", "0", "--no-migrate", *place.options)

    assert f"version 0, and this server needs {place.newest}" in said
    assert "fencepost migrate " + place.options[0] in said
    assert place.version() == -1


def test_a_schema_of_a_newer_version_is_left_alone(place: Place) -> None:
    fencepost("migrate", *place.options)
    _pretend_newer(place)

    done = fencepost("migrate", *place.options, "--json")

    assert done.returncode == 1
    assert "newer version" in json.loads(done.stdout)["error"]
    assert place.version() == place.newest + 1


def _pretend_newer(place: Place) -> None:
    if place.kind == "sqlite":
        connection = apsw.Connection(str(Path(place.shown) / FILE))
        connection.pragma("user_version", place.newest + 1)
        connection.close()
        return
    with psycopg.connect(place.shown) as connected:
        connected.execute(
            "INSERT INTO migrations SELECT number + 1, 'of_tomorrow', at FROM migrations"
            " WHERE number = (SELECT max(number) FROM migrations)"
        )


def test_a_folder_in_use_is_not_migrated_under_its_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data"):
        done = fencepost("migrate", "--data", str(tmp_path / "data"))

    assert done.returncode == 1
    assert "in use" in done.stderr


def test_no_migrate_serves_what_is_up_to_date(tmp_path: Path) -> None:
    fencepost("migrate", "--data", str(tmp_path / "data"))

    with ServerProcess(tmp_path / "data", arguments=["--no-migrate"]) as server:
        assert server.port > 0


def test_several_migrations_at_once_agree(tmp_path: Path) -> None:
    place = Place("postgres", tmp_path)
    command = [*_command(), "migrate", *place.options, "--json"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]

    said = [process.communicate(timeout=60)[0] for process in started]

    assert [process.returncode for process in started] == [0, 0, 0, 0], said
    assert place.version() == place.newest


def _command() -> list[str]:
    return [sys.executable, "-m", "fencepost"]


def test_the_config_file_says_which_store_it_is(tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(f'[store]\nfolder = "{tmp_path / "data"}"\n')

    result = result_of(fencepost("migrate", "--config", str(config), "--json"))

    assert result["store"] == str(tmp_path / "data")


@pytest.mark.parametrize("command", ["migrate", "serve", "check"])
def test_a_folder_and_a_database_at_once_are_refused(command: str, tmp_path: Path) -> None:
    options = ["--data", str(tmp_path), "--store", "postgresql://db.example/name"]

    done = fencepost(command, *options)

    assert done.returncode in (1, 2)
    assert "give one of them" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["migrate", "serve", "check"])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://streams:hush@127.0.0.1:1/name",
        "postgresql://streams:hu/hush@127.0.0.1:1/name",
        "postgresql://streams@127.0.0.1:1/name?password=hush&no_such_parameter=1",
    ],
)
def test_a_database_that_cannot_be_used_is_said_without_its_password(
    command: str, url: str
) -> None:
    done = fencepost(command, FENCEPOST_STORE_URL=url)

    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert "fencepost: " in done.stderr
    assert "hush" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", ["migrate", "serve", "check"])
def test_without_the_extra_the_way_to_get_it_is_said(command: str, tmp_path: Path) -> None:
    """A folder in front of the path hides the library, as if it were not installed."""
    hiding = tmp_path / "psycopg"
    hiding.mkdir()
    (hiding / "__init__.py").write_text("raise ImportError('psycopg is not installed')\n")

    done = fencepost(command, "--store", "postgresql://db/name", PYTHONPATH=str(tmp_path))

    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "pip install 'fencepost[postgres]'" in done.stderr
