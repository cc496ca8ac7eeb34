"""Answer tickets: open the dataset, fetch, collate, send. In a worker process or a worker thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any
from zlib import crc32

import torch

from asyncloader.hashing import mix
from asyncloader.observe.stalls import Stalls
from asyncloader.workers.child import sample_context as place
from asyncloader.workers.child.fetch import Fetcher, IterableFetcher, NoGoodSample, make_fetcher
from asyncloader.workers.child.seeding import BatchSeeder
from asyncloader.workers.child.stream import relive
from asyncloader.workers.child.transport import Line, micros
from asyncloader.workers.protocol.failure import BadSample, EndOfData, Unreadable
from asyncloader.workers.protocol.messages import EpochSpec, Kind, Record, WorkerSpec
from asyncloader.workers.protocol.snapshot import Keeper, Start

_LOOK_EVERY_S = 0.001


class Server:
    """Answers tickets, one after the other.

    Args:
        worker_id: From 0.
        line: To the parent.
        epoch: The run over the data that the first tickets belong to.
        spec: What to work with; or why there is nothing: then that answers every ticket.
    """

    def __init__(self, worker_id: int, line: Line, epoch: EpochSpec, spec: WorkerSpec | Exception) -> None:
        self._id = worker_id
        self._line = line
        self._epoch = epoch
        self._tickets: deque[tuple[int, Any]] = deque()
        self._spec: WorkerSpec
        self._failure: Any = None
        if isinstance(spec, WorkerSpec):
            self._spec = spec
        else:
            self._failure = line.capture(spec)
        self._fetch: Fetcher | None = None
        self._keeper: Keeper | None = None
        self._seed: BatchSeeder | None = None
        self._runner: asyncio.Runner | None = None  # for samples that turn out to be awaitables
        self._ended = False  # before the tickets that come from now on
        self._untold: list[Callable[[], None]] = []  # what follows from the end of the data
        self._is_confirmed = False  # that is to be told
        self._idle_since = perf_counter()
        self._cpu_s = line.cpu_clock()
        self._stalls = Stalls()
        self._looked_at = 0.0

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Give the calling thread the modes of the one that iterates."""
        modes = self._spec.modes if self._failure is None else None
        return contextlib.nullcontext() if modes is None else modes.active()

    # -------------------------------------------------------------------------------------------------- opening

    def open(self) -> None:
        """Seed, run ``worker_init_fn``, make a fetcher. What they raise answers every ticket."""
        self._enter()
        if self._failure is None:
            try:
                place.enter(self._epoch.key, 0)
                _run_at_once(relive(self._spec.dataset, self._past))
            except Exception as error:
                self._failure = self._line.capture(error)
        self._begin_epoch()
        self._line.send(Kind.READY)

    @property
    def _past(self) -> Sequence[Start]:
        """Runs that the worker whose place this one takes had been through."""
        return (self._epoch.starts or {}).get(self._id, Start()).past

    def _enter(self) -> None:
        if self._failure is not None:
            return
        spec = self._spec
        starts = self._epoch.starts or {}
        if (snapshot := starts.get(self._id, Start()).snapshot) is not None:
            # Streams of random numbers begin anew with the process; those from the beginning of the run were used.
            spec = replace(spec, base_seed=mix(spec.base_seed, crc32(repr(snapshot).encode())) >> 2)
        try:
            self._line.enter(self._id, spec, partial(self._reseed_pipe, spec.dataset))
            if spec.worker_init_fn is not None:
                spec.worker_init_fn(self._id)
        except Exception as error:
            self._failure = self._line.capture(error)

    def _begin_epoch(self) -> None:
        """Make the iterator of an iterable dataset anew, and the seeds of this run."""
        if self._failure is not None:
            return
        try:
            self._make_fetcher(self._reseed_pipe(self._spec.dataset))
        except Exception as error:
            self._failure = self._line.capture(error)
        self._ended = self._is_confirmed = False
        self._untold.clear()

    def _make_fetcher(self, dataset: Any) -> None:
        spec, keeper = self._spec, self._make_keeper(dataset)
        self._fetch = make_fetcher(
            dataset,
            is_iterable=spec.is_iterable,
            auto_collation=spec.auto_collation,
            drop_last=spec.drop_last,
            run=self._run_coroutine,
            on_error=spec.on_error,
            where=self._line.where,
        )
        if keeper is not None and isinstance(self._fetch, IterableFetcher):
            self._fetch.ended = keeper.attach(self._fetch.iterator)
        elif keeper is not None:
            self._catch_up(keeper)
        self._seed = BatchSeeder(self._epoch.key) if spec.seed_each_batch else None

    def _make_keeper(self, dataset: Any) -> Keeper | None:
        """Bring the dataset into the state that the run begins with; return what tells its state from now on."""
        starts = self._epoch.starts
        if starts is None:
            self._keeper = None
        else:
            every, sends = self._spec.snapshot_every, self._line.is_remote
            self._keeper = Keeper(dataset, every, starts[self._id], sends=sends)
        return self._keeper

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _reseed_pipe(self, dataset: Any) -> Any:
        if self._epoch.shared_seed is None:  # not an IterDataPipe
            return dataset
        from torch.utils.data.graph_settings import apply_random_seed

        shared_rng = torch.Generator()
        shared_rng.manual_seed(self._epoch.shared_seed)
        return apply_random_seed(dataset, shared_rng)

    # -------------------------------------------------------------------------------------------------- serving

    def run(self) -> None:
        """Answer tickets until END."""
        while self._read_messages():
            seq, keys = self._tickets.popleft()
            if not self._ended:
                self._answer(seq, keys)
                self._stalls.look()
                self._idle_since = perf_counter()

    def _read_messages(self) -> bool:
        """Read what is there, wait if there is no ticket; False when told to end.

        Looked at before a ticket, so that END and a new epoch do not wait behind a queue; but not more often than every
        millisecond, for a look is a system call.
        """
        while not self._tickets or perf_counter() - self._looked_at > _LOOK_EVERY_S:
            message = self._line.receive(wait=not self._tickets)
            self._looked_at = perf_counter()
            if message is None:
                return True
            kind, contents = message
            if kind == Kind.TICKETS:
                self._tickets.extend(contents)
            elif kind == Kind.EPOCH:
                self._tickets.clear()
                self._epoch = contents
                self._begin_epoch()
            elif kind == Kind.CONFIRM:
                self._confirm(contents)
            elif kind == Kind.END:
                return False
        return True

    def _answer(self, seq: int, keys: Any) -> None:
        started = perf_counter()
        try:
            if type(keys) is Unreadable:
                self._line.send(Kind.REFUSED, self._record(seq, started), keys.failure)
                return
            if self._fetch is None or self._failure is not None:
                self._line.send(Kind.FAILURE, self._record(seq, started), self._failure)
                return
            keeper, snapshot = self._keeper, None
            if keeper is not None:
                self._leave_out(keeper, seq, keys)
            if self._seed is not None:
                self._seed(seq)
            place.enter(self._epoch.key, seq)
            samples = [self._fetch(keys)]
            ended = getattr(self._fetch, "ended", False)
            if keeper is not None:
                snapshot = keeper.take(ended=ended)
            arguments = seq, started, perf_counter(), samples, snapshot, self._fetch.bad
            if ended:  # a short batch
                self._at_end(partial(self._finish, *arguments))
            else:
                self._finish(*arguments)
        except BaseException as error:
            if self._line.ends(error):
                raise
            self._fail(self._record(seq, started), error, () if self._fetch is None else self._fetch.bad)

    def _finish(
        self, seq: int, started: float, fetched: float, held: list[Any], snapshot: Any, bad: Sequence[BadSample]
    ) -> None:
        """Collate the samples of a ticket, which are taken out of the list, and send the batch."""
        try:
            samples = held.pop()
            count = len(samples) if self._spec.auto_collation and hasattr(samples, "__len__") else 1
            batch = [self._line.collate(self._spec.collate_fn, samples)]
            del samples
            record = self._record(seq, started, fetched, count)
            if snapshot is not None:
                self._line.send(Kind.STATE, record, snapshot)
            self._line.send_batch(record, batch, bad)
        except BaseException as error:
            if self._line.ends(error):
                raise
            self._fail(self._record(seq, started), error, bad)

    def _catch_up(self, keeper: Keeper) -> None:
        """Make again, and drop, what was made of a map-style dataset after the state that it has begun with."""
        for made in keeper.made:
            if self._spec.seed_each_batch:
                BatchSeeder(made.key)(made.seq)
            place.enter(made.key, made.seq)
            self._make_and_drop(made.keys)

    def _leave_out(self, keeper: Keeper, seq: int, keys: Any) -> None:
        """Read over the batches of a stream that come before this one, and were made already."""
        for _ in range(keeper.gap()):
            place.enter(self._epoch.key, seq)
            if not self._make_and_drop(keys):
                return

    def _make_and_drop(self, keys: Any) -> bool:
        """Fetch a batch for nobody; False if there is none: the stream has come to its end."""
        assert self._fetch is not None
        try:
            self._fetch(keys)
        except EndOfData:
            return False
        except Exception:  # it was raised in its time
            pass
        return True

    def _fail(self, record: Record, error: BaseException, bad: Sequence[BadSample]) -> None:
        """Tell what became of a ticket that there is no batch for."""
        if isinstance(error, EndOfData):
            self._ended = True
            self._at_end(partial(self._tell_exhausted_now, record))
            return
        if isinstance(error, NoGoodSample):
            self._line.send(Kind.BAD, record, list(bad))
            if self._spec.on_error == "skip":
                self._line.send(Kind.LEFT_OUT, record)
                return
            error = error.first
        self._line.send(Kind.FAILURE, record, self._line.capture(error))

    def _tell_exhausted_now(self, record: Record) -> None:
        """Tell that a ticket has no samples, and the state of a dataset that the next run begins with if it is here."""
        if self._keeper is not None and self._spec.outlasts_run and (snapshot := self._keeper.take_last()) is not None:
            self._line.send(Kind.STATE, record, snapshot)
        self._line.send(Kind.EXHAUSTED, record)

    def _at_end(self, tell: Callable[[], None]) -> None:
        """Tell what follows from the end of the data, when this worker has lived on: for a word to the parent and back.

        Data may seem to end because the worker does: their source was killed with it, or it is being taken down.
        """
        if self._is_confirmed:
            tell()
            return
        self._untold.append(tell)
        if len(self._untold) == 1:
            self._line.send(Kind.ENDING, body=self._epoch.number)

    def _confirm(self, run: int) -> None:
        if run == self._epoch.number:
            self._is_confirmed = True
            untold, self._untold = self._untold, []
            for tell in untold:
                tell()

    def _record(self, seq: int, started: float, fetched: float | None = None, samples: int = 0) -> Record:
        """Note the times of a ticket: waited for it, fetched, collated until now; CPU time since the one before."""
        now = perf_counter()
        fetched = now if fetched is None else fetched
        cpu_before, self._cpu_s = self._cpu_s, self._line.cpu_clock()
        return Record(
            seq=seq,
            began_us=int(started * 1e6),
            epoch=self._epoch.number,
            wait_us=micros(started - self._idle_since),
            fetch_us=micros(fetched - started),
            collate_us=micros(now - fetched),
            encode_us=0,
            cpu_us=micros(self._cpu_s - cpu_before),
            stalled_us=micros(self._stalls.take()),
            samples=samples,
        )

    # --------------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Let the dataset, its iterator and what they hold run their own cleanup."""
        self._line.leave()
        self._fetch = None
        if self._runner is not None:
            self._runner.close()
        if hasattr(self, "_spec"):
            del self._spec


def _run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what awaits nothing here, without a loop: the dataset's own code may want to begin one."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
