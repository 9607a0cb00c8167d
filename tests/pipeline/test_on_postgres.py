"""The pipeline against servers that share a PostgreSQL, with principals: it works the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import fencepost
from fencepost.pipeline import tables
from fencepost.pipeline.audit import audit
from tests.integration.auth_support import principal, token
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = 2_000
GRANTS = ("**", ["read", "append", "create"])


def test_a_query_reads_from_one_node_and_writes_to_another_and_goes_on_when_one_dies(
    spark: SparkSession, postgres_dsn: str, tmp_path: Path
) -> None:
    environment = {"FENCEPOST_PRINCIPALS": json.dumps([principal("job", GRANTS)])}
    arguments = ["--long-poll-ms", "500"]
    source = ServerProcess(store=postgres_dsn, arguments=arguments, environment=environment)
    sink = ServerProcess(store=postgres_dsn, arguments=arguments, environment=environment)
    reading = {"url": "", "token": token("job")}

    def copy_all() -> None:
        rows = (
            spark.readStream.format("fencepost")
            .options(**reading, stream="orders", startingPosition="earliest")
            .options(maxRowsPerTrigger=str(ORDERS // 4))
            .load()
        )
        written = rows.select("value").writeStream.format("fencepost")
        written = written.options(url=sink.url, token=token("job"), stream="copies")
        written = written.options(autoCreate="true", checkpointLocation=str(tmp_path / "here"))
        written.trigger(availableNow=True).start().awaitTermination()

    with source, sink:
        reading["url"] = source.url
        _produce(source.url, range(ORDERS))
        copy_all()
        source.kill()
        # The other node has all of it, and the query may as well read there.
        reading["url"] = sink.url
        _produce(sink.url, range(ORDERS, 2 * ORDERS))
        copy_all()
        copies = spark.read.format("fencepost").options(**reading, stream="copies").load()
        ids = sorted(json.loads(row.value)["id"] for row in copies.collect())
        table = tmp_path / "table"
        tables.backfill(spark, table, stream="copies", kind="rows", options=reading)
        report = audit(spark, match="*", options=reading)

        assert ids == list(range(2 * ORDERS))
        assert tables.read(spark, table).count() == 2 * ORDERS
        assert report.is_clean, report.samples


def _produce(url: str, ids: range) -> None:
    with fencepost.connect(url, token=token("job")) as client:
        orders = client.create("orders")
        with orders.producer("till") as producer:
            for number in ids:
                producer.append({"id": number})
