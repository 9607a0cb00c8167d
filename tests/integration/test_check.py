"""`fencepost check`: what is whole is found whole, and each kind of damage is found by its name."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import fencepost.store
from fencepost.store.check.report import UnreadableError
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.connection import FILE
from tests.integration.damages import PLANTED, PLANTED_IN_A_DATABASE, PLANTED_IN_A_FILE
from tests.integration.folders import furnish
from tests.integration.raw import ask
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("check") / "data"
    asyncio.run(furnish(folder))
    return folder


@pytest.fixture
def folder(furnished: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(furnished, tmp_path / "data"))


def damage(folder: Path, *statements: str) -> None:
    connection = apsw.Connection(str(folder / FILE))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_whole_folder_has_no_findings(folder: Path) -> None:
    report = check(folder)

    assert report.findings == []
    assert report.counts["streams"] >= 12
    assert report.counts["keys"] == 5
    assert report.counts["producers"] >= 4
    assert report.counts["subscriptions"] == 1


@pytest.mark.parametrize("name", PLANTED | PLANTED_IN_A_FILE)
def test_planted_damage_is_found(folder: Path, name: str) -> None:
    expected, statements = (PLANTED | PLANTED_IN_A_FILE)[name]
    damage(folder, *statements)

    report = check(folder)

    assert expected in report.codes, report.findings


def test_every_code_of_a_finding_has_damage_that_is_found_by_it() -> None:
    sources = Path(fencepost.store.__file__).parent.glob("check/*.py")
    written = "".join(file.read_text() for file in sources)
    codes = set(re.findall(r'(?:\badd\(|\byield \(?)\s*"(\w+)"', written))
    assert len(codes) > 50

    planted = {code for code, _ in (PLANTED | PLANTED_IN_A_FILE | PLANTED_IN_A_DATABASE).values()}

    assert codes - planted == set()


def _zero_a_page(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.seek(4096 * 3)
        file.write(bytes(4096))


def _cut_off(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.truncate((folder / FILE).stat().st_size // 2 // 4096 * 4096)


def _flip_bits(folder: Path) -> None:
    """Inside the index of paths, so that table and index disagree."""
    data = (folder / FILE).read_bytes()
    connection = apsw.Connection(str(folder / FILE))
    [(root,)] = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'streams_by_path'"
    )
    connection.close()
    at = data.index(b"short", 4096 * (root - 1))
    with (folder / FILE).open("r+b") as file:
        file.seek(at)
        file.write(b"shirt")


@pytest.mark.parametrize("harm", [_zero_a_page, _cut_off, _flip_bits])
def test_damage_below_the_tables_is_found(folder: Path, harm: Callable[[Path], None]) -> None:
    harm(folder)

    report = check(folder)

    assert "file_damaged" in report.codes


@pytest.mark.parametrize("make", ["absent", "empty folder", "text", "foreign", "too new"])
def test_what_is_no_data_folder_cannot_be_checked(folder: Path, tmp_path: Path, make: str) -> None:
    place = tmp_path / "place"
    if make == "empty folder":
        place.mkdir()
    elif make == "text":
        place.write_text("this is no database, whatever its name says. " * 100)
    elif make == "foreign":
        apsw.Connection(str(place)).execute("CREATE TABLE streams (a)")
    elif make == "too new":
        damage(folder, "PRAGMA user_version = 9999")
        place = folder

    with pytest.raises(UnreadableError):
        check(place)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_command_says_what_it_found_and_how(folder: Path) -> None:
    clean = run("check", "--data", str(folder))
    damage(folder, "UPDATE counters SET next_stream = 2")
    found = run("check", "--data", str(folder))
    as_json = run("check", "--data", str(folder), "--json")
    nothing = run("check", "--data", str(folder / "nowhere"), "--json")

    assert clean.returncode == 0, clean
    assert "no findings" in clean.stdout
    assert found.returncode == 1
    assert "counter_behind" in found.stdout
    assert as_json.returncode == 1
    report = json.loads(as_json.stdout)
    assert not report["clean"]
    assert report["findings_count"] == 1
    assert report["findings"][0]["code"] == "counter_behind"
    assert nothing.returncode == 2
    assert "error" in json.loads(nothing.stdout)


def test_a_check_changes_nothing_and_leaves_nothing(folder: Path) -> None:
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}

    check(folder)

    after = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    # Reading a database with a write-ahead log needs that file; it stays empty.
    assert {name: data for name, data in after.items() if data and "-shm" not in name} == {
        name: data for name, data in before.items() if data
    }


def test_a_folder_that_a_server_is_using_can_be_checked(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ServerProcess(folder) as server:
        ask(server.port, "PUT", "/v1/stream/s", "Content-Type: text/plain")
        for number in range(50):
            ask(
                server.port,
                "POST",
                "/v1/stream/s",
                "Content-Type: text/plain",
                f"Producer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: {number}",
                body=b"%d" % number,
            )

        report = check(folder)

        assert report.findings == []
        assert report.counts["messages"] == 50
