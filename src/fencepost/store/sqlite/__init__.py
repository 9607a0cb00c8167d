"""The embedded store: SQLite in WAL mode, one writer, one file of state."""
