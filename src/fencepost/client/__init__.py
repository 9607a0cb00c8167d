"""The client: exactly-once from Python, sync and async, from one core that does no I/O.

Operations are generators (`operations.py`, `reading.py`) that yield what they need done and return
typed results. `aio` runs them on asyncio; `sync` is generated from `aio` and runs the same
generators over blocking sockets. The idempotent producer is a state machine
(`producer/machine.py`) that a sync and an async driver feed with events.
"""
