"""The `fencepost` command: settings, commands, and what people see of them."""
