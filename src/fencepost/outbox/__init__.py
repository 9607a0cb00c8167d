"""The outbox: sends that are accepted on this machine and delivered when the server can be reached.

`states` holds the rules, pure, for the daemon and for rows in a caller's own database.
"""
