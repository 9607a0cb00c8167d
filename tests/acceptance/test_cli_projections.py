"""`fencepost events projections` and `rebuild`, as an operator runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

import fencepost
from tests.serving import ServerProcess

SHOP = """
from fencepost.events import App, Entity, Event, Recorded, Transaction

class Placed(Event):
    sku: str

class Order(Entity, stream="orders/{id}"):
    pass

def make(version):
    app = App("shop", entities=[Order])

    @app.projection("orders", version=version, schema="create table {orders} (sku text)")
    def listed(event: Recorded[Placed], db: Transaction) -> None:
        db.execute("insert into {orders} values (?)", (event.data.sku,))

    return app

first, second = make(1), make(2)
"""


def test_an_operator_sees_versions_and_builds_the_next_one(
    server_process: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "cli_shop.py").write_text(SHOP)
    with fencepost.connect(server_process.url) as client:
        client.create("orders/1")
        client.stream("orders/1").append({"name": "Placed", "data": {"sku": "tea"}})
        head = client.log_head()

    def events(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "fencepost", "events", *arguments),
                *("--projections", "shop.db", "--url", server_process.url),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    built = events("rebuild", "cli_shop:first", "orders")
    beside = events("rebuild", "cli_shop:second", "orders")
    shown = events("projections", "cli_shop:second")
    wrong = events("rebuild", "cli_shop:second", "nothing")

    assert built.stdout == f"orders is built up to {head} and live\n", built.stderr
    assert f"{head} of {head}" in beside.stderr
    assert shown.stdout.splitlines() == [
        f"orders\tv1\t{head}\t0 behind\t",
        f"orders\tv2\t{head}\t0 behind\tlive",
    ]
    assert wrong.returncode != 0
    assert "nothing" in wrong.stderr


@pytest.mark.parametrize(
    ("database", "said"),
    [
        ("postgresql://127.0.0.1:1/shop", "Connection refused"),
        ("no/such/folder/shop.db", "unable to open database file: no/such/folder/shop.db"),
        ("cli_shop.py", "file is not a database"),
    ],
)
@pytest.mark.parametrize("command", [("projections",), ("rebuild", "orders")])
def test_a_database_that_cannot_be_used_is_one_sentence(
    server_process: ServerProcess,
    tmp_path: Path,
    database: str,
    said: str,
    command: tuple[str, ...],
) -> None:
    (tmp_path / "cli_shop.py").write_text(SHOP)
    name, *rest = command

    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "events", name, "cli_shop:first", *rest),
            *("--projections", database, "--url", server_process.url),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr.startswith("fencepost: the database of the projections cannot be used: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
