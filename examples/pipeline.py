"""An exactly-once pipeline on Spark, cell by cell: `# %%` begins a cell in VS Code and Jupyter.

Start a server first (`fencepost serve`), then run the cells, or the whole file:
`FENCEPOST_URL=http://127.0.0.1:4437 python examples/pipeline.py`. What each does is explained in
docs/guides/pipeline.md. It may be killed at any moment and run again: every order arrives once.
"""

# %% Some orders, each stored once
import os
from pathlib import Path

import fencepost
from fencepost.pipeline import session, tables
from fencepost.pipeline.audit import audit

URL = os.environ.get("FENCEPOST_URL", "http://127.0.0.1:4437")
ORDER = "id BIGINT, country STRING, currency STRING, amount DOUBLE"

with fencepost.connect(URL) as client:
    made = []
    for number in range(1_000):
        country, currency = ("DE", "EUR") if number % 3 else ("GB", "GBP")
        made.append({"id": number, "country": country, "currency": currency, "amount": number / 10})
    client.create("shop/orders").append_many(made, key="the-first-thousand")

# %% Look at them with Spark
spark = session()
read = (
    spark.read.format("fencepost")
    .options(url=URL, stream="shop/orders", format="json", schema=ORDER)
    .load()
)
read.select("position", "value.*").orderBy("position").show(3)

# %% A query that may be killed: source, transformation, exactly-once sink
folder = Path("shop-pipeline").absolute()  # kept: the checkpoint in it says where the query is
rates = spark.createDataFrame([("EUR", 1.0), ("GBP", 1.15)], "currency STRING, rate DOUBLE")
priced = (
    spark.readStream.format("fencepost")
    .options(url=URL, stream="shop/orders", startingPosition="earliest")
    .options(maxRowsPerTrigger="250", format="json", schema=ORDER)
    .load()
    .select("value.*")
    .join(rates, "currency")
    .selectExpr(
        "concat('shop/priced/', lower(country)) as stream",
        "id",
        "round(amount * rate, 2) as eur",
    )
)
query = (
    priced.writeStream.format("fencepost")
    .options(url=URL, sinkName="priced", autoCreate="true")
    .option("checkpointLocation", str(folder / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

# %% A Delta table of the result
tables.backfill(
    spark,
    folder / "table",
    match="shop/priced/*",
    kind="rows",
    format="delta",
    schema="id BIGINT, eur DOUBLE",
    options={"url": URL},
)
table = tables.read(spark, folder / "table")
table.groupBy("stream").sum("eur").show()

# %% Prove it
report = audit(spark, match="shop/**", options={"url": URL})
assert report.is_clean, report.samples
assert table.count() == table.select("id").distinct().count() == 1_000
