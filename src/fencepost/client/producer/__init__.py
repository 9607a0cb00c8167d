"""The idempotent producer: a state machine without I/O, and what drives it.

`machine.py` holds every rule. `sync.py` and `aio.py` feed it with events and carry out what it asks
for; both are written by hand, because a sync producer without a thread is not an async producer
without `await`.
"""
