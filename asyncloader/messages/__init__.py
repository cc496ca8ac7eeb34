"""The messages between a worker and its parent."""
