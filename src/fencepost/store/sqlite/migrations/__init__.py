"""The schema of the embedded store, step by step: numbered `pre` (safe for old code) or `post`."""
