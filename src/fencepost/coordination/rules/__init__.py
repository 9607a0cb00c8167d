"""The rules of coordination: operations without I/O that sync and async classes share."""
