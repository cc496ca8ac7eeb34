"""Benchmarks of others, written anew by their rules; tests/benchmarks/outsiders.py runs them."""
