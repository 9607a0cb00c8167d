"""The connection to PostgreSQL: its statements, its settings and errors, and its use in turns."""
