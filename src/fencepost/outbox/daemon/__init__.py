"""The daemon: one process on a machine that accepts sends on disk, and delivers them to meshes."""
