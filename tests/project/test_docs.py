"""The pages are true: what they tell a reader to run is run, and what they refer to is there.

Every ```sh block of README.md and of docs/ is run by sh, in order, one shell for each page, against
a real server. A ```text block right after it holds lines that must be in its output, `...` standing
for anything. The only way out is a comment in the line before the block that gives a reason:
`<!-- not run: it takes a quarter of an hour -->`.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NamedTuple

import pytest
from psycopg.conninfo import conninfo_to_dict

from fencepost.cli import settings as loading
from fencepost.cli.settings import TABLES
from fencepost.store.settings import PostgresSettings, StoreSettings
from fencepost.testing.postgres import PostgresServer, find_programs
from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTSIDE = [page for page in sorted(ROOT.glob("*.md")) if page not in PAGES]
"""Pages that only say something, and whose links lead somewhere all the same."""
ON_POSTGRES = ROOT / "docs/guides/postgresql.md"
SECONDS_MAX = 60
DATABASE_SECONDS_MAX = 180
"""The page on PostgreSQL starts five servers and as many programs that import them."""
MARK = "\x01end of block\x01"

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n\s*)?"
    r"^```sh\n(?P<script>.*?)^```$"
    r"(?:\n\s*^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
_SERVES = re.compile(r"\./run serve( --config \S+)? &")


class Block(NamedTuple):
    """A piece of shell that a page shows, and what it says comes of it."""

    script: str
    expected: list[str]


def blocks_of(page: Path) -> Iterator[Block]:
    for found in _BLOCK.finditer(page.read_text()):
        if found["reason"] is None:
            yield Block(found["script"], (found["output"] or "").splitlines())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN = [page for page in PAGES if page != ON_POSTGRES and any(blocks_of(page))]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_what_a_page_tells_to_run_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.fail("the examples of the docs need curl: apt-get install -y curl (or brew)")
    blocks = list(blocks_of(page))
    folder = tmp_path / "work"
    folder.mkdir()
    # A page may begin by starting a server itself; then it gets a port and a folder of its own.
    if any(_SERVES.search(block.script) for block in blocks):
        outputs = run(blocks, folder, port=free_port(), data=tmp_path / "data")
    else:
        with ServerProcess(tmp_path / "data", arguments=["--long-poll-ms", "1000"]) as server:
            outputs = run(blocks, folder, port=server.port, data=tmp_path / "data")

    prints_what_it_says(blocks, outputs)


def test_the_commands_of_the_page_on_postgresql_run_on_one_of_its_own(tmp_path: Path) -> None:
    """In the page the database is on db.internal, and its programs ask the machine's own server."""
    blocks = list(blocks_of(ON_POSTGRES))
    assert "<!-- not run" not in ON_POSTGRES.read_text()
    folder = tmp_path / "work"
    folder.mkdir()
    with PostgresServer() as server:
        at = conninfo_to_dict(server.dsn)
        where = f"{at['host']}:{at['port']}"
        script = [block._replace(script=on(block.script, where)) for block in blocks]
        asked = {"PGHOST": str(at["host"]), "PGPORT": str(at["port"]), "PGUSER": str(at["user"])}
        # The programs of the page, from the wheel that brought the server.
        path = f"{find_programs()}{os.pathsep}{os.environ['PATH']}"
        outputs = run(
            script,
            folder,
            port=free_port(),
            data=tmp_path,
            environment={**asked, "PATH": path},
            seconds_max=DATABASE_SECONDS_MAX,
        )

    prints_what_it_says(blocks, outputs)


def on(script: str, where: str) -> str:
    """A script of the page for the server at `where`, and ports of its own."""
    second = free_port()
    return script.replace("@db.internal", f"@{where}").replace("4438", str(second))


def prints_what_it_says(blocks: list[Block], outputs: list[str]) -> None:
    for block, output in zip(blocks, outputs, strict=True):
        missing = [line for line in block.expected if not is_printed(line, output)]
        assert missing == [], f"{block.script}\nprinted\n{output}"


