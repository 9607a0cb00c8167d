"""Large commits on PostgreSQL: a transaction beside the turns."""
