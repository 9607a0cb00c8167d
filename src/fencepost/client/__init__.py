"""The client: exactly-once from Python, sync and async, from one core that does no I/O.

Operations are generators (`operations.py`, `reading.py`) that yield what they need done and return
typed results; `sync.py` and `aio.py` run the same generators over sockets and over asyncio.
The idempotent producer is a state machine (`producing.py`) that both sides feed with events.
"""
