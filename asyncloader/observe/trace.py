"""Write a timeline of what happened: for Perfetto (https://ui.perfetto.dev), or Chrome's about:tracing.

    loop thread, consumers ── note ──> events in hand ── every 512, in a consumer's thread ──> file

A track for each worker, for the channel (sending tickets and reading answers), the pin thread and the consumer. The
file is whole JSON after each writing, and open during writing only, so a run that is killed leaves a timeline up to
then.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

log = logging.getLogger("asyncloader")

_WRITE_AT = 512
_END = b"\n]\n"
_INSTANT_S = 1e-6
_TRAINER = 1  # the number of this process
_CONSUMER, _CHANNEL, _PIN, _WORKER = 1, 2, 3, 100  # the numbers of the tracks; workers count on
_LANES = 64  # tracks of a worker at most: one for each of the batches that it fetches at once

Event: TypeAlias = "Callable[..., Iterator[dict[str, Any]]]"
"""Makes what viewers are shown of an event: `epoch`, `batch`, `taken` and so on."""


class Trace:
    """A file with the timeline of one or several runs. Any thread may note; writing takes a lock.

    Args:
        path: The file; what is there is replaced.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._began = perf_counter()
        self._events: list[tuple[Any, ...]] = []
        self._named: set[int] = set()
        self._lanes: dict[int, list[float]] = {}  # of each worker, until when its lanes are taken
        self._lock = threading.Lock()
        self._is_open = True
        self._pid = os.getpid()  # a fork of this process leaves the file alone
        self._end_at = 1
        self.path.write_bytes(b"[" + _END)

    def note(self, event: Event, *values: Any) -> None:
        """Note an event with the values that it takes: its events for viewers are made when the file is written."""
        self._events.append((event, *values))

    # ----------------------------------------------------------------------------------------------- writing

    def is_written_here(self, path: str | os.PathLike[str]) -> bool:
        """Whether this process writes it, into that file: it is no fork of who does, and nothing went wrong."""
        is_ours = self._is_open and self._pid == os.getpid()
        return is_ours and os.path.realpath(self.path) == os.path.realpath(path)

    @property
    def is_due(self) -> bool:
        """Whether there is so much that it should be written."""
        return len(self._events) >= _WRITE_AT

    def write(self, *, wait: bool = True) -> None:
        """Write what was noted. If the file does not take it, say so once; the training goes on.

        Finalizers do not wait for a thread that is writing, which may be the one they interrupt.
        """
        if self._pid != os.getpid() or not self._lock.acquire(blocking=wait):
            return
        try:
            until = len(self._events)
            events, self._events[:until] = self._events[:until], []
            if not events or not self._is_open:
                return
            text = b",\n".join(json.dumps(event).encode() for noted in events for event in self._expand(noted))
            text = (b",\n" if self._end_at > 1 else b"\n") + text
            try:
                self._append(text)
            except OSError as error:
                self._is_open = False
                log.warning("The timeline in %s ends here, the training goes on: %s", self.path, error)
        finally:
            self._lock.release()

    def _append(self, text: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            try:
                file.seek(self._end_at)
                whole = memoryview(text + _END)
                while whole:
                    whole = whole[file.write(whole) :]
            except OSError:
                file.truncate(self._end_at)  # what was written before stays whole, if three bytes find room
                file.seek(self._end_at)
                file.write(_END)
                raise
        self._end_at += len(text)

    def close(self) -> None:
        """Write the events that are left. Events that are noted later are dropped."""
        self.write()
        self._is_open = False

    # --------------------------------------------------------------------------------------------- expanding

    def _expand(self, noted: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        make, *values = noted
        if make is batch:
            _, worker, _, began, stages, *_ = values
            values[1] = self._track(worker, began, began + sum(seconds for _, seconds in stages))
        for event in make(*values):
            if (track := event["tid"]) not in self._named:
                self._named.add(track)
                yield from _names(track)
            for key in ("ts", "dur"):
                if key in event:
                    event[key] = round((event[key] - self._began * (key == "ts")) * 1e6, 1)
            yield {"pid": _TRAINER, **event}

    def _track(self, worker: int, began: float, ended: float) -> int:
        """Return the first track of the worker on which nothing overlaps this."""
        lanes = self._lanes.setdefault(worker, [])
        lane = next((lane for lane, taken in enumerate(lanes) if taken <= began + _INSTANT_S), len(lanes))
        lane = min(lane, _LANES - 1)
        lanes[lane : lane + 1] = [ended]
        return _WORKER + worker * _LANES + lane


def _names(track: int) -> Iterator[dict[str, Any]]:
    worker, lane = divmod(track - _WORKER, _LANES)
    fixed = {_CONSUMER: "consumer", _CHANNEL: "channel", _PIN: "pin thread"}
    name = fixed.get(track) or ("this process" if worker < 0 else f"worker {worker}") + f" ({lane + 1})" * bool(lane)
    common = {"pid": _TRAINER, "ph": "M", "tid": track}
    yield {**common, "name": "thread_name", "args": {"name": name}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": track}}


def _slice(track: int, name: str, began: float, seconds: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "tid": track, "name": name, "ts": began, "dur": max(seconds, _INSTANT_S), "args": args}


def epoch(at: float, number: int) -> Iterator[dict[str, Any]]:
    """A run begins."""
    yield {"ph": "i", "s": "g", "tid": _CONSUMER, "name": f"epoch {number}", "ts": at}


def workers(at: float, number: int) -> Iterator[dict[str, Any]]:
    """The number of workers has changed to this."""
    yield {"ph": "i", "s": "g", "tid": _CONSUMER, "name": f"{number} workers", "ts": at}
    yield {"ph": "C", "tid": _CONSUMER, "name": "workers", "ts": at, "args": {"workers": number}}


def renewed(at: float, worker: int) -> Iterator[dict[str, Any]]:
    """Another process has taken the place of a worker."""
    yield {"ph": "i", "s": "g", "tid": _CONSUMER, "name": f"worker {worker} renewed", "ts": at}


def memory(at: float, worker: int, private_bytes: int) -> Iterator[dict[str, Any]]:
    """A worker has so much memory to itself."""
    args = {"MB": round(private_bytes / 1e6, 1)}
    yield {"ph": "C", "tid": _CONSUMER, "name": f"memory of worker {worker}", "ts": at, "args": args}


def batch(
    batch: int, track: int, sent_at: float, began: float, stages: Any, arrived_at: float, now: float
) -> Iterator[dict[str, Any]]:
    """A batch has come, from a worker or from this process (noted as worker -1).

    Args:
        batch: The number of its ticket.
        track: Where it is shown; noted is the worker.
        sent_at: When its ticket was sent, 0.0 for never.
        began: When the work began.
        stages: Names and seconds of what the worker did, one after the other.
        arrived_at: When it arrived, 0.0 for never.
        now: When it has been read. All times are on this machine's clock.
    """
    if sent_at:
        yield _slice(_CHANNEL, "send", sent_at, 0.0, batch=batch)
    yield _slice(track, f"batch {batch}", began, sum(seconds for _, seconds in stages), batch=batch)
    for name, seconds in stages:
        yield _slice(track, name, began, seconds, batch=batch)
        began += seconds
    if arrived_at:
        yield _slice(_CHANNEL, "receive", arrived_at, now - arrived_at, batch=batch)


def pinned(batch: int, now: float, seconds: float) -> Iterator[dict[str, Any]]:
    """A copy into page-locked memory has just been made."""
    yield _slice(_PIN, "pin", now - seconds, seconds, batch=batch)


def taken(batch: int, last_at: float, asked_at: float, now: float, ready: int, epoch: int) -> Iterator[dict[str, Any]]:
    """A consumer took a batch.

    Args:
        batch: Its number in the plan.
        last_at: When the last one was taken, 0.0 for never.
        asked_at: When it was asked for.
        now: When it was taken.
        ready: How many more lay ready.
        epoch: The run of the loader.
    """
    if last_at:
        began = last_at + _INSTANT_S  # after the slice in which the last one was taken
        yield _slice(_CONSUMER, "train", began, asked_at - began)
    yield _slice(_CONSUMER, "wait", asked_at, now - asked_at, batch=batch)
    yield _slice(_CONSUMER, "take", now, 0.0, batch=batch, epoch=epoch)
    yield {"ph": "C", "tid": _CONSUMER, "name": "ready", "ts": now, "args": {"batches": ready}}


# ------------------------------------------------------------------------------------------------------- faces

_by_loader: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def _renew() -> None:
    global _sharing  # a thread that makes a file in the parent is not in the child
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def shared_trace(path: str | os.PathLike[str], loader: Any) -> Trace:
    """Return the timeline that loaders of this process write into a file: one, as long as any of them is there.

    Args:
        path: The file.
        loader: An object that lives as long as the loader.
    """
    with _sharing:
        found = (trace for trace in _by_loader.values() if trace.is_written_here(path))
        trace = _by_loader[loader] = next(found, None) or Trace(path)
    return trace
