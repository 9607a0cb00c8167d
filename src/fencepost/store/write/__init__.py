"""Deciding requests and committing them in groups, the same way on every store."""
