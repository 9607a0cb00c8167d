"""`fencepost events projections` and `rebuild`, as an operator runs them."""

import subprocess
import sys
from pathlib import Path

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
