"""Subscriptions on the server's side: the engine that wakes, the webhooks, the HTTP surface.

The rules are in `protocol/subscriptions.py`, the rows in the store. What waits is here: timers,
deliveries and requests, all of them only carrying what a rule has decided and a commit has stored.
"""
