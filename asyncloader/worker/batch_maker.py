"""Make batches: keys in, a batch out, or one `Outcome`. No process, thread, loop or channel is known here.

    keys ── fetch ──> samples ── without bad ones, as `on_error` says ── collate ──> BATCH
              │                    └ none is good ──> LEFT_OUT              │
              ├ the end of the data ──> EXHAUSTED                           │
              └ raised ─────────────────────────────────────────────────────┴──> FAILURE

Whoever has the tickets drives it: one after the other (`answer`), or with samples of many tickets in flight, which are
gathered by whatever fetches them (`gathered`). Where nobody has tickets, and the trainer's process makes its batches
itself, `make` returns a batch, or raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import length_hint
from time import perf_counter, thread_time
from typing import Any, TypeAlias
from zlib import crc32

import torch

from asyncloader.epochs import EpochNotice, listeners, tell
from asyncloader.messages.failure import (
    OF_OPENING,
    BadSample,
    Blame,
    CapturedError,
    EndOfData,
    another,
    with_notes,
)
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.messages.snapshot import Keeper, WorkerStart
from asyncloader.observe.private import PrivateBytes
from asyncloader.observe.record import Record
from asyncloader.observe.usage import Usage
from asyncloader.protocols import namer
from asyncloader.seeding import sample_context
from asyncloader.seeding.generators import check_of, restore, states_of
from asyncloader.seeding.hashing import mix
from asyncloader.seeding.own_generators import OwnGenerators, seeded_generators_of
from asyncloader.seeding.sample_context import BATCH, COLLATION, Placed, SampleContext, Steps, current
from asyncloader.seeding.seeder import COLLATE, Seeder
from asyncloader.seeding.switch import DrawWatch, GeneratorSwitch
from asyncloader.transport.collate import is_default, recycling_collate
from asyncloader.worker.fetch import IterableFetcher, MapFetcher, fetch_and_drop, refuse_awaitables
from asyncloader.worker.job import Job, NoGoodSample, mend
from asyncloader.worker.odd_sample import find_odd_sample

Work: TypeAlias = "Job | BatchMaker"
"""What knows how a batch came about: a job where samples overlap, otherwise the maker, which makes one at a time."""

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


def _raised_at(position: int) -> Blame | None:
    """Return the sample at this position as the one that raised; None where it was no single sample."""
    return Blame(position) if position >= 0 else None


class Host:
    """The place where batches are made, as far as places differ: here it is the trainer's process.

    Attributes:
        where: For the words of errors: "in DataLoader worker process 3".
        is_remote: Outcomes go to another process.
        cpu_clock: Tells the CPU seconds of the worker.
    """

    where = ""
    is_remote = False
    cpu_clock: Callable[[], float] = staticmethod(thread_time)

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Make the surroundings those of a worker: seeds, ``get_worker_info()``."""

    def ends(self, error: BaseException) -> bool:
        """Whether the worker cannot go on after this exception; otherwise it stands for the batch."""
        raise NotImplementedError

    def capture(self, error: BaseException) -> CapturedError:
        """Make of an exception what the outcome of a failure holds."""
        if self.is_remote:
            return CapturedError.capture(error, self.where)
        return CapturedError(type(error).__name__, self.where, error=error)

    def collator(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes a batch of samples, or of a `Whole`, in memory that suits the host.

        Here it is memory that is used again, where torch's default collates.
        """
        return recycling_collate(collate_fn)


class BatchMaker:
    """Makes the batches of one worker. For one thread at a time.

    Args:
        worker_id: From 0.
        spec: The dataset and how batches are made of it; or an exception, which then stands for every batch.
        host: Where it is.
        aside: Entered while batches are made again for nobody.

    Attributes:
        host: Where it is.
        keeper: Keeps the state of the dataset in this run, if it has one.
        failure: The exception that stands for every batch of this run, or None.
        seeder: The seeder of this run.
        blame: The sample that the last error is about, where that is known.
        ticket, waited_s, began: As of a `Job`, of the ticket that was answered last.
        count, fetched, bad, snapshot: The same, of what `make` has made last, or has not.
        switch: Gives each sample draws of its own where samples overlap, or warns of draws, or does neither.
    """

    spec: WorkerSpec
    seeder: Seeder
    collate: Callable[[Any], Any]
    _is_batched: bool
    _is_plain = False
    """A batch is seeded for, if batches are, fetched and collated, and that is all: most are."""
    _seeds: bool
    """Each batch is seeded for here, or each of its samples; otherwise blocks are at most."""
    _is_known = False
    """A batch was looked at, and has not to be awaited."""
    ticket: int = 0
    waited_s: float = 0.0
    began: float = 0.0
    fetched: float = 0.0
    count: int = 0
    bad: Sequence[BadSample] = ()
    snapshot: Any = None
    blame: Blame | None = None

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec | Exception,
        host: Host,
        aside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.keeper: Keeper | None = None
        self.switch: Steps = Steps()
        self._unfit: Exception | None = None  # what stands for every batch of every run
        self._id = worker_id
        self.host = host
        self._aside = aside
        self._fetch: Any = None  # a `MapFetcher` or `IterableFetcher`, where samples are fetched one by one
        self._own_states: list[tuple[Any, Any]] = []  # as they are outside of samples
        self._reseeded: set[str] = set()  # by `worker_init_fn`
        self._epoch: EpochSpec
        self._notice: EpochNotice | None = None  # of the run before
        memory: PrivateBytes | None = None
        if isinstance(spec, WorkerSpec):
            self.spec = spec
            self.collate, self._is_batched = host.collator(spec.collate_fn), spec.auto_collation
            if host.is_remote:  # threads share their memory
                memory = PrivateBytes(bound=spec.max_worker_memory)
        else:
            self._unfit = spec
        self.failure = self._unfit
        self._usage = Usage(host.cpu_clock, memory)

    # -------------------------------------------------------------------------------------------------- opening

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing after what `make` returned last."""
        return getattr(self._fetch, "ended", False)

    @property
    def _start(self) -> WorkerStart:
        return (self._epoch.starts or {}).get(self._id, WorkerStart())

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Give the calling thread the modes of the one that iterates."""
        modes = self.spec.modes if self.failure is None else None
        return contextlib.nullcontext() if modes is None else modes.active()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Have what is raised inside stand for every batch."""
        try:
            yield
        except Exception as error:
            self.failure = self._unfit = with_notes(error, [OF_OPENING])

    def enter(self, epoch: EpochSpec) -> None:
        """Become a worker: seed, run ``worker_init_fn``."""
        self._epoch = epoch
        if self.failure is not None:
            return
        spec = self.spec = replace(self.spec, num_workers=epoch.num_workers or self.spec.num_workers)
        if (snapshot := self._start.snapshot) is not None:
            # Streams of random numbers begin anew with the process; those from the beginning of the run were used.
            spec = replace(spec, base_seed=mix(spec.base_seed, crc32(repr(snapshot).encode())) >> 2)
        with self.opening():
            self.host.enter(self._id, spec, partial(self._reseed_pipe, spec.dataset))
            if spec.worker_init_fn is not None:
                before = self._generator_checks()
                spec.worker_init_fn(self._id)
                self._reseeded = {path for path, _ in self._generator_checks() - before}

    def begin(self, epoch: EpochSpec, open_source: Callable[[Any], None] | None = None) -> None:
        """Begin a run: bring the dataset into the state that it begins with, and open what samples come from.

        An exception stands for every batch of this run; the next run tries again.

        Args:
            epoch: The run.
            open_source: Opens that, of the dataset; `open_fetcher` unless samples are gathered by another.
        """
        self._epoch = epoch
        keeper, self.keeper = self.keeper, None
        self.failure = self._unfit
        if self.failure is not None:
            return
        self.seeder = Seeder(epoch.key)
        spec, outside = self.spec, current.set(SampleContext(self.seeder, 0))
        try:
            self._leave(keeper)
            restore(self._own_states)
            dataset = self._reseed_pipe(spec.dataset)
            # A copy that begins its first run may have been made late, of a dataset that had been told another epoch.
            before, self._notice = self._notice, epoch.notice
            tell(listeners(dataset), epoch.notice.since(before), again=before is not None)
            if epoch.starts is not None:
                start = epoch.starts[self._id]
                self.keeper = Keeper(dataset, spec.snapshot_every, start, sends=self.host.is_remote)
                if spec.is_iterable:
                    tell(listeners(dataset), start.epochs, again=True)
            self._find_generators()
            self._seeds = spec.seeds_each_batch or spec.seeds_each_sample
            is_special = spec.knows_places or spec.tolerates or self.keeper is not None
            self._may_be_plain = self._is_batched and not is_special
            self._is_plain = self._may_be_plain and self._is_known
            (open_source or self.open_fetcher)(dataset)
            if self.keeper is not None and not spec.is_iterable:
                if self._fetch is not None and self.keeper.made:
                    with self._aside():
                        self._catch_up(self.keeper)
                tell(listeners(dataset), start.epochs, again=True)
        except Exception as error:
            self.failure = error
        finally:
            current.reset(outside)

    def _leave(self, keeper: Keeper | None) -> None:
        """Leave the run before, and begin it if it was not begun.

        A dataset that was put in the middle of its data would begin there in the next run otherwise.
        """
        fetch = self._fetch
        is_stream = isinstance(fetch, IterableFetcher)
        if is_stream and keeper is not None and keeper.is_put_back and fetch.is_unread and not fetch.ended:
            fetch_and_drop(fetch, [None])

    def _own_generators(self) -> dict[str, Any]:
        """Look for generators of the dataset's own, where samples are seeded."""
        spec = self.spec
        is_looked_at = spec.seeds_each_batch or spec.knows_places or spec.shares_generators
        return seeded_generators_of(spec.dataset, spec.collate_fn) if is_looked_at else {}

    def _generator_checks(self) -> set[tuple[str, int]]:
        return {(path, check_of(generator)) for path, generator in self._own_generators().items()}

    def _find_generators(self) -> None:
        by_path, epoch = self._own_generators(), self._epoch
        keys = (epoch.generators or {}).items()
        known = {path: (check, epoch.epoch - first) for path, (check, first) in keys if path not in self._reseeded}
        may_seed = self.host.is_remote or self.spec.seeds_each_sample
        self.seeder = Seeder(epoch.key, OwnGenerators(by_path, known, epoch.key), may_seed=may_seed)
        # In the trainer's process each batch gives them back.
        self._own_states = states_of(by_path.values()) if self.host.is_remote else []
        if type(self.switch) is not Steps:
            self.switch.begin_run(self.seeder)
        elif self.spec.seeds_overlapping:
            self.switch = GeneratorSwitch(self.seeder, warns=not self._id)  # one warning is enough
        elif self.spec.shares_generators and not self._id:
            self.switch = DrawWatch(self.seeder, is_alone=self.host.is_remote)

    def pause_with(self, pause: Callable[[], object] | None) -> None:
        """Have this called after each sample that `make` gets."""
        self._fetch.pause_with(pause)

    def open_fetcher(self, dataset: Any, iterator: Any = None) -> None:
        """Make what `make` gets samples from; of this iterator, if there is one already."""
        keeper = self.keeper
        if self.spec.is_iterable:
            self._fetch = IterableFetcher(dataset, self.spec, iterator)
            self._fetch.ended = keeper is not None and keeper.attach(self._fetch.iterator)
        else:
            self._fetch = MapFetcher(dataset, self.spec)
        if self.switch.is_on:
            self.pause_with(partial(self.switch.end, None, is_last=True))

    def _reseed_pipe(self, dataset: Any) -> Any:
        if self._epoch.shared_seed is None:  # not an IterDataPipe
            return dataset
        from torch.utils.data.graph_settings import apply_random_seed

        shared_rng = torch.Generator()
        shared_rng.manual_seed(self._epoch.shared_seed)
        return apply_random_seed(dataset, shared_rng)

    def close(self) -> None:
        """Let go of the dataset and its iterator."""
        self._fetch = self.keeper = None
        if hasattr(self, "spec"):
            del self.spec

    # --------------------------------------------------------------------------------------- one after the other

    def answer(self, ticket: int, keys: Any, waited_s: float = 0.0) -> Outcome:
        """Make the batch of a ticket. An exception stands for the batch, unless the worker cannot go on after it."""
        if self.failure is not None or type(keys) is CapturedError:
            return self.refused(ticket, keys)
        self.ticket, self.waited_s, self.began = ticket, waited_s, perf_counter()
        try:
            data = self.make(ticket, keys)
        except BaseException as error:
            if self.host.ends(error):
                raise
            return self.failed(self, error)
        return self.batch(self, data)

    def make(self, number: int, keys: Any) -> Any:
        """Return a batch, or raise what stands for it.

        Args:
            number: Number of the batch in its epoch: seeds are made of it.
            keys: As the sampler gave them.

        Raises:
            EndOfData: after the end of a stream.
            NoGoodSample: if every sample of the batch has raised, and they are tolerated.
            BaseException: whatever a sample or their collation raises; `blame` says which sample it is about.
        """
        here, samples = SampleContext(self.seeder, number), None
        outside = current.set(here)
        try:
            if self._is_plain:
                if self._seeds:
                    self.seeder(number)
                samples = self._fetch(keys, here)
                self.fetched = perf_counter()
                self.count = length_hint(samples, 1)
            else:
                here, keys = self._begin_batch(here, keys)
                samples = self._fetch(keys, here)
                self.fetched = perf_counter()
                samples = self._looked_at(samples, keys, here)
            return self.collate(samples)
        except BaseException as error:
            self._fetch.errors.clear()  # of an interrupted batch, which may be made anew
            if samples is None:  # they are not there
                self.count, self.fetched = 0, 0.0
                self.snapshot = None
            if not self.host.ends(error):
                self.blame = _raised_at(here.position) if samples is None else self._odd(samples, self.bad)
            raise
        finally:
            current.reset(outside)

    def _begin_batch(self, here: SampleContext, keys: Any) -> tuple[SampleContext, Any]:
        """Seed for a batch; leave out those of a stream that come before it. Return its context, and its keys alone."""
        self.bad = ()
        keys = self._seed(here, keys)
        if self.keeper is not None and (gap := self.keeper.gap()):
            with self._aside():
                here = self._leave_out(gap, here.batch, keys)
        return here, keys

    def _looked_at(self, samples: Any, keys: Any, here: SampleContext) -> Any:
        """Return what is collated of samples that were fetched, and note the state of the dataset after them."""
        if not self._is_known:
            refuse_awaitables(samples, self.spec.dataset)
            if self.switch.is_on:
                self.switch.end(here, is_last=True)
                self.switch.on_batch()
                self.pause_with(None)
            self._is_known = not self.switch.is_on
            self._is_plain = self._is_known and self._may_be_plain
        if self.keeper is not None:
            self.snapshot = self.keeper.take(ended=self._fetch.ended)
        if here.first is not None:
            here.position = COLLATION
        return self._good(self, samples, self._fetch.errors, keys)

    def _good(self, work: Work, samples: Any, errors: dict[int, Any], keys: Any) -> Any:
        """Return the samples of a batch without those that raised, or with others in their places."""
        if errors:
            work.bad = self._bad(errors, keys)
            samples = mend(samples, errors, leave_out=self.spec.on_error == "skip")
        work.count = length_hint(samples, 1) if self._is_batched else 1
        return samples if self._is_batched else samples[0]

    def _seed(self, here: SampleContext, keys: Any) -> Any:
        """Seed generators for a batch, or for each of its samples, in its context; return its keys alone."""
        if type(keys) is not Placed:
            if self._seeds:
                here.seeder(here.batch)
            return keys
        keys, here.first = keys
        if self._seeds:
            here.seed_each()
        return keys

    def _catch_up(self, keeper: Keeper) -> None:
        """Make again, and drop, what was made of a map-style dataset after the state that it has begun with."""
        for made in keeper.made:
            here = sample_context.enter(Seeder(made.key), made.batch)
            fetch_and_drop(self._fetch, self._seed(here, made.keys))

    def _leave_out(self, count: int, number: int, keys: Any) -> SampleContext:
        """Read over the batches of a stream that come before this one, and were made already; return its context."""
        for _ in range(count):
            sample_context.enter(self.seeder, number)
            if not fetch_and_drop(self._fetch, keys):
                break
        return sample_context.enter(self.seeder, number)  # the generator of a sample begins anew

    # ------------------------------------------------------------------------------------ samples that are all here

    def gathered(self, job: Job) -> Outcome:
        """Return the outcome of a ticket whose samples overlapped. The job refers to none of them any more."""
        position = COLLATION if job.first is not None else BATCH
        here = sample_context.enter(self.seeder, job.ticket, position, job.first, self.switch)
        if self.keeper is not None and not self.spec.is_iterable:
            job.snapshot = self.keeper.take()  # a stream takes it itself, when the samples have been read
        draws_nothing = is_default(self.spec.collate_fn)
        with contextlib.nullcontext() if draws_nothing else self.switch.seeded(*here.place(COLLATE)):
            return self._finish(job)

    def _finish(self, job: Job) -> Outcome:
        errors, samples, job.errors, job.samples = job.errors, job.samples, {}, None
        try:
            if (error := errors.get(job.fatal_at)) is not None:
                self.blame = _raised_at(job.fatal_at)
                return self.failed(job, error)
            samples = self._good(job, samples, errors, job.keys)
            return self.batch(job, self.collate(samples))
        except BaseException as error:
            if self.host.ends(error):
                raise
            self.blame = self._odd(samples, job.bad)
            return self.failed(job, error)
        finally:
            del errors, samples  # a traceback that refers to this frame would keep them

    def _bad(self, errors: dict[int, Any], keys: Any) -> list[BadSample]:
        """Return the samples of a batch that have raised these, as they are told."""
        spec = self.spec
        keys = None if spec.is_iterable else [*keys] if spec.auto_collation else [keys]
        name = namer(spec.dataset, of_batches=False)
        return [
            BadSample(None if keys is None else name(keys[at]), at, CapturedError.capture(error, self.host.where))
            for at, error in sorted(errors.items())
        ]

    # ------------------------------------------------------------------------------------------------- outcomes

    def batch(self, work: Work, data: Any) -> Outcome:
        """Return the batch of a ticket."""
        return _new(Outcome, (Kind.BATCH, self._record(work), data, None, work.bad, work.snapshot, 0))

    def failed(self, work: Work, error: BaseException) -> Outcome:
        """Return what becomes of a ticket for which this was raised; `blame` says by which sample."""
        blame = self.blame
        if isinstance(error, EndOfData):
            return Outcome(Kind.EXHAUSTED, self._record(work), snapshot=self.last_snapshot())
        if isinstance(error, NoGoodSample):
            if self.spec.on_error == "skip":
                return Outcome(Kind.LEFT_OUT, self._record(work), None, None, work.bad, work.snapshot)
            blame, error = _raised_at(error.position), error.first
        captured = self.host.capture(error)
        captured = replace(captured, blame=blame) if blame else captured
        return Outcome(Kind.FAILURE, self._record(work), None, captured, work.bad, work.snapshot)

    def _odd(self, samples: Any, bad: Sequence[BadSample]) -> Blame | None:
        """Return the sample that keeps these from being collated by torch's default, if there is one."""
        spec = self.spec
        if not (spec.auto_collation and type(samples) is list and is_default(spec.collate_fn)):
            return None
        if (position := find_odd_sample(samples)) is None:
            return None
        if spec.on_error == "skip":  # bad samples are not among these
            left_out = {sample.position for sample in bad}
            there = (at for at in range(len(samples) + len(left_out)) if at not in left_out)
            position = next(islice(there, position, None))
        return Blame(position, is_odd=True)

    def refused(self, ticket: int, keys: Any) -> Outcome:
        """Return what becomes of a ticket of which nothing can be made: of such keys, or as nothing could be opened."""
        if type(keys) is CapturedError:  # they did not come out of their pickle
            return Outcome(Kind.REFUSED, self._record(Job(ticket)), error=keys)
        assert self.failure is not None
        return Outcome(Kind.FAILURE, self._record(Job(ticket)), error=self.host.capture(another(self.failure)))

    def last_snapshot(self) -> Any:
        """Return the state that the next run begins with, after the end of a stream, if the dataset is here then."""
        return self.keeper.take_last() if self.keeper is not None and self.spec.keeps_dataset else None

    def _record(self, work: Work) -> Record:
        """Note the times of a ticket: waited for it, fetched, collated until now; and what the worker has used."""
        now = perf_counter()
        began, fetched = work.began, work.fetched or now
        fields = (
            work.ticket,
            self._epoch.number,
            work.count,
            began,
            work.waited_s,
            fetched - began,
            now - fetched,
            *self._usage.since_last(now),
            0.0,  # the transport notes how long encoding takes
        )
        return _new(Record, fields)
