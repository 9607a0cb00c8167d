"""The async classes of coordination, over the operations of `fencepost.coordination.rules`."""
