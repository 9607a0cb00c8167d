"""Make .venv from a lock file, with every hash checked. Called by environment.sh only.

This runs on whatever Python 3.11+ the machine has, before anything is installed, so it uses the
standard library alone. Two of these may run at once (a server being started while the tests are):
the second waits for the first, then finds the work done. The stamp is written last, so a making
that was interrupted leaves no stamp and is begun again from nothing.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

RUN = ("requirements.lock", "made-for-run")
POSTGRES = ("requirements-postgres.lock", "made-for-postgres")
DEMO = ("requirements-demo.lock", "made-for-demo")
LESS = {
    "requirements.lock": (),
    "requirements-postgres.lock": (RUN,),
    "requirements-demo.lock": (RUN, POSTGRES),
    "requirements-dev.lock": (RUN, POSTGRES, DEMO),
}
"""What an environment may have been made for, and still hold nothing that its lock does not."""


def main(root: Path, lock: str, stamp_name: str, stamp: str) -> None:
    environment = root / ".venv"
    # The kernel drops this lock when its holder dies, however it dies: it is never left behind.
    with (root / ".venv.lock").open("w") as mutex:
        hold(mutex.fileno())
        if read(environment / stamp_name) == stamp:
            return
        if not was_made_from(lock, stamp_name, environment, root):
            if any(was_made_from(*less, environment, root) for less in LESS[lock]):
                # A lock pins what the ones before it pin and more: adding it changes nothing that
                # a running server may be using.
                say(f"adding {lock} to .venv (once)")
            else:
                say(f"making .venv from {lock} (once, it takes a minute or two)")
                make_empty(environment)
            pip(environment, "install", "--require-hashes", "--requirement", str(root / lock))
        # The build backend is in the lock as well: nothing unhashed is fetched for this step.
        pip(environment, "install", "--no-build-isolation", "--no-deps", "--editable", str(root))
        (environment / stamp_name).write_text(stamp + "\n")
        say("ready")


def hold(mutex: int) -> None:
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another ./run or ./test is making .venv, waiting for it")
        fcntl.flock(mutex, fcntl.LOCK_EX)


def was_made_from(lock: str, stamp_name: str, environment: Path, root: Path) -> bool:
    """Say whether a finished environment of exactly this lock is there, in this very place.

    The stamp's third line, pyproject.toml, may differ: that asks for the project's own
    installation to be renewed, not for its packages.
    """
    made = (read(environment / stamp_name) or "").splitlines()
    return made[:2] == [str(root), checksum(root / lock)] and runs(environment / "bin" / "python")


def runs(python: Path) -> bool:
    """Say whether the interpreter that the environment links to is still there."""
    try:
        return subprocess.run([python, "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def make_empty(environment: Path) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        stop(
            f"{sys.executable} cannot make environments: it has no ensurepip."
            " On Debian and Ubuntu: apt install python3-venv"
        )
    venv.create(environment, with_pip=True, symlinks=True)


def pip(environment: Path, *arguments: str) -> None:
    binaries = environment / "bin"
    command = [str(binaries / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # The build backend looks for its own program on the PATH.
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    outcome = subprocess.run([*command, *arguments], env={**os.environ, "PATH": path}, check=False)
    if outcome.returncode != 0:
        stop("pip could not finish (see above); run the same command again to begin anew")


def checksum(path: Path) -> str:
    with path.open("rb") as content:
        return subprocess.run(
            ["cksum"], stdin=content, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def say(line: str) -> None:
    sys.stderr.write(f"fencepost: {line}\n")
    sys.stderr.flush()


def stop(line: str) -> NoReturn:
    say(line)
    raise SystemExit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
