"""The connection to PostgreSQL: statements, binary arrays, timeouts."""
