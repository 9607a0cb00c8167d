"""The Spark session, its Java, its metrics and its error texts."""
