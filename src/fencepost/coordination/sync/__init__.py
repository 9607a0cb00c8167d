# Generated from src/fencepost/coordination/aio/__init__.py by `just twins`: change that file.
"""The sync classes of coordination, over the operations of `fencepost.coordination.rules`."""
