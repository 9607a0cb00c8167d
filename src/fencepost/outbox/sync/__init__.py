# Generated from src/fencepost/outbox/aio/__init__.py by `just twins`: change that file.
"""The sync client of the daemon; `outbox/sync` is generated from it."""
