"""`fencepost demo`, as `./run` without arguments starts it: it proves what it shows, or fails."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

DEMO_SECONDS_MAX = 600


@pytest.mark.timeout(DEMO_SECONDS_MAX + 30)
def test_the_demo_proves_what_it_shows_and_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with tempfile.TemporaryDirectory() as scratch:  # a short path: there will be sockets in it
        done = subprocess.run(
            [*_FENCEPOST, "demo", "--orders", "1000", "--keep", str(kept), "--json"],
            capture_output=True,
            text=True,
            timeout=DEMO_SECONDS_MAX,
            check=False,
            env={
                **os.environ,
                "TMPDIR": scratch,
                "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={scratch}",
            },
        )
        left = os.listdir(scratch)

    assert done.returncode == 0, done.stderr + done.stdout
    assert left == []
    told = json.loads(done.stdout)
    assert told["clean"]
    assert [claim["holds"] for claim in told["claims"]] == [True] * 5
    assert (kept / "audit.png").stat().st_size > 0
    assert not _running_below(kept)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_in_the_middle_leaves_nothing_running(
    tmp_path: Path, how: signal.Signals
) -> None:
    kept = tmp_path / "kept"
    demo = subprocess.Popen(
        # So many that it is still producing them, which is before it starts a Spark.
        [*_FENCEPOST, "demo", "--orders", "10000000", "--keep", str(kept)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # In the background of a shell Ctrl-C is ignored, and commands would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not (kept / "data" / "fencepost.db").exists():
        assert demo.poll() is None
    assert len(_running_below(kept)) == 2

    demo.send_signal(how)

    assert demo.wait(60) == 130
    assert not _running_below(kept)


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")

    done = subprocess.run(
        [*_FENCEPOST, "demo", "--keep", str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "name a new folder with --keep" in " ".join(done.stderr.split())
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


_FENCEPOST = [sys.executable, "-m", "fencepost"]


def _running_below(folder: Path) -> list[int]:
    """Processes that name a folder in their command line."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and int(entry.name) != os.getpid()
        and str(folder).encode() in _command_of(entry)
    ]


def _command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
