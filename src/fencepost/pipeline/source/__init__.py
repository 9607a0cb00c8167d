"""The Spark source: a range of the log becomes rows."""
