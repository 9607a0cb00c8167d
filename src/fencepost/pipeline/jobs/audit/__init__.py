"""The audit of the log and of the lists of a server, as Spark jobs."""
