"""What must hold in a store, whatever its database: the passes of `fencepost check`."""
