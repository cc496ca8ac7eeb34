"""The DataLoader: torch's arguments and ours, and the two ways to iterate."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from os import PathLike
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch.utils.data
from torch.utils.data import Dataset, Sampler

from asyncloader.checks import no_word
from asyncloader.engine import exits  # here, for its hook has to be there before the main thread returns
from asyncloader.epochs import as_number
from asyncloader.errors import ConfigurationError
from asyncloader.frameworks import AskedByAccelerate, name_options, warn_of_lost_state
from asyncloader.observe.meter import Meter
from asyncloader.observe.stats import LoaderStats
from asyncloader.options import (
    ASKED,
    MAX_BUFFERED_BYTES,
    AutoWorkers,
    OnCrash,
    OnError,
    OnTimeout,
    Options,
    Scheduling,
    Seeding,
    WorkerBackend,
    first_workers,
)
from asyncloader.protocols import (
    AsyncBatchDataset,
    AsyncDataset,
    AsyncIterableDataset,
    SuppliesKeys,
    WorkerProvider,
    accept_iterable,
)
from asyncloader.run.fits import check
from asyncloader.run.merged_workers import for_workers_of
from asyncloader.run.plan import load_early
from asyncloader.run.runs import Runs
from asyncloader.run.state import read_state

if TYPE_CHECKING:
    from asyncloader.run.base_iterator import BaseIterator
    from asyncloader.run.inline_iterator import InlineIterator
    from asyncloader.run.worker_iterator import WorkerIterator

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """Combine a dataset and a sampler, and iterate over batches, with ``for`` or with ``async for``.

    A drop-in for :class:`torch.utils.data.DataLoader`: its arguments, attributes, checks and errors are torch's. Below
    are the options beyond them; each has a default and is kept under its own name.

    Args:
        dataset: As in torch, and so on up to ``in_order``.
        batch_size: Samples in a batch, or None for no automatic batching.
        shuffle: Draw the samples in random order.
        sampler: Yields keys of the dataset.
        batch_sampler: Yields lists of keys.
        num_workers: Worker processes; 0 makes the batches in this process. "auto" begins with 2, and has more while
            training waits and they help, and fewer while they are idle; as an attribute it is how many there are now.
        collate_fn: Makes a batch of a list of samples.
        pin_memory: Copy batches into page-locked memory, on a side thread; types with a ``pin_memory`` method too.
        drop_last: Leave out an incomplete last batch.
        timeout: How long a consumer waits for a batch, in seconds; 0 for no limit. Without workers only for keys that
            arrive, those of a feed for example.
        worker_init_fn: Called in each worker with its id.
        multiprocessing_context: "fork", "forkserver", "spawn", or a context.
        generator: Draws the order and the base seed.
        prefetch_factor: Batches that each worker has in advance; 2 by default.
        persistent_workers: Keep the workers, their datasets and their memory for the next run.
        pin_memory_device: As in torch: deprecated and ignored.
        in_order: Deliver batches in the order of the sampler; otherwise as they come.
        concurrency: Samples that one worker fetches at once.
        scheduling: "static" gives batch i to worker i % num_workers, as torch; "dynamic" to the worker with the least
            to do.
        seeding: "batch" seeds random, numpy and torch for each batch from (base seed, rank of the data, number
            of the batch), so that the number of workers, their timing and a crash change nothing; "sample" for each
            sample by its place in the epoch, so that the batch size changes nothing either; "worker" keeps torch's
            streams. Overlapping samples of an async dataset have draws of their own under both others.
        seeding_rank: The rank of the data in these seeds and in `sample_rng`: which part of the data this process
            reads. By default that of the sampler, or of the stream, which divides the data, and 0 where nothing does.
            Ranks that share the work on the same samples have the same; with a `DeviceMesh` it is
            ``mesh["dp"].get_local_rank()``. For data that are divided before the loader gets them.
        max_buffered_bytes: While the next batch in order is slow and workers would stand idle, they work ahead of
            torch's window, as long as what waits is below so many bytes. 0 keeps torch's window exactly.
        on_error: For a sample that raises: "raise" raises the error in the place of the batch; "skip" leaves the
            sample out of its batch, and the batch out if no sample is good; "replace" puts a good sample of the same
            batch in its place, and raises if there is none. Ranks of a process group want "replace": skipping makes
            their counts of batches uneven, which hangs them.
        max_errors: How many samples may raise in an epoch before skipping and replacing give up and raise: a count, or
            a share (a float between 0 and 1) of the samples; None for no bound.
        on_timeout: For a batch that does not come within ``timeout``: "raise" raises BatchTimeoutError and
            kills nothing, the next call waits for the same batch; "retry" kills and replaces the worker and runs the
            batch again; "skip" leaves the batch out. A worker that is still opening the dataset is given 60 s; one of
            an iterable dataset is killed only if another one can go on where it was.
        on_crash: For a batch whose worker died: "retry" replaces the worker and runs the batch again, with
            the same seeds; "raise" raises WorkerDiedError; "skip" leaves the batch out.
        max_retries: How often a batch is run again; then WorkerDiedError or BatchTimeoutError is raised, and the next
            batch follows.
        worker_backend: "process" or "thread". Workers are threads too with a context that starts threads instead of
            processes, as MONAI's does. :class:`asyncloader.ray.RayWorkers` brings workers on other machines, as many as
            it says: ``num_workers`` is theirs then, and left out here.
        trace: File to write a timeline of all runs to, for Perfetto or ``asyncloader trace FILE``.
        snapshot_every_n_steps: How often the state of a dataset is taken, where it provides one: after so many batches,
            or less often where that would cost more than a fiftieth of the time. A resume makes the batches since then
            again and drops them. 0 or None for never: then a stream is read again from its beginning, and the state of
            a map-style dataset is not kept.
        max_workers: How many ``num_workers="auto"`` may come to. By default as many as there are cores
            for this process (shared with the other ranks on the machine, where torchrun, Slurm or MPI say how many
            there are); four times that while workers mostly wait.
        max_worker_memory: Renew each worker that holds more than so many bytes of its own, for libraries that leak;
            memory that it shares with the trainer or with other workers does not count. It finishes the batches that it
            has in hand, and another process is started in its place, while the other workers go on. Nothing is lost,
            and nothing else changes. For worker processes of map-style datasets.

    Raises:
        ConfigurationError: for an option of ours that cannot work; for torch's arguments the errors are torch's.
    """

    _is_accelerate_prepared = AskedByAccelerate()
    num_workers: int | AutoWorkers

    def __init__(
        self,
        dataset: Dataset[T_co] | AsyncDataset[T_co] | AsyncBatchDataset[T_co] | AsyncIterableDataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        concurrency: int | None = None,
        scheduling: Scheduling = "static",
        seeding: Seeding = "batch",
        seeding_rank: int | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        on_error: OnError = "raise",
        max_errors: int | float | None = None,
        on_timeout: OnTimeout = "raise",
        on_crash: OnCrash = "retry",
        max_retries: int = 2,
        worker_backend: WorkerBackend | WorkerProvider = "process",
        trace: str | PathLike[str] | None = None,
        snapshot_every_n_steps: int | None = 1,
        max_workers: int | None = None,
        max_worker_memory: int | None = None,
    ) -> None:
        self.worker_backend = worker_backend
        num_workers = _brought(worker_backend, num_workers)
        super().__init__(
            cast(Dataset[T_co], dataset), batch_size, shuffle,
            *_accept(dataset, sampler, batch_sampler, shuffle, batch_size, drop_last),
            first_workers(num_workers, max_workers), collate_fn, pin_memory, drop_last, timeout, worker_init_fn,
            multiprocessing_context, generator, in_order=in_order, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, prefetch_factor=prefetch_factor)  # fmt: skip
        self.concurrency: int | None = concurrency
        self.max_buffered_bytes: int = max_buffered_bytes
        self.max_errors: float | None = max_errors
        self.snapshot_every_n_steps: int | None = snapshot_every_n_steps
        self.on_error, self.on_timeout, self.on_crash = on_error, on_timeout, on_crash
        self.scheduling, self.seeding = scheduling, seeding
        self.max_retries: int = max_retries
        self.seeding_rank: int | None = seeding_rank
        self.max_workers = max_workers
        self.max_worker_memory: int | None = max_worker_memory
        self.trace: str | PathLike[str] | None = trace
        self._loader_options()  # which are checked
        self._runs = Runs()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the signature of a subclass's ``__init__`` with ``**kwargs`` name our options.

        Lightning makes loaders anew from their attributes. Where it finds ``**kwargs`` it hands on the arguments that
        torch's ``__init__`` has, and nothing else that the signature does not name.
        """
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            name_options(cls.__dict__["__init__"], OPTIONS)

    def _loader_options(self, last: Options | None = None) -> Options:
        """Check and freeze what this loader is to do, as it is now; ``last`` if nothing was set since that was made.

        What does it is imported by then: a run begins at once, while workers that are spawned, which only import this
        module, go without.
        """
        _import_iterators()
        options = {name: getattr(self, _PRIVATE.get(name, name)) for name in ASKED}
        if last is not None and all(getattr(last, name) is option for name, option in options.items()):
            return last
        return Options(**options)

    def _changed_options(self) -> str:
        """Write down our options that are not at their defaults."""
        chosen = ((name, getattr(self, name), each.default) for name, each in OPTIONS.items())
        return ", ".join(f"{name}={now!r}" for name, now, default in chosen if now != default)

    def __iter__(self) -> BaseIterator[T_co]:
        """Begin a run over the data: workers start, and the first batches are being made when this returns."""
        no_word(self.num_workers)
        iterator: Any = self._begin_with_kept_workers()
        if iterator is None:
            iterator = super().__iter__()
            if self.persistent_workers:  # torch keeps it where it sees workers
                self._iterator = iterator
        return cast("BaseIterator[T_co]", iterator)

    def __aiter__(self) -> BaseIterator[T_co]:
        """Begin a run over the data without blocking the loop: what goes wrong is raised by the first ``anext``."""
        if (iterator := self._begin_with_kept_workers()) is None:
            iterator = self._make_iterator(wait_for_start=False)
            if self.persistent_workers:
                self._iterator = iterator
        iterator.face = "async for"
        return cast("BaseIterator[T_co]", iterator)

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, of more workers than cores; unless the number looks after itself, or is of others."""
        if isinstance(self.worker_backend, str) and not isinstance(self.num_workers, AutoWorkers):
            super().check_worker_number_rationality()

    def _begin_with_kept_workers(self) -> WorkerIterator[T_co] | None:
        """Begin a run with persistent workers; None if there are none, or closed ones, or those of another process."""
        is_held = _count_holders(self) > _OWN_HOLDERS
        iterator: Any = self._iterator
        if not isinstance(iterator, _import_iterators()[1]):  # a subclass may use torch's
            return None
        exits.note_user()  # from now on nothing is ended, or has been already
        if not iterator.is_usable:
            self._iterator = None
            return None
        if not (options := self._loader_options(iterator.asked)).has_workers:
            return None
        if is_held:
            self._runs.warn_of_restart()
        iterator.begin_next(self, options)
        return cast("WorkerIterator[T_co]", iterator)

    def _get_iterator(self) -> Any:
        warn_of_lost_state()
        return self._make_iterator(wait_for_start=True)

    def _make_iterator(self, *, wait_for_start: bool) -> Any:
        iterator: Any
        if isinstance(self.dataset, SuppliesKeys):  # a feed ends with all who are noted, and is about to begin
            exits.note_user()
        inline_iterator, worker_iterator = _import_iterators()
        options, runs = self._loader_options(), self._runs
        if (state := runs.loaded) is not None:
            check(state, options)
        if options.is_inline:
            iterator = inline_iterator(self, options, runs, state)
        else:
            self.check_worker_number_rationality()
            iterator = worker_iterator(self, options, runs, wait_for_start=wait_for_start, state=state)
        if wait_for_start and state is not None and state.left_out:
            iterator.leave_out()
        runs.loaded = None  # not before: what was left out may have raised
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: to samplers, batch samplers and the dataset that have a method of this name.

        Each worker's copy of the dataset is told too, before the first sample of the next run, also in persistent
        workers, which would go on with the epoch that they know. So is a copy after ``dataset.set_epoch(...)``, where
        the dataset shows what it was told as its attribute ``epoch``. Inside torch's wrappers (Subset, ConcatDataset,
        ChainDataset, StackDataset) datasets are found. An epoch that is set after `load_state_dict`, and is not that of
        the state, begins at its beginning.

        Args:
            epoch: Counted from 0.

        Raises:
            ConfigurationError: if it is no integer.
        """
        if isinstance(epoch, bool) or (number := as_number(epoch)) is None:
            raise ConfigurationError(f"set_epoch takes the number of an epoch, an integer, but got {epoch!r}")
        self._runs.set_epochs.set(self._index_sampler, self.dataset, number)

    def batch_keys(self, epoch: int, number: int) -> Any:
        """Return which samples a batch has: the keys that the sampler gives for it.

        Drawn from copies of the samplers and generators: nothing moves, and no data are read. What comes before the
        batch is drawn again: about a second for ten million samples.
        Where a sampler draws from global generators, these are put back: call this in the thread that trains.

        Args:
            epoch: The run: how many of this loader there were before it, as in `stats`. One of the last 8 that this
                loader has begun; or, when a state has been loaded, the one that it goes on with.
            number: The batch in that run, counted from 0.

        Returns:
            A list of keys, or with ``batch_size=None`` one key.

        Raises:
            IndexError: if there is no such batch, or nothing is known of that run here.
            ConfigurationError: if batches are no function of their number: of a stream, of a dataset with a state of
                its own, or with ``seeding="worker"``; if the samplers cannot be copied, or if nobody can be sure of
                their order: that of samplers of yours, and that of samplers with rows (indices, weights, keys) of which
                no state is loaded that says what they were.
            StateMismatchError: if the samplers are not those of the loaded state any more.
        """
        from asyncloader.run import replay  # with the engine, and later

        return replay.keys_of(self, epoch, number)

    def batch(self, epoch: int, number: int) -> Any:
        """Make a batch of a run again, bit for bit, without those before it, also while a run goes on.

        If the loader has workers, one is started for it and makes it. Otherwise the calling thread does; then, as with
        workers that are threads and with `concurrency`, what samples draw from global generators is the same only with
        ``seeding="sample"``.

        Args:
            epoch: As for `batch_keys`.
            number: As for `batch_keys`.

        Raises:
            IndexError: as `batch_keys` does; or if ``on_error="skip"`` leaves the batch out.
            ConfigurationError: as `batch_keys` does; or if batches are made in this process, where the dataset has been
                told another epoch (`set_epoch`) than that of the run.
            Exception: whatever its samples, or their collation, raise.
        """
        from asyncloader.run import replay

        return replay.batch_of(self, epoch, number)

    def set_num_workers(self, num_workers: int) -> None:
        """Have so many workers from now on: in the middle of a run, or between two, with persistent workers or without.

        Order and content of the batches do not change by it. A new worker takes part when it has opened its copy
        of the dataset; a worker that leaves finishes the batches that it has. For map-style datasets without a state of
        their own, and ``seeding="batch"`` or "sample". Call it in the thread that iterates. Does not wait, and ends
        ``num_workers="auto"``.

        Args:
            num_workers: At least 1.

        Raises:
            ConfigurationError: if the number cannot change; it says why.
        """
        self._loader_options().check_num_workers(num_workers)
        self.num_workers, self.max_workers = num_workers, None
        if (iterator := self._begun()) is not None:
            iterator.set_num_workers(num_workers)

    def _note_num_workers(self, num_workers: int) -> None:
        """Say how many workers there are now, where their number looks after itself, unless it was set meanwhile."""
        if isinstance(self.num_workers, AutoWorkers):
            self.num_workers = AutoWorkers(num_workers)

    def stats(self, *, story: bool = False) -> LoaderStats:
        """Return where the time of the current run over the data went, or has gone so far: see `LoaderStats`.

        Takes 20 us, may be called at any time and from any thread, also after the iterator is gone.

        Args:
            story: With the last events of the engine, for a report of a run that does not go on.
        """
        return (self._runs.meter or Meter(0, self.num_workers, 0)).stats(story=story)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator that is alive is: as of the batches that it has yielded.

        Cheap enough to be called after every batch, and without effects. After the end of a run, as before the first,
        it is a state from which the next run begins; after a ``break`` one from which that run goes on. A look at a
        batch beside a loop, ``next(iter(loader))``, changes nothing.

        Returns:
            Plain data, which goes through JSON if the states of your own objects do. A state never changes later.
        """
        return self._runs.state(self._loader_options).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter`` or ``aiter`` go on from a state, of this loader or one that was made alike.

        Iterators that were begun before are closed.

        Args:
            state: A state from `state_dict`, or from that of torchdata's StatefulDataLoader (0.8 to 0.11). An empty one
                resets the loader.

        Raises:
            StateMismatchError: if it was taken of something else; it says what differs.
        """
        options = self._loader_options()
        loaded = read_state(state, options) if state else None
        if loaded is not None:
            loaded = for_workers_of(options, loaded)
            check(loaded, options)
            load_early(options, loaded)
        self._runs.load(loaded, options)
        self._iterator = None

    def close(self) -> None:
        """Close the newest iterator that is alive and wait until its workers are gone, 3 s at most.

        The timeline is written.
        """
        if (iterator := self._begun()) is not None:
            iterator.close()
        if (meter := self._runs.meter) is not None:
            meter.write_trace()

    def _begun(self) -> Any:
        """Return the newest iterator, or the one with the persistent workers, if that around it is gone already."""
        if (iterator := self._runs.iterator) is not None:
            return iterator
        kept: Any = self._iterator  # of torch's class, if a subclass makes that
        return kept if kept is not None and isinstance(kept, _import_iterators()[1]) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": copy.copy(self._runs)}


