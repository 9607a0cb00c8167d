"""The command line imports what the command that was asked for needs, and no more."""

import subprocess
import sys

import pytest

CODE = """
import sys
from fencepost.cli.main import build
build(sys.argv[1])
print(*(name for name in sys.modules if name.startswith(("fencepost.server", "jwt", "pyspark"))))
"""


@pytest.mark.parametrize("command", ["read", "groups", "pipeline"])
def test_a_command_of_a_client_does_not_load_the_server(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, command], capture_output=True, text=True, check=True
    )

    assert ran.stdout.split() == []
