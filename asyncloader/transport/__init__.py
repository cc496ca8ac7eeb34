"""How batches cross from a worker to the trainer: slabs (shared memory), codec (pickle, out of band), collation."""
