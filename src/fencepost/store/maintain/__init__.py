"""Background jobs of a store: expiry, retention, purge."""