def run(
    blocks: list[Block],
    folder: Path,
    *,
    port: int,
    data: Path,
    environment: Mapping[str, str] | None = None,
    seconds_max: float = SECONDS_MAX,
) -> list[str]:
    """What each block prints, run one after the other by the same shell."""
    own = {"FENCEPOST_OUTBOX_FOLDER": str(folder.parent / "outbox")}
    around = {**os.environ, **own, **(environment or {})}
    script = f"\necho '{MARK}'\n".join(block.script for block in blocks)
    script = _SERVES.sub(rf"./run serve --port {port} --data '{data}'\1 &", script)
    script = script.replace("127.0.0.1:4437", f"127.0.0.1:{port}")
    script = script.replace("--port 4437", f"--port {port}")
    # What ./run runs. By itself it would make the environment anew after a change of the lock file,
    # and take away the one that this test runs in.
    (folder / "run").write_text(f"#!/bin/sh\nexec '{ROOT}/.venv/bin/fencepost' \"$@\"\n")
    (folder / "run").chmod(0o755)
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{around['PATH']}"
    # Into a file, not a pipe: a server that the shell leaves behind would hold the pipe open.
    with (folder.parent / "printed").open("w+") as printed:
        process = subprocess.Popen(
            ["sh", "-euc", script],
            cwd=folder,
            env={**around, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds_max)
        finally:
            end_session(process.pid)
        printed.seek(0)
        output = printed.read()
    assert process.returncode == 0, f"{script}\nprinted\n{output}"
    return output.split(MARK)


def end_session(pid: int) -> None:
    """End everything that was started in the session of `pid`, which is its process group too."""
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_printed(line: str, output: str) -> bool:
    """Whether a line of an example is in the output, by itself or with `...` for what varies."""
    pattern = re.compile(".*".join(map(re.escape, line.strip().split("..."))) + r"\s*")
    return any(pattern.fullmatch(printed.strip()) for printed in output.splitlines())


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in _LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            dead.append(f"{target}#{anchor}" if anchor else target)

    assert dead == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        left += (
            page.parent / target for target, _anchor in _LINK.findall(page.read_text()) if target
        )

    assert [name_of(page) for page in PAGES if page.resolve() not in reached] == []


def test_each_part_of_the_glossary_has_every_word_once_and_in_order() -> None:
    for part in (ROOT / "docs/reference/glossary.md").read_text().split("\n## ")[1:]:
        words = re.findall(r"^\| \*\*(.+?)\*\*", part, re.MULTILINE)

        assert words == sorted(set(words), key=str.lower), part.partition("\n")[0]


def anchors_of(page: Path) -> set[str]:
    """The names that headings have in a browser."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_the_shell_of_its_blocks_as_sh(page: Path) -> None:
    """Under another name a block would not be run."""
    assert re.findall(r"^```(?:bash|shell|console|zsh)\b", page.read_text(), re.MULTILINE) == []


_SETTING = re.compile(
    r"^\| `(\w+)` \| (`[^`]+`|) ?(?:\([^)]*\) )?\| `(\w+)` \| .+ \|$", re.MULTILINE
)


@pytest.mark.parametrize("table", TABLES)
def test_the_settings_page_has_every_setting_with_its_default(table: str) -> None:
    assert shown_in(f"[{table}]") == {
        field.name: (plain(field.default), f"FENCEPOST_{table}_{field.name}".upper())
        for field in fields(TABLES[table])
        if field.name == "folder" or field.name not in loading._COMPOSED
    }


def test_the_settings_page_has_what_only_postgresql_has() -> None:
    common = {field.name for field in fields(StoreSettings)}

    assert shown_in("[store] on PostgreSQL") == {
        field.name: (plain(field.default), f"FENCEPOST_STORE_{field.name}".upper())
        for field in fields(PostgresSettings)
        if field.name not in common
    }


def shown_in(heading: str) -> dict[str, tuple[object, str]]:
    """The settings in one section of the page, with their defaults and variables."""
    page = (ROOT / "docs/reference/settings.md").read_text()
    _, _, section = page.partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    return {
        name: (tomllib.loads(f"it = {default.strip('`')}")["it"] if default else None, variable)
        for name, default, variable in _SETTING.findall(section)
    }


def plain(default: object) -> object:
    """A default as TOML would say it; None for the one that depends on the machine."""
    if default is MISSING:
        return None
    return list(default) if isinstance(default, tuple) else default
