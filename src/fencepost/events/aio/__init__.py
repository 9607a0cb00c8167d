"""The async classes of events, over the operations of `fencepost.events`."""
