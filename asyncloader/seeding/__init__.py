"""Random numbers: whose they are, and what the global generators are seeded with."""
