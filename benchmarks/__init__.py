"""Benchmarks: real server processes on loopback, one load generator, ratios in the same run.

Nothing here is imported by `fencepost` or asserts a speed. `python -m benchmarks` (or `just
bench`) prints a table and can write JSON; docs/benchmarks.md says how the numbers are made and
what they do and do not show.
"""
