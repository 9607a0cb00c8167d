"""The Spark half of `fencepost demo`, in a process of its own so that the demo can kill it.

The job reads orders from one stream, prices them in euros by joining a table of rates, and writes
them to one stream for each country. Its second run continues from the checkpoint of the first, then
keeps a Delta table of the result and audits everything. It writes what it found to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepost.pipeline import session
from fencepost.pipeline.sessions import fits_sockets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS = "demo/orders"
PRICED = "demo/priced"
SINK = "demo-priced"
ORDER = "id bigint, country string, currency string, amount double"
PRICED_ORDER = "id bigint, country string, eur double"
RATES = {"EUR": 1.0, "GBP": 1.15, "SEK": 0.09, "PLN": 0.23}


def price(spark: SparkSession, url: str, checkpoint: Path, *, rows_per_batch: int) -> None:
    """Run the query until it has priced every order that is there."""
    orders = (
        spark.readStream.format("fencepost")
        .option("url", url)
        .option("stream", ORDERS)
        .option("startingPosition", "earliest")
        .option("maxRowsPerTrigger", rows_per_batch)
        .option("format", "json")
        .option("schema", ORDER)
        .load()
        .select("value.*")
    )
    rates = spark.createDataFrame(list(RATES.items()), "currency string, rate double")
    query = (
        orders.join(rates, "currency")
        .selectExpr(
            f"concat('{PRICED}/', lower(country)) as stream",
            "id",
            "country",
            "round(amount * rate, 2) as eur",
        )
        .writeStream.format("fencepost")
        .option("url", url)
        .option("sinkName", SINK)
        .option("autoCreate", "true")
        .option("checkpointLocation", str(checkpoint))
        .queryName("price orders")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def examine(spark: SparkSession, url: str, table: Path, plot_to: Path | None) -> dict[str, Any]:
    """Keep a Delta table of the priced orders, then hold everything against everything."""
    from fencepost.pipeline import tables
    from fencepost.pipeline.audit import audit
    from fencepost.pipeline.audit.reports import plot

    reading = {"url": url}
    tables.backfill(
        spark,
        table,
        match=f"{PRICED}/*",
        kind="rows",
        format="delta",
        schema=PRICED_ORDER,
        options=reading,
    )
    report = audit(spark, options=reading)
    if plot_to is not None:
        plot(report, plot_to)
    priced = _messages(spark, url, f"{PRICED}/*", PRICED_ORDER)
    kept = tables.read(spark, table)
    return {
        "orders": _weigh(_messages(spark, url, ORDERS, ORDER)),
        "priced": _weigh(priced),
        "table": _weigh(kept),
        "audited": {
            "messages": report.messages,
            "streams": report.streams,
            "producers": report.producers,
            "defects": report.defects,
        },
    }


def _messages(spark: SparkSession, url: str, match: str, schema: str) -> DataFrame:
    return (
        spark.read.format("fencepost")
        .options(url=url, match=match, format="json", schema=schema, mode="failfast")
        .load()
        .select("value.*")
    )


def _weigh(rows: DataFrame) -> dict[str, int]:
    """How many orders there are, how many different ones, and the sum of their numbers."""
    [row] = rows.selectExpr(
        "count(*) as orders", "count(distinct id) as different", "coalesce(sum(id), 0) as total"
    ).collect()
    return {"orders": row.orders, "different": row.different, "total": row.total}


def main() -> None:
    """Price what is there; with --report also examine it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows-per-batch", type=int, required=True)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    scratch = tempfile.gettempdir()
    spark = session(
        "fencepost demo",
        conf={
            "spark.ui.enabled": False,
            "spark.local.dir": scratch,
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={scratch}",
            "spark.python.unix.domain.socket.enabled": fits_sockets(scratch),
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    price(spark, given.url, given.folder / "checkpoint", rows_per_batch=given.rows_per_batch)
    if given.report is not None:
        found = examine(spark, given.url, given.folder / "table", given.plot)
        given.report.write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
