"""The consumer's thread: iterators, what they read of the sampler, states."""
