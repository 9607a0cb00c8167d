"""The guides to State and coordination are true: every ```python block of them runs, in order.

The blocks of a page are one program, run by a real interpreter against a real server.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ServerProcess

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = [
    page
    for name in ("state", "task-claims", "resources", "overrides", "executors")
    if (page := GUIDES / f"{name}.md").exists()
]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_guide_runs(page: Path, tmp_path: Path) -> None:
    program = "\n".join(_BLOCK.findall(page.read_text()))
    assert program
    with ServerProcess(tmp_path / "data") as server:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://127.0.0.1:4437", server.url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 0, done.stderr
