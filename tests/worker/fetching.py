"""Fetch the samples of one batch after the other, without a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncloader.messages.messages import WorkerSpec
from asyncloader.seeding.sample_context import here
from asyncloader.worker.fetch import make_fetcher

_SPEC = WorkerSpec(None, False, True, None, False, None, 1, 0, False)


def fetching(dataset: Any, **options: Any) -> Callable[[Any], Any]:
    """Return what fetches samples by their keys: a list of them, or the one sample."""
    spec = replace(_SPEC, **options)
    fetch = make_fetcher(dataset, spec)

    def samples(keys: Any) -> Any:
        found = fetch(keys, here())
        return found if spec.auto_collation else found[0]

    return samples
