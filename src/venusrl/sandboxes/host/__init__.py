"""One machine of sandboxes: what is alive here, on disk and in memory, and its door for the manager."""
