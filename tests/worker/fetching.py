"""Fetch the samples of one batch after the other, without a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncloader.messages.messages import WorkerSpec
from asyncloader.worker.fetch import make_fetcher
from asyncloader.worker.job import Job

_SPEC = WorkerSpec(None, False, True, None, False, None, 1, 0, False)


def fetching(dataset: Any, **options: Any) -> Callable[[Any], Any]:
    """Return what fetches samples by their keys: a list of them, or the one sample."""
    spec = replace(_SPEC, **options)
    fetch = make_fetcher(dataset, spec)

    def samples(keys: Any) -> Any:
        job = Job(0, keys)
        fetch(job)
        return job.samples if spec.auto_collation else job.samples[0]

    return samples
