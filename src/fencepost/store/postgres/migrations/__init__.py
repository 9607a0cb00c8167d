"""The schema on PostgreSQL, step by step: numbered `pre` (safe for old code) or `post`."""
