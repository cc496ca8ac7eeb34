"""Batches on their way to an accelerator: the few calls of torch that this takes, and what batches consist of."""
