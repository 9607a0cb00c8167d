"""Projections: events as rows of the user's own database, each event applied exactly once.

`declared` is what an app declares, `stores` the database, `projecting` the way from the log into
it, and `working` the workers. docs/guides/projections.md shows them at work.
"""
