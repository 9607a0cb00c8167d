"""`/v1/groups`: workers that share the events of many streams, one lease per target."""
