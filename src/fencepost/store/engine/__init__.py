"""What every store does the same way: deciding, reading and keeping, over any SQL database."""