def _count_holders(loader: Any) -> int:
    """Return how often the kept iterator is referred to, by this call and the loader as well."""
    return sys.getrefcount(loader._iterator)


_OWN_HOLDERS = _count_holders(SimpleNamespace(_iterator=object()))
"""What that is if nobody else refers to it: the loop over it was left."""


def _import_iterators() -> tuple[type[InlineIterator[Any]], type[WorkerIterator[Any]]]:
    """Import the engine."""
    from asyncloader.run.inline_iterator import InlineIterator
    from asyncloader.run.worker_iterator import WorkerIterator

    return InlineIterator, WorkerIterator


def _accept(
    dataset: Any, sampler: Any, batch_sampler: Any, shuffle: bool | None, batch_size: int | None, drop_last: bool
) -> tuple[Any, Any]:
    """Have torch take an async iterable for one; return sampler and batch sampler, perhaps one the dataset brings."""
    accept_iterable(dataset)
    if sampler is not None or batch_sampler is not None or not isinstance(dataset, SuppliesKeys):
        return sampler, batch_sampler
    if shuffle:
        raise ConfigurationError(f"{type(dataset).__name__} brings its own order: shuffle=True has no meaning")
    if (brought := dataset.make_batch_sampler()) is not None:
        if batch_size != 1 or drop_last:
            name = type(dataset).__name__
            raise ConfigurationError(
                f"{name} brings its batches: give batch_size to {name}(...), and none to the loader"
            )
        return None, brought
    return dataset.make_sampler(), None


_PRIVATE = {"index_sampler": "_index_sampler", "auto_collation": "_auto_collation"}
"""What torch keeps under another name."""

OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in inspect.signature(torch.utils.data.DataLoader.__init__).parameters
}
"""What :class:`DataLoader` takes beyond torch's arguments."""


def _brought(worker_backend: Any, num_workers: Any) -> Any:
    """Return how many workers a loader is made with: where an object brings them, as many as it says.

    Raises:
        ConfigurationError: for an object that brings none, and for another number.
    """
    if isinstance(worker_backend, str):
        return num_workers
    if isinstance(worker_backend, type) or not hasattr(worker_backend, "make_backend"):
        raise ConfigurationError(
            f'worker_backend should be "process", "thread" or RayWorkers(...), but got {worker_backend!r}'
        )
    if num_workers not in (0, worker_backend.num_workers):
        raise ConfigurationError(
            f"the workers are those of {worker_backend!r}, and there are no others beside them: leave num_workers out, "
            f"but got {num_workers!r}"
        )
    return worker_backend.num_workers
