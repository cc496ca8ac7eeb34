"""Local workers and those of other machines in one run: one backend for the session, two behind it, told apart by ids.

session ──> MixedPool ── ids below `first` ──> Pool: processes of this machine
                      └─ the others ─────────> RemotePool
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from asyncloader.backends.backend import Backend, Launch, Listener
from asyncloader.backends.worker import Worker
from asyncloader.messages.messages import EpochSpec
from asyncloader.ray.pool import RemotePool

_PASSED_ON = ("on_ready", "on_outcome", "on_died", "on_left", "on_prepared", "on_lost", "on_failed")
"""What each of the two tells the session's listener itself: all but its end."""


class MixedPool:
    """Two backends as one; see :class:`asyncloader.backends.backend.Backend` for the methods. Loop thread only.

    Args:
        local: Its workers have ids below `first`.
        remote: Its workers have the others.
        first: The least id of a remote worker.
        num_fixed: How many remote workers there are from the beginning on, because workers cannot come and go. The
            datasets of all workers are told of these.
    """

    def __init__(self, local: Backend, remote: RemotePool, first: int, num_fixed: int) -> None:
        self._local = local
        self._remote = remote
        self._first = first
        self._num_told = first + num_fixed if num_fixed else 0
        self._listener: Listener | None = None
        self._open: list[Backend] = [local, remote]
        both: Any = (local.processes, remote.processes)
        self._processes: ChainMap[int, Worker] = ChainMap(*both)
        self.has_processes, self.takes_long = local.has_processes, local.takes_long

    def __repr__(self) -> str:
        return f"<MixedPool {self._local!r} {self._remote!r}>"

    @property
    def listener(self) -> Listener | None:
        """Gets what the workers make."""
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        halves: list[Any] = [None] * len(self._open)
        if listener is not None:
            passed_on = {name: getattr(listener, name) for name in _PASSED_ON}
            halves = [SimpleNamespace(**passed_on, on_closed=partial(self._on_closed, half)) for half in self._open]
        self._listener = listener  # nothing fails from here on: each of the two tells of its end, or neither
        for half, told in zip(self._open, halves, strict=True):
            half.listener = told

    def _on_closed(self, half: Backend) -> None:
        self._open = [other for other in self._open if other is not half]
        if not self._open and self._listener is not None:
            self._listener.on_closed()
            self._listener = None

    @property
    def processes(self) -> Mapping[int, Worker]:
        """The workers that there are now, by id."""
        return self._processes

    def _of(self, worker: int) -> Backend:
        return self._local if worker < self._first else self._remote

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start the local workers, then have agents launched: a process is forked while no thread launches agents."""
        epoch = epoch._replace(num_workers=self._num_told)
        yield from self._local.start(epoch, started)
        yield from self._remote.start(epoch, started)

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets; return those whose keys cannot be pickled."""
        return self._of(worker).send(worker, tickets)

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data."""
        epoch = epoch._replace(num_workers=self._num_told)
        self._local.begin_epoch(epoch)
        self._remote.begin_epoch(epoch)

    def discard(self, worker: int) -> None:
        """Kill this worker: another will take its place."""
        self._of(worker).discard(worker)

    def add(self, worker: int, num_workers: int) -> None:
        """Start a worker under this id."""
        self._of(worker).add(worker, num_workers)

    def prepare(self, worker: int, num_workers: int) -> Worker | None:
        """Start beforehand what is to take the place of this worker."""
        return self._of(worker).prepare(worker, num_workers)

    def place(self, num_workers: int | None, most_here: int) -> int:
        """Have so many workers in all, local ones first; return how many of them are local.

        Args:
            num_workers: In all; None for as many on other machines as the user says.
            most_here: How many this machine can use.
        """
        here = min(num_workers or 0, most_here)
        self._remote.want(None if num_workers is None else num_workers - here)
        return here

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish."""
        self._of(worker).dismiss(worker, grace_s)

    def end(self, grace_s: float) -> None:
        """Tell all workers to finish."""
        self._remote.end(grace_s)
        self._local.end(grace_s)

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all workers are gone. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        both = (self._local, self._remote)
        waits = [backend.wait_dead(max(0.0, deadline - time.monotonic())) for backend in both]
        return all(waits)
