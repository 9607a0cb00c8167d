"""The server: the HTTP front end, the handlers behind it, and what keeps them running."""
