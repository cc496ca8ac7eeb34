"""Write a timeline of what happened: for Perfetto (https://ui.perfetto.dev), or Chrome's about:tracing.

    consumers ── rows of batches ──┬──> in hand ── every 512, in a consumer's thread ──> file
    loop thread ── marks ──────────┘

A track for each worker, for the channel (sending tickets and reading answers), the pin thread and the consumer. The
file is whole JSON after each writing, and open during writing only, so a run that is killed leaves a timeline up to
then.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from asyncloader.log import log
from asyncloader.observe.record import ROW

_WRITE_AT = 512
_END = b"\n]\n"
_INSTANT_S = 1e-6
_CONSUMER, _CHANNEL, _PIN, _WORKER = 1, 2, 3, 100  # the numbers of the tracks; workers count on
_LANES = 64  # tracks of a worker at most: one for each of the batches that it fetches at once
_NAMES = {_CONSUMER: "consumer", _CHANNEL: "channel", _PIN: "pin thread"}


class Trace:
    """A file with the timeline of one or several runs. Any thread may note; writing takes a lock.

    Args:
        path: The file; what is there is replaced.

    Attributes:
        key: The process that writes it, and the file. A fork of this process leaves the file alone; 0 if the file does
            not take any more.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._began = perf_counter()
        self._noted: list[tuple[float | str, Any]] = []
        self._named: set[int] = set()
        self._lanes: dict[int, list[float]] = {}  # of each worker, until when its lanes are taken
        self._lock = threading.Lock()
        self.key: tuple[int, str] = _key(path)
        self._end_at = 1
        self.path.write_bytes(b"[" + _END)

    def mark(self, text: str, at: float) -> None:
        """Note an event of the whole run."""
        self._noted.append((text, at))

    def note(self, epoch: int, row: list[float]) -> None:
        """Note a batch that a consumer took in this run of the loader, by its row."""
        self._noted.append((epoch, row))

    # ----------------------------------------------------------------------------------------------- writing

    @property
    def is_due(self) -> bool:
        """Whether there is so much that it should be written."""
        return len(self._noted) >= _WRITE_AT

    def write(self, *, wait: bool = True) -> None:
        """Write what was noted. If the file does not take it, say so once; the training goes on.

        Finalizers do not wait for a thread that is writing, which may be the one they interrupt.
        """
        if self.key[0] != os.getpid() or not self._lock.acquire(blocking=wait):
            return
        try:
            until = len(self._noted)
            noted, self._noted[:until] = self._noted[:until], []
            if text := b",\n".join(json.dumps(event).encode() for each in noted for event in self._events(*each)):
                self._append((b",\n" if self._end_at > 1 else b"\n") + text)
        except OSError as error:
            self.key = 0, ""
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

    # --------------------------------------------------------------------------------------- what viewers are shown

    def _events(self, what: Any, value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(what, str):
            yield {"ph": "i", "s": "g", "pid": 1, "tid": _CONSUMER, "name": what, "ts": self._us(value)}
            return
        row = SimpleNamespace(**dict(zip((*ROW, "idle_from"), value, strict=True)))
        args = {"batch": int(row.batch), "epoch": what}
        for track, name, began, seconds in self._slices(row):
            if track not in self._named:
                self._named.add(track)
                yield from _names(track)
            us = {"ts": self._us(began), "dur": round(max(seconds, _INSTANT_S) * 1e6, 1)}
            yield {"ph": "X", "pid": 1, "tid": track, "name": name, **us, "args": args}
        ready = {"batches": int(row.lay_ready)}
        yield {"ph": "C", "pid": 1, "tid": _CONSUMER, "name": "ready", "ts": self._us(row.taken_at), "args": ready}

    def _us(self, at: float) -> float:
        return round((at - self._began) * 1e6, 1)

    def _slices(self, row: SimpleNamespace) -> Iterator[tuple[int, str, float, float]]:
        """Return the track, name, beginning and length of each thing that happened to a batch."""
        is_here = row.worker < 0
        work_s = row.read_at - row.began if is_here else row.fetch_s + row.collate_s + row.encode_s
        track = self._track(int(row.worker), row.began, row.began + work_s)
        yield track, f"batch {row.batch:.0f}", row.began, work_s
        fetched_at = row.began + work_s - row.collate_s - row.encode_s
        yield track, "fetch", row.began, fetched_at - row.began
        yield track, "collate", fetched_at, row.collate_s
        if not is_here:
            yield track, "encode", fetched_at + row.collate_s, row.encode_s
            yield _CHANNEL, "send", row.sent_at, 0.0
            yield _CHANNEL, "receive", row.arrived_at, row.read_at - row.arrived_at
        if row.pin_s:
            yield _PIN, "pin", row.made_at - row.pin_s, row.pin_s
        if row.idle_from:
            began = row.idle_from + _INSTANT_S  # after the slice in which the last one was taken
            yield _CONSUMER, "train", began, row.asked_at - began
        yield _CONSUMER, "wait", row.asked_at, row.taken_at - row.asked_at
        yield _CONSUMER, "take", row.taken_at, 0.0

    def _track(self, worker: int, began: float, ended: float) -> int:
        """Return the first track of the worker on which nothing overlaps this."""
        lanes = self._lanes.setdefault(worker, [])
        lane = next((lane for lane, taken in enumerate(lanes) if taken <= began + _INSTANT_S), len(lanes))
        lane = min(lane, _LANES - 1)
        lanes[lane : lane + 1] = [ended]
        return _WORKER + worker * _LANES + lane


def _names(track: int) -> Iterator[dict[str, Any]]:
    worker, lane = divmod(track - _WORKER, _LANES)
    of_worker = ("this process" if worker < 0 else f"worker {worker}") + f" ({lane + 1})" * bool(lane)
    common = {"pid": 1, "ph": "M", "tid": track}
    yield {**common, "name": "thread_name", "args": {"name": _NAMES.get(track, of_worker)}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": track}}


# ------------------------------------------------------------------------------------------------------- sharing

_by_loader: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def _renew() -> None:
    global _sharing  # a thread that makes a file in the parent is not in the child
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def _key(path: str | os.PathLike[str]) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(path)


def shared_trace(path: str | os.PathLike[str], loader: Any) -> Trace:
    """Return the timeline that loaders of this process write into a file: one, as long as any of them is there.

    Args:
        path: The file.
        loader: An object that lives as long as the loader. (A run that ends in the background refers to its timeline
            for a moment longer.)
    """
    with _sharing:
        known = {trace.key: trace for trace in _by_loader.values()}
        trace = _by_loader[loader] = known.get(_key(path)) or Trace(path)
    return trace
