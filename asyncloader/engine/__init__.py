"""The engine: the loop thread, what decides on it, and how batches are handed to the consumer."""
