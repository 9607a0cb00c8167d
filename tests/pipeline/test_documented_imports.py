"""Every import of the pipeline that a page, the README or an example shows works as it is written.

The list at the top is what earlier releases documented: programs of users hold these lines, so they
stay, also when the pages later show something else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
]
IMPORT = re.compile(r"^from fencepost\.pipeline[\w.]* import [\w, ]+", re.MULTILINE)
MODULE = re.compile(r"python -m (fencepost\.pipeline[\w.]*)")
RELEASED_IMPORTS = {
    "from fencepost.pipeline import session",
    "from fencepost.pipeline import register",
    "from fencepost.pipeline import tables",
    "from fencepost.pipeline import session, tables",
    "from fencepost.pipeline.audit import audit",
}
RELEASED_MODULES = {"fencepost.pipeline.java"}


def found(pattern: re.Pattern[str]) -> set[str]:
    return {one.strip() for page in PAGES for one in pattern.findall(page.read_text())}


IMPORTS = sorted(RELEASED_IMPORTS | found(IMPORT))
MODULES = sorted(RELEASED_MODULES | found(MODULE))


@pytest.mark.parametrize("line", IMPORTS)
def test_a_documented_import_gives_something_that_can_be_used(line: str) -> None:
    namespace: dict[str, object] = {}

    exec(line, namespace)  # noqa: S102  (the line of the page itself is what is tested)

    for name in line.partition(" import ")[2].split(","):
        assert namespace[name.strip()] is not None


@pytest.mark.parametrize("module", MODULES)
def test_a_documented_module_runs(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_dir()


def test_audit_and_the_tables_are_what_the_pages_call() -> None:
    from fencepost.pipeline import tables
    from fencepost.pipeline.audit import audit

    assert callable(audit)
    for name in ("backfill", "follow", "position", "read", "types", "vacuum"):
        assert callable(getattr(tables, name))


def test_the_position_of_a_table_is_read_without_pyspark() -> None:
    """`fencepost pipeline lag` runs where PySpark is not installed."""
    program = (
        "import sys; sys.modules['pyspark'] = None;"
        " from fencepost.pipeline.lag import lag, reached; print('read')"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout == "read\n", done.stderr
