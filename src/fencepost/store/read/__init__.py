"""Reading streams, the log and lists, the same way on every store."""
