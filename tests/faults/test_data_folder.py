"""One folder, one server: the second is told so and leaves; a killed one leaves no lock behind."""

import subprocess
import sys
from pathlib import Path

from fencepost.store.sqlite.connection import FILE
from tests.faults.wire import asked, get, post, put
from tests.serving import ServerProcess

EXIT_S_MAX = 30


def refused(data: Path) -> tuple[int, str]:
    """Start a server that is expected not to start; its exit code and its last words."""
    ended = subprocess.run(
        [sys.executable, "-m", "fencepost", "serve", "--port", "0", "--data", str(data)],
        capture_output=True,
        text=True,
        timeout=EXIT_S_MAX,
        check=False,
    )
    return ended.returncode, ended.stderr.strip()


async def test_a_second_server_on_a_folder_is_refused_while_the_first_goes_on(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path) as first:
        await asked(first.port, put("s"))

        code, said = refused(tmp_path)

        assert code == 1
        assert said.startswith("fencepost: ")
        assert "in use by another fencepost server" in said
        assert str(first.pid) in said
        assert "\n" not in said
        assert (await asked(first.port, post("s", b"x", producer="p"))).status == 200


async def test_a_killed_server_leaves_its_folder_free(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path).start()
    await asked(first.port, put("s"))
    await asked(first.port, post("s", b"x", producer="p"))
    first.kill()

    with ServerProcess(tmp_path) as second:
        assert (await asked(second.port, get("s"))).body == b"x"


async def test_a_folder_with_a_damaged_database_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        await asked(server.port, put("s"))
    file = tmp_path / FILE
    data = bytearray(file.read_bytes())
    data[:100] = b"\xff" * 100
    file.write_bytes(data)

    code, said = refused(tmp_path)

    assert code == 1
    assert said.startswith("fencepost: ")
    assert str(file) in said
    assert "Traceback" not in said
    assert "\n" not in said
    assert file.read_bytes() == bytes(data), "a damaged file must be left as it is"
