"""Fencepost: durable streams where every write lands exactly once."""
