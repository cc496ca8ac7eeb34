"""Fetch the samples of one batch after the other, or at the same time, without a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncloader.messages.messages import WorkerSpec
from asyncloader.seeding.sample_context import here
from asyncloader.seeding.seeder import Seeder
from asyncloader.worker.batch_maker import BatchMaker, Host
from asyncloader.worker.fetch import IterableFetcher, MapFetcher

_SPEC = WorkerSpec(None, False, True, None, False, None, 1, 0, False)


def fetching(dataset: Any, **options: Any) -> Callable[[Any], Any]:
    """Return what fetches samples by their keys: a list of them, or the one sample."""
    spec = replace(_SPEC, **options)
    fetch = IterableFetcher(dataset, spec) if spec.is_iterable else MapFetcher(dataset, spec)

    def samples(keys: Any) -> Any:
        found = fetch(keys, here())
        return found if spec.auto_collation else found[0]

    return samples


def maker_of(spec: WorkerSpec, ends: Callable[[BaseException], bool]) -> BatchMaker:
    """Return what knows how samples are fetched that overlap, and which exceptions end the worker."""

    class Place(Host):
        def ends(self, error: BaseException) -> bool:
            return ends(error)

    maker = BatchMaker(0, spec, Place())
    maker.seeder = Seeder((0, 0, 0))
    return maker
