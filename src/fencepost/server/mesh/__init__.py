"""`/v1/mesh`: meshes with topics, inboxes and queues, and the sends that write to them."""
