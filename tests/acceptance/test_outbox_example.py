"""The order service of examples/outbox.py: it pays, crashes, and the warehouse hears of it once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import ServerProcess

# The program, run as the first lines of examples.outbox: say.
PROGRAM = Path(__file__).parents[2] / "examples/outbox.py"


class Service:
    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=self._folder,
            env=os.environ | {"FENCEPOST_URL": self._server.url},
            capture_output=True,
            text=True,
            check=False,
        )

    def orders(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(PROGRAM), "shop.db", *command)

    def fencepost(self, *command: str) -> str:
        done = self.run("-m", "fencepost", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def relay(self) -> str:
        command = ["outbox", "relay", "--database", "shop.db", "--mesh", "shop"]
        return self.fencepost(*command, "--as", "orders", "--once")

    def shipped(self) -> list[str]:
        return self.orders("warehouse").stdout.splitlines()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with ServerProcess(tmp_path / "data") as server:
        service = Service(server, tmp_path)
        service.fencepost("mesh", "create", "shop")
        service.fencepost("mesh", "member", "shop", "warehouse")
        yield service


def test_the_warehouse_hears_of_each_payment_once_whatever_crashes(service: Service) -> None:
    for order in ("6", "7", "8"):
        assert service.orders("order", order).returncode == 0

    # Killed before the commit: nothing was paid and nothing will be shipped.
    assert service.orders("pay", "6", "--crash", "before").returncode == -signal.SIGKILL
    assert service.relay() == "0 delivered, 0 dead\n"
    assert service.shipped() == []

    # Killed after it: the warehouse hears of it, and the service, which does not know, pays again.
    assert service.orders("pay", "7", "--crash", "after").returncode == -signal.SIGKILL
    assert service.orders("pay", "7").stdout == "order 7 is paid\n"
    assert service.relay() == "1 delivered, 0 dead\n"
    assert service.orders("pay", "7").stdout == "order 7 is paid\n"
    assert service.orders("pay", "8").stdout == "order 8 is paid\n"
    assert service.orders("pay", "6").stdout == "order 6 is paid\n"
    assert service.relay() == "2 delivered, 0 dead\n"

    assert service.shipped() == [
        "ship order 7 (paid-7)",
        "ship order 8 (paid-8)",
        "ship order 6 (paid-6)",
    ]


def test_an_order_that_is_not_there_is_not_paid(service: Service) -> None:
    done = service.orders("pay", "9")

    assert (done.returncode, done.stderr) == (1, "there is no order 9\n")
    assert service.relay() == "0 delivered, 0 dead\n"
