"""The store on PostgreSQL: any number of servers on one database, in turns."""
