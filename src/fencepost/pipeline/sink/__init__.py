"""The exactly-once Spark sink: staged uploads and one commit per batch."""
