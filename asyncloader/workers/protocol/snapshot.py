"""The state of a dataset in one worker: taken after its batches, brought back at the beginning of a run.

    Start      where a worker begins, or has come to: the last snapshot, the batches since, and some ahead of these
    Keeper     takes snapshots of the dataset and its iterator, loads one, and leaves out what came after it

A snapshot is {"dataset", "iterator", "ended"}: the states of those that tell theirs. A dataset that is its own iterator
tells it once. Without any there are no snapshots, and a worker begins with leaving out as many batches as were made.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from asyncloader.protocols import probe

log = logging.getLogger("asyncloader")


def is_stateful(thing: Any) -> bool:
    """Whether it can tell its state and take it back, without being told anything.

    A module's state is its weights, which are not a place in the data. Some datasets' ``state_dict`` takes arguments
    that only their own loader knows.
    """
    tell, take = probe(thing, "state_dict"), probe(thing, "load_state_dict")
    if not (callable(tell) and callable(take)) or isinstance(thing, torch.nn.Module):
        return False
    try:
        inspect.signature(tell).bind()
    except TypeError:
        return False
    except ValueError:  # of an extension, whose signature cannot be known
        pass
    return True


def plain(state: Any) -> Any:
    """Write a user's state down as JSON where that says all of it; else return a copy of it."""
    if state is None:
        return None
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return text
    except (TypeError, ValueError, RecursionError, RuntimeError):  # RuntimeError: tensors do not like being compared
        pass
    return copy.deepcopy(state)


def unplain(state: Any) -> Any:
    """Turn what `plain` returned into the user's state, a new one each time."""
    return json.loads(state) if isinstance(state, str) else copy.deepcopy(state)


class Start(NamedTuple):
    """Where a worker is: so many batches after a snapshot, or after the beginning if there is none.

    Where batches of a stream are made at once, some further ones may be done with before the one that comes next:
    ``ahead`` are their numbers in ascending order, counted from that one, which is 0.
    """

    batches: int = 0
    snapshot: Any = None
    ahead: Sequence[int] = ()

    def after(self, snapshot: Any) -> Start:
        """Return where it is one batch later, with nothing ahead."""
        return Start(self.batches + 1, self.snapshot) if snapshot is None else Start(0, snapshot)

    def gaps(self) -> list[int]:
        """Return how many batches of the stream are left out before each of the next ones that are made."""
        gaps = [self.batches]
        if self.ahead:
            done = set(self.ahead)
            gaps.append(0)
            for number in range(1, max(done) + 1):
                if number in done:
                    gaps[-1] += 1
                else:
                    gaps.append(0)
        return gaps


def as_plain(starts: dict[int, Start]) -> Any:
    """Write down where workers are: as JSON if that says all of it."""
    written = [
        (start.batches, plain_snapshot(start.snapshot), list(start.ahead)) for _, start in sorted(starts.items())
    ]
    if all(isinstance(snapshot, str) for _, snapshot, _ in written):
        return f"[{', '.join(f'[{batches}, {snapshot}, {ahead}]' for batches, snapshot, ahead in written)}]"
    return [[start.batches, unplain(start.snapshot), str(list(start.ahead))] for _, start in sorted(starts.items())]


def plain_snapshot(snapshot: Any) -> Any:
    """Write down a snapshot, which a worker may have written down already."""
    return snapshot if isinstance(snapshot, str) else "null" if snapshot is None else plain(snapshot)


def from_plain(plain: Any) -> dict[int, Start]:
    """Read what `as_plain` has written."""
    return {worker: _start(*start) for worker, start in enumerate(unplain(plain))}


def _start(batches: int, snapshot: Any, ahead: list[int] | str = "[]") -> Start:
    return Start(batches, snapshot, tuple(json.loads(ahead) if isinstance(ahead, str) else ahead))


class Keeper:
    """Keeps the state of a dataset in one worker, through one run.

    Args:
        dataset: As the worker has it.
        every: Take a snapshot after each so many batches.
        start: Where the run begins.
    """

    def __init__(self, dataset: Any, every: int, start: Start) -> None:
        self._gaps = deque(start.gaps())
        self._dataset = dataset
        self._every = every
        self._start = start
        self._snapshot = unplain(start.snapshot) or {}
        self._things: dict[str, Any] = {}
        self._made = 0
        if self._snapshot.get("dataset") is not None and is_stateful(dataset):
            dataset.load_state_dict(self._snapshot["dataset"])

    def attach(self, iterator: Any) -> bool:
        """Bring back the state of the dataset's iterator, which was made after the dataset's; whether it had ended."""
        things = {"iterator": iterator, "dataset": self._dataset}
        if iterator is self._dataset:
            del things["dataset"]
        self._things = {name: thing for name, thing in things.items() if is_stateful(thing)}
        if self._snapshot.get("iterator") is not None and "iterator" in self._things:
            iterator.load_state_dict(self._snapshot["iterator"])
        return bool(self._snapshot.get("ended"))

    def gap(self) -> int:
        """Turn to the next batch that is made; return how many are left out before it, for they were made already."""
        return self._gaps.popleft() if self._gaps else 0

    def leave_out(self, fetch: Callable[[Any], Any], keys: Any) -> None:
        """Turn to the next batch; fetch what is left out before it, and drop it."""
        for _ in range(self.gap()):
            try:
                fetch(keys)
            except StopIteration:
                return
            except Exception:  # it was raised in its time
                pass

    def take(self, *, ended: bool = False) -> Any:
        """Count a batch; return a snapshot if it is time for one."""
        self._made += 1
        if not self._things or self._made % self._every:
            return None
        try:
            states = {name: thing.state_dict() for name, thing in self._things.items()}
            return plain({"dataset": None, "iterator": None, "ended": ended, **states})
        except Exception:
            log.warning(
                "The state of the dataset could not be taken, and is not asked for again in this run: to go on from "
                "here, batches since the last one are read again and dropped.",
                exc_info=True,
            )
            self._things = {}
            return None
