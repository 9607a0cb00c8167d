# Generated from src/fencepost/events/aio/__init__.py by `just twins`: change that file.
"""The sync classes of events, over the operations of `fencepost.events`."""
