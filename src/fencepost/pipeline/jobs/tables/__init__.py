"""Tables of streams, kept as Delta or Parquet by Spark."""
