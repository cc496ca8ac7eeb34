"""The options of one iterator: torch's arguments and ours, frozen, and what follows from them.

    DataLoader (its attributes may be set at any time) ── iter ──> Options ──> everything below

`Options` are handed down whole, and a field is used under its name wherever that is.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from multiprocessing.context import BaseContext
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from asyncloader.checks import at_least, no_word, one_of
from asyncloader.errors import ConfigurationError
from asyncloader.machine import HAS_WORKER_PROCESSES, cores_of_rank
from asyncloader.protocols import (
    SuppliesKeys,
    WorkerProvider,
    is_async,
    is_stateful,
    makes_processes,
    probe,
    stacks_awaited,
)

Scheduling = Literal["static", "dynamic"]
Seeding = Literal["batch", "worker", "sample"]
OnError = Literal["raise", "skip", "replace"]
OnTimeout = Literal["raise", "retry", "skip"]
OnCrash = Literal["raise", "retry", "skip"]
WorkerBackend = Literal["process", "thread"]

MAX_BUFFERED_BYTES = 64 << 20

ASYNC_DEFAULT = 64
"""Samples that a worker awaits at once unless the loader says otherwise."""

_UNKNOWN_BATCH_SIZE = 8

FIRST_WORKERS = 2
"""With so many ``num_workers="auto"`` begins."""

_WAITING_PER_CORE = 4
"""Workers that mostly wait may be so many for each core, unless ``max_workers`` says otherwise."""

_STATM = Path("/proc/self/statm")
"""How much memory a process has: see `asyncloader.observe.private`."""

_WORDS = {
    "scheduling": Scheduling,
    "seeding": Seeding,
    "on_error": OnError,
    "on_timeout": OnTimeout,
    "on_crash": OnCrash,
}
_LEAST = {
    "concurrency": 1,
    "seeding_rank": 0,
    "max_buffered_bytes": 0,
    "max_retries": 0,
    "snapshot_every_n_steps": 0,
    "max_workers": 1,
    "max_worker_memory": 16 << 20,
}
"""Every worker takes more memory than that: less is meant in another unit than bytes."""

_KEPT_BY_WORKERS = (
    "num_workers",
    "collate_fn",
    "worker_init_fn",
    "multiprocessing_context",
    "concurrency",
    "seeding",
    "on_error",
    "on_timeout",
    "on_crash",
    "worker_backend",
    "snapshot_every_n_steps",
    "max_workers",
    "max_worker_memory",
)
"""Workers that are there keep what they were started with."""


OF_WORKERS = frozenset(
    {
        "persistent_workers",
        "prefetch_factor",
        "multiprocessing_context",
        "timeout",
        "max_worker_memory",
    }
)
"""Options about workers, which a loader that is made anew without any is not given: torch refuses some of them."""


class AutoWorkers(int):
    """A number of workers that looks after itself, as it is now: an int, for libraries that read `loader.num_workers`.

    Libraries that make a loader anew hand it on, and the number of the new loader looks after itself too.
    """


def first_workers(num_workers: Any, max_workers: int | None) -> Any:
    """Return with how many workers a loader begins.

    Raises:
        ConfigurationError: if the options do not go together.
    """
    is_auto = num_workers == "auto" or isinstance(num_workers, AutoWorkers)
    if max_workers is not None:
        at_least("max_workers", max_workers, least=1)
        if not is_auto:
            raise ConfigurationError('max_workers is for num_workers="auto"; otherwise there are num_workers')
    if not is_auto:
        return num_workers
    count = FIRST_WORKERS if num_workers == "auto" else int(num_workers)
    return AutoWorkers(count if max_workers is None else min(count, max_workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Torch's arguments, as its loader has checked them, and ours, which are checked here.

    Made by ``loader.py``: once at construction, to check, and once for each iterator; a run with workers that are there
    has a copy with what these were started with. The meaning of each is in the docstring of
    :class:`asyncloader.DataLoader`.

    Raises:
        ConfigurationError: for an option of ours that cannot work.

    Attributes:
        index_sampler: Yields the keys of each batch: the batch sampler, or without batching the sampler.
        auto_collation: A batch is made of several samples.
        multiprocessing_context: A context as torch has made it of a name, or None for the default one.
        worker_backend: Where workers run, or the object that brings some. "thread" also where what the context calls
            processes are threads.
        is_iterable: The dataset is iterable, and not read by key.
        is_async: The dataset is async.
        samples_at_once: Samples that one worker has in flight at most; 1 for a plain dataset without ``concurrency``.
        tickets_at_once: Tickets that one worker needs to have so many samples in flight; 0 where that is 1.
    """

    dataset: Any
    sampler: Any
    batch_sampler: Any
    index_sampler: Any
    batch_size: int | None
    auto_collation: bool
    num_workers: int
    collate_fn: Any
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool

    concurrency: int | None
    scheduling: Scheduling
    seeding: Seeding
    seeding_rank: int | None
    max_buffered_bytes: int
    on_error: OnError
    max_errors: int | float | None
    on_timeout: OnTimeout
    on_crash: OnCrash
    max_retries: int
    worker_backend: WorkerBackend | WorkerProvider
    trace: str | PathLike[str] | None
    snapshot_every_n_steps: int | None
    max_workers: int | None
    max_worker_memory: int | None

    is_iterable: bool = field(init=False)
    is_async: bool = field(init=False)
    samples_at_once: int = field(init=False)
    tickets_at_once: int = field(init=False)

    def __post_init__(self) -> None:
        self._check_options()
        awaits = is_async(self.dataset)
        samples = self.concurrency or (ASYNC_DEFAULT if awaits else 1)
        derive = object.__setattr__
        if self.provider is None and not makes_processes(self.multiprocessing_context):
            derive(self, "worker_backend", "thread")
        if self.worker_backend == "process" and self.has_workers and not HAS_WORKER_PROCESSES:
            derive(self, "worker_backend", "thread")
            warnings.warn(
                "the workers of this loader are threads: worker processes need Linux, whose kernel says when one ends",
                stacklevel=2,
            )
        derive(self, "is_iterable", isinstance(self.dataset, IterableDataset))
        derive(self, "is_async", awaits)
        derive(self, "samples_at_once", samples)
        # A worker begins with the next one when the first is finished, and another is on its way through the channel.
        tickets = math.ceil(samples / self.samples_in_batch) + 2 if awaits or samples > 1 else 0
        derive(self, "tickets_at_once", tickets)
        if self.is_auto and (why := self.why_workers_stay):
            raise ConfigurationError(
                f'num_workers="auto" cannot change the number of workers while they are at work: {why}'
            )
        self._check_renewal()
        if self.has_workers and self.is_in_process and isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            raise ConfigurationError(
                "data pipes cannot be divided among threads: torch finds the pipes of a graph by a hook that all "
                'threads of a process share. Use worker_backend="process"'
            )
        if stacks_awaited(self.dataset):
            raise ConfigurationError(
                "torch's StackDataset awaits none of the samples that it puts together: write a dataset whose `async "
                "def __getitem__` awaits those of its parts (asyncio.gather)"
            )
        if inspect.iscoroutinefunction(self.collate_fn):
            raise ConfigurationError(
                "collate_fn is called and not awaited, and this one is a coroutine function: what a batch has to wait "
                "for belongs into the dataset's `async def __getitems__`, with `collated = True` if it returns batches"
            )
        if self.provider is not None and self.multiprocessing_context is not None:
            raise ConfigurationError(
                f"multiprocessing_context is for processes of this machine, and {self.provider!r} has none"
            )
        if isinstance(self.dataset, SuppliesKeys):
            self.dataset.check_options(self)

    @property
    def overlaps(self) -> bool:
        """Whether samples are fetched on a loop, several at once."""
        return self.is_async or self.samples_at_once > 1

    @property
    def is_inline(self) -> bool:
        """Whether batches are made for who takes them, one at a time: no workers, and no samples that overlap."""
        return not (self.has_workers or self.overlaps)

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers looks after itself."""
        return isinstance(self.num_workers, AutoWorkers)

    @property
    def most_computing(self) -> int:
        """How many workers there may be if they compute, where the number looks after itself."""
        return self.max_workers or cores_of_rank()

    @property
    def most_waiting(self) -> int:
        """How many there may be if they mostly wait."""
        return self.max_workers or _WAITING_PER_CORE * cores_of_rank()

    @property
    def has_workers(self) -> bool:
        """Whether batches are made by workers."""
        return self.num_workers > 0

    @property
    def provider(self) -> WorkerProvider | None:
        """The object that brings workers of its own beside those of `num_workers`; None if there is none."""
        return None if isinstance(self.worker_backend, str) else self.worker_backend

    @property
    def num_at_start(self) -> int:
        """How many workers a run begins with. Without workers it is 1: the portal's loop makes the batches."""
        return max(1, self.num_workers)

    @property
    def prefetch(self) -> int:
        """Batches in flight or waiting for each place: torch's number, or what `concurrency` needs."""
        return max(self.prefetch_factor or (2 if self.has_workers else 1), self.tickets_at_once)

    @property
    def snapshot_every(self) -> int:
        """Batches from one state of the dataset to the next at least; 0 for none."""
        return self.snapshot_every_n_steps or 0

    @property
    def is_in_process(self) -> bool:
        """Whether batches are made in this process: on threads, on the portal's loop or by who takes them."""
        return not self.has_workers or self.worker_backend == "thread"

    @property
    def keeps_dataset(self) -> bool:
        """Whether the next run has the same copies of the dataset: those of persistent workers, or of this process."""
        return self.persistent_workers or not self.has_workers

    def check_num_workers(self, num_workers: int) -> None:
        """Raise a ConfigurationError if there cannot be so many workers, in the middle of a run or between two."""
        at_least("num_workers", num_workers, least=1)
        if not self.num_workers:
            raise ConfigurationError("this loader has no workers: make one with num_workers=1, or more")
        if why := self.why_workers_stay:
            hint = " (set loader.num_workers between runs)" * self.is_iterable
            raise ConfigurationError(f"the number of workers cannot change while they are at work: {why}{hint}")

    @property
    def why_workers_stay(self) -> str:
        """Why the number of workers cannot change while they are at work; "" if it can."""
        if self.is_iterable:
            return "an iterable dataset is divided among them when a run begins"
        if self.seeding == "worker":
            return 'with seeding="worker" samples depend on which of them makes a batch (seeding="batch" does without)'
        if self.snapshot_every and is_stateful(self.dataset):
            return "the dataset has a state of its own in each (snapshot_every_n_steps=0 does without it in states)"
        return ""

    @property
    def seeds_each_batch(self) -> bool:
        """Whether workers seed the global generators for each batch.

        Samples of several batches that are fetched at once share the generators: a seed would be nobody's. And what
        makes batches in this process would seed those of the trainer.
        """
        is_alone = not (self.is_in_process or self.overlaps)
        return self.seeding == "batch" and not self.is_iterable and is_alone

    @property
    def knows_places(self) -> bool:
        """Whether samples are known by their places in the epoch, which what they draw depends on."""
        return self.seeding == "sample" and not self.is_iterable

    @property
    def seeds_each_sample(self) -> bool:
        """Whether the global generators are seeded for each sample: where they are made one after the other.

        Where a worker process makes several at once, those that enter a `sample_seed` block are seeded there.
        """
        return self.knows_places and not (self._is_threaded or self.overlaps)

    @property
    def seeds_generators(self) -> bool:
        """Whether generators that the dataset holds are seeded, for batches, samples or blocks."""
        return self.seeds_each_batch or self.knows_places

    @property
    def seeds_overlapping(self) -> bool:
        """Whether coroutines have draws of their own, by step: in a worker process, whose generators are theirs."""
        return self.knows_places and self.is_async and not self.is_in_process

    @property
    def shares_generators(self) -> bool:
        """Whether samples that are made at the same time share the generators, with each other or with the trainer.

        Worker threads do, whatever they are asked for.
        """
        is_promised = self.seeding != "worker" and not self.is_iterable
        return self._is_threaded or (self.overlaps and is_promised and not self.seeds_overlapping)

    @property
    def _is_threaded(self) -> bool:
        """Whether workers are threads."""
        return self.num_workers > 0 and self.is_in_process

    @property
    def start_context(self) -> BaseContext:
        """The context that starts worker processes. To ask for it settles the program's default start method."""
        return self.multiprocessing_context or multiprocessing.get_context()

    def with_workers_of(self, first: Options) -> Options:
        """Return the same for workers that are there already, which keep what they were started with."""
        kept = {name: getattr(first, name) for name in _KEPT_BY_WORKERS}
        return replace(self, max_errors=None if first.on_error == "raise" else self.max_errors, **kept)

    def num_samples(self) -> int | None:
        """Return how many samples a run has, if that can be known."""
        is_named = self.batch_sampler is None or self.batch_size is not None  # the sampler is what names the samples
        source = self.sampler if is_named and not self.is_iterable else self.dataset
        try:
            return len(source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def samples_in_batch(self) -> int:
        """Return how many samples a batch has; a guess where a batch sampler of the user's does not say."""
        if self.batch_sampler is None:
            return 1
        size = self.batch_size or probe(self.batch_sampler, "batch_size")
        return size if isinstance(size, int) and size > 0 else _UNKNOWN_BATCH_SIZE

    def _check_options(self) -> None:
        no_word(self.num_workers)
        for name, words in _WORDS.items():
            one_of(name, getattr(self, name), words)
        if self.provider is None:
            one_of("worker_backend", self.worker_backend, WorkerBackend)
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None or name in ("max_buffered_bytes", "max_retries"):
                at_least(name, value, least=least)
        self._check_max_errors()
        if callable(check := probe(self.batch_sampler, "check_collation")):
            check(self.collate_fn)  # a batch sampler that plans batches may refuse one that makes others of them
        if self.on_timeout != "raise" and self.num_workers and not self.timeout:
            raise ConfigurationError(
                f"on_timeout={self.on_timeout!r} is for what takes longer than timeout, which is 0, so nothing ever "
                "does: set timeout, in seconds"
            )

    def _check_renewal(self) -> None:
        if self.max_worker_memory is None:
            return
        if self.is_in_process:
            where = "num_workers is 0" if not self.num_workers else "these are threads, which share their memory"
            raise ConfigurationError(f"max_worker_memory renews worker processes, and there are none: {where}")
        if why := self.why_workers_stay:
            hint = "; with persistent_workers=False each run has others" * (
                self.is_iterable and self.persistent_workers
            )
            raise ConfigurationError(f"max_worker_memory cannot renew workers while they are at work: {why}{hint}")
        if not _STATM.exists():
            raise ConfigurationError(
                "max_worker_memory cannot be kept here: this system does not tell how much memory a process has to "
                "itself (in /proc)"
            )

    def _check_max_errors(self) -> None:
        limit = self.max_errors
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
        is_share = isinstance(limit, float) and 0 <= limit <= 1
        if limit is not None and not (is_count or is_share):
            raise ConfigurationError(
                f"max_errors should be a count, a share between 0.0 and 1.0, or None, but got {limit!r}"
            )
        if limit is not None and self.on_error == "raise":
            raise ConfigurationError('max_errors is for on_error="skip" and "replace"; with "raise" it has no effect')


ASKED = tuple(each.name for each in fields(Options) if each.init)
"""What is asked for; the other fields follow from it."""
