"""Spark jobs over everything a server holds: tables, audits, sweeps, lag."""
