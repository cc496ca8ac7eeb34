"""What a worker process does: open the dataset, answer tickets, end cleanly. Runs in the worker's main thread."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import sys
import traceback
from asyncio import CancelledError
from collections import deque
from time import perf_counter, process_time
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker

from asyncloader.transport import collate
from asyncloader.transport.codec import Encoder
from asyncloader.workers import bootstrap
from asyncloader.workers.channel import WorkerChannel
from asyncloader.workers.failure import RemoteError
from asyncloader.workers.fetch import Fetcher, NoGoodSample, make_fetcher
from asyncloader.workers.messages import RECORD, EpochSpec, Kind, WorkerSpec
from asyncloader.workers.seeding import BatchSeeder, seed_worker

_LOOK_EVERY_S = 0.001


class ParentGone(BaseException):
    """The channel has ended: there is nobody to work for."""


def serve(worker_id: int, epoch: EpochSpec) -> None:
    """Stay until told to end. The one task of the executor that started this process."""
    given = bootstrap.given
    assert given is not None, "initialize() runs before serve()"
    bootstrap.given = None
    channel = WorkerChannel(given.ends.channel)
    start_method = given.start_method
    try:
        server = Server(worker_id, channel, epoch, given.arena)
        server.open(given.source)
        del given
        server.run()
        server.close()
    except ParentGone:
        pass
    except BaseException as error:
        _leave(error)
    finally:
        if start_method != "spawn":
            # No interpreter exit follows that would run them; what the trainer had registered was cleared.
            atexit._run_exitfuncs()
        channel.close()


def _leave(error: BaseException) -> None:
    """End the process as an uncaught exception would: the parent sees a death with its exit code."""
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif not isinstance(error, KeyboardInterrupt):  # the main process raises that by itself
        traceback.print_exception(error)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Server:
    """Answers tickets, one after the other.

    Args:
        worker_id: From 0.
        channel: To the parent.
        epoch: The run over the data that the first tickets belong to.
        arena: Handle of the shared memory, or None.
    """

    def __init__(self, worker_id: int, channel: WorkerChannel, epoch: EpochSpec, arena: Any) -> None:
        self._id = worker_id
        self._channel = channel
        self._epoch = epoch
        self._slabs = arena.attach() if arena is not None else None
        if self._slabs is not None:
            self._slabs.ask = self._ask
        self._encoder = Encoder(self._slabs)
        self._tickets: deque[tuple[int, Any]] = deque()
        self._spec: WorkerSpec
        self._fetch: Fetcher | None = None
        self._seed: BatchSeeder | None = None
        self._failure: RemoteError | None = None
        self._ended = False
        self._idle_since = perf_counter()
        self._cpu_s = process_time()
        self._looked_at = 0.0

    # -------------------------------------------------------------------------------------------------- opening

    def open(self, source: Any) -> None:
        """Take the dataset, seed, run ``worker_init_fn``. What it raises answers every ticket."""
        try:
            self._spec = source if isinstance(source, WorkerSpec) else source.open()
            self._enter_worker_world()
            self._begin_epoch()
        except Exception as error:
            self._failure = RemoteError.capture(error, self._where())
        self._channel.send(Kind.READY)

    def _enter_worker_world(self) -> None:
        spec = self._spec
        torch.set_num_threads(1)
        seed = seed_worker(spec.base_seed, self._id)
        self._send(Kind.UP)
        dataset = self._reseed_pipe(spec.dataset)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=spec.num_workers, seed=seed, dataset=dataset
        )
        collate.install(self._encoder)
        if spec.worker_init_fn is not None:
            spec.worker_init_fn(self._id)

    def _begin_epoch(self) -> None:
        """Make the iterator of an iterable dataset anew, and the seeds of this run."""
        spec = self._spec
        dataset = self._reseed_pipe(spec.dataset)
        self._fetch = make_fetcher(
            dataset,
            is_iterable=spec.is_iterable,
            auto_collation=spec.auto_collation,
            drop_last=spec.drop_last,
            on_error=spec.on_error,
            where=self._where(),
        )
        self._seed = BatchSeeder(self._epoch.key) if spec.seed_each_batch else None
        self._ended = False

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
        while self._read_frames():
            seq, keys = self._tickets.popleft()
            if not self._ended:
                self._answer(seq, keys)
                self._idle_since = perf_counter()

    def _read_frames(self) -> bool:
        """Read what is there, wait if there is no ticket; False when told to end.

        Looked at before a ticket, so that END and a new epoch do not wait behind a queue; but not more often than every
        millisecond, for a look is a system call.
        """
        while not self._tickets or perf_counter() - self._looked_at > _LOOK_EVERY_S:
            frame = self._receive(wait=not self._tickets)
            self._looked_at = perf_counter()
            if frame is None:
                return True
            kind, body = frame
            if kind == Kind.TICKETS:
                tickets, loans = pickle.loads(body)
                self._tickets.extend(tickets)
                if loans and self._slabs is not None:
                    self._slabs.add(loans)
            elif kind == Kind.EPOCH:
                self._tickets.clear()
                self._epoch = pickle.loads(body)
                self._restart()
            elif kind == Kind.END:
                return False
        return True

    def _restart(self) -> None:
        if self._failure is not None:
            return
        try:
            self._begin_epoch()
        except Exception as error:
            self._failure = RemoteError.capture(error, self._where())

    def _receive(self, *, wait: bool) -> tuple[int, bytes] | None:
        try:
            return self._channel.receive(wait=wait)
        except (EOFError, OSError) as error:
            raise ParentGone from error

    def _answer(self, seq: int, keys: Any) -> None:
        started = perf_counter()
        try:
            if self._fetch is None or self._failure is not None:
                self._refuse(seq, started)
                return
            if self._seed is not None:
                self._seed(seq)
            samples = self._fetch(keys)
            fetched = perf_counter()
            count = len(samples) if self._spec.auto_collation and hasattr(samples, "__len__") else 1
            with self._encoder.allocating():
                batch = self._spec.collate_fn(samples)
            del samples
            collated = perf_counter()
            parts = self._encoder.encode(batch)
            del batch
            self._encoder.release()
        except (Exception, CancelledError) as error:  # a cancelled task of the dataset's own is no reason to end
            self._fail(seq, started, error)
            return
        record = self._record(seq, started, fetched, collated, perf_counter(), samples=count)
        if self._fetch.bad:
            self._send_bad(record)
        self._send(Kind.RESULT, record, *parts)

    def _fail(self, seq: int, started: float, error: BaseException) -> None:
        record = self._record(seq, started)
        if isinstance(error, StopIteration) and self._spec.is_iterable:
            self._ended = True
            self._send(Kind.EXHAUSTED, record)
            return
        if isinstance(error, NoGoodSample):
            self._send_bad(record)
            if self._spec.on_error == "skip":
                self._send(Kind.LEFT_OUT, record)
                return
            error = error.first
        failure = RemoteError.capture(error, self._where())
        self._send(Kind.FAILURE, record, pickle.dumps(failure))

    def _send_bad(self, record: bytes) -> None:
        """Tell which samples the outcome that follows was made without."""
        assert self._fetch is not None
        bad = list(self._fetch.bad)
        try:
            body = pickle.dumps(bad)
        except Exception:  # keys that unpickle, or they would not be here, but do not pickle
            body = pickle.dumps([sample._replace(key=repr(sample.key)) for sample in bad])
        self._send(Kind.BAD, record, body)

    def _refuse(self, seq: int, started: float) -> None:
        self._send(Kind.FAILURE, self._record(seq, started), pickle.dumps(self._failure))

    def _record(self, seq: int, started: float, *marks: float, samples: int = 0) -> bytes:
        """Pack the times of a ticket: waited for it, fetched, collated, encoded; CPU time since the one before."""
        fetched, collated, encoded = marks or (perf_counter(),) * 3
        cpu_before, self._cpu_s = self._cpu_s, process_time()
        times = (
            started - self._idle_since,
            fetched - started,
            collated - fetched,
            encoded - collated,
            self._cpu_s - cpu_before,
        )
        micros = [min(int(t * 1e6), 0xFFFFFFFF) for t in times]
        return RECORD.pack(seq, int(started * 1e6), self._epoch.number, *micros, samples)

    def _send(self, kind: int, *parts: Any) -> None:
        try:
            self._channel.send(kind, *parts)
        except OSError as error:
            raise ParentGone from error

    def _ask(self, sizes: Any, returned: Any) -> Any:
        """Get slabs of these sizes from the parent: a round trip. Tickets that come meanwhile are kept."""
        self._send(Kind.ASK, pickle.dumps((sizes, returned)))
        passed: list[tuple[int, bytes]] = []
        while True:
            frame = self._receive(wait=True)
            assert frame is not None
            if frame[0] == Kind.LOANS:
                self._channel.put_back(passed)
                return pickle.loads(frame[1])
            passed.append(frame)

    def _where(self) -> str:
        return f"in DataLoader worker process {self._id}"

    # --------------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Let the dataset, its iterator and what they hold run their own cleanup."""
        torch_worker._worker_info = None
        self._fetch = None
        del self._spec
        gc.collect()
