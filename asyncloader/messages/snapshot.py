"""States of the user's objects: when they are taken, how they are kept and written down, how they are brought back.

    Pace         says when a state is due: it may cost a fiftieth of the time, and no more
    Frozen       a state as it was when it was taken
    WorkerStart  where a worker begins, or has come to: the last snapshot, and what was made since
    Keeper       takes snapshots of the dataset and its iterator, loads one, and says what came after it

A snapshot is {"dataset", "iterator", "ended"}: the states of those that provide one. A dataset that is its own iterator
provides it once. That of the end of a stream has "draws" as well: global generators were drawn from meanwhile. And in a
worker "past", the state of the iterator that has come to its end: another iterator loads it before the next run begins,
for it may set the worker's generators.

Batches since a snapshot are made again from there, and dropped: a number of batches of a stream, the keys of batches of
a map-style dataset.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import deque
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from asyncloader.epochs import latest
from asyncloader.plain import as_text, plain, plain_keys, unplain, unplain_keys
from asyncloader.protocols import is_stateful, merges_states, put_back
from asyncloader.seeding.generators import GLOBAL, check_of
from asyncloader.seeding.sample_context import Placed

_SHARE = 50
_CHEAP_S = 200e-6
_CHEAP_FIRST_S = 5e-3
"""The first time much is done that is not done again."""
_MOST_SINCE = 1000
"""Batches of a map-style dataset after a snapshot: their keys are kept until the next one, which is taken then."""


class Frozen:
    """A state as it was when it was taken, whatever becomes of the objects in it.

    Pickled, which takes a tenth of the time of a deep copy, and isolates as well; a copy where that cannot be.

    Attributes:
        taken_at: On `time.perf_counter`, which all processes of a machine share.
        ended: An iterator had come to its end when this was taken of it.
        can_travel: It can be sent to another process.
    """

    __slots__ = ("_kept", "_text", "can_travel", "ended", "taken_at")

    def __init__(self, state: Any, *, ended: bool = False) -> None:
        self.ended: bool = ended
        self.taken_at: float = perf_counter()
        self._text: str | None = None
        self.can_travel: bool = True
        try:
            self._kept: Any = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
        except Exception:  # whatever its classes raise
            self._kept, self.can_travel = copy.deepcopy(state), False

    def thaw(self) -> Any:
        """Return the state, a new one each time."""
        return pickle.loads(self._kept) if self.can_travel else copy.deepcopy(self._kept)

    def plain(self) -> Any:
        """Write it down as `plain` does."""
        if self._text is None:
            written = as_text(self.thaw())  # a new object: it need not be copied
            if not isinstance(written, str):
                return written
            self._text = written
        return self._text


class Untold(NamedTuple):
    """In place of a snapshot: why the state of a dataset could not be taken."""

    reason: str


class Pace:
    """Says when the next state is due, so that taking states costs a fiftieth of the time at most.

    A state that takes microseconds is taken with each batch; one that takes a second, every minute. Batches between
    two states are drawn or made again after a resume: in less than `_SHARE` times as long as taking the state took.
    """

    def __init__(self) -> None:
        self._due_at = 0.0
        self._began = (0.0, 0.0)
        self._is_first = True

    def is_due(self) -> bool:
        """Whether a state may be taken now."""
        return perf_counter() >= self._due_at

    def begin(self) -> None:
        """A state is being taken from now on."""
        self._began = (perf_counter(), thread_time())

    def end(self) -> None:
        """A state was taken. The thread's own time tells whether that is cheap: others may have had the core."""
        began, cpu_began = self._began
        now, cpu_s = perf_counter(), thread_time() - cpu_began
        is_cheap = cpu_s < (_CHEAP_FIRST_S if self._is_first else _CHEAP_S)
        self._is_first = False
        if not is_cheap:
            self._due_at = now + _SHARE * (now - began)


# ------------------------------------------------------------------------------------------------------------- places


class Made(NamedTuple):
    """A batch of a map-style dataset: what it was seeded with (base seed, epoch, rank; number) and its keys.

    The keys are `Placed` where samples are seeded by their places.
    """

    key: tuple[int, int, int]
    batch: int
    keys: Any


class WorkerStart(NamedTuple):
    """Where a worker is: what was made after a snapshot, or after the beginning if there is none.

    A stream has a number of batches. Where batches of a stream are made at once, some further ones may be done with
    before the one that comes next: ``ahead`` are their numbers in ascending order, counted from that one, which is 0. A
    map-style dataset has the keys of batches, ``made``, in this order.

    ``epochs`` is what `set_epoch` has told the dataset since: a stream after the snapshot, which is of the end of the
    run before, and a map-style dataset after ``made``, which is of runs before. With the first batch afterwards a
    map-style dataset gives another snapshot.
    """

    batches: int = 0
    snapshot: Any = None  # a Frozen, or a state that was loaded
    ahead: Sequence[int] = ()
    made: tuple[Made, ...] = ()
    epochs: tuple[int | None, ...] = ()

    def after(self, snapshot: Any) -> WorkerStart:
        """Return where a stream is one batch later, with nothing ahead."""
        if snapshot is None:
            return WorkerStart(self.batches + 1, self.snapshot, epochs=self.epochs)
        return WorkerStart(0, snapshot)

    def told(self, news: Sequence[int | None]) -> WorkerStart:
        """Return this place after the dataset was told these epochs; None is no epoch."""
        return self._replace(epochs=latest(self.epochs, news))

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


def as_plain(starts: dict[int, WorkerStart] | None) -> Any:
    """Write down where workers are: as JSON if that says all of it; None where they have no place."""
    return starts and plain([_written(start) for _, start in sorted(starts.items())])


def _written(start: WorkerStart) -> list[Any]:
    snapshot = start.snapshot.thaw() if isinstance(start.snapshot, Frozen) else start.snapshot
    made = list[Any]()
    for key, number, keys in start.made:
        keys, *first = keys if type(keys) is Placed else (keys,)
        made.append([[*key], number, plain_keys(keys), *first])
    return [start.batches, snapshot, [*start.ahead], made, [*start.epochs]]


def from_plain(written: Any) -> dict[int, WorkerStart]:
    """Read what `as_plain` has written."""
    return {worker: _start(*start) for worker, start in enumerate(unplain(written))}


def _start(batches: int, snapshot: Any, ahead: list[int], made: list[Any], epochs: list[int | None]) -> WorkerStart:
    again = list[Made]()
    for key, number, written, *first in made:
        keys = unplain_keys(written)
        again.append(Made(tuple(key), number, Placed(keys, *first) if first else keys))
    return WorkerStart(batches, snapshot, tuple(ahead), tuple(again), tuple(epochs))


class Keeper:
    """Keeps the state of a dataset in one worker, through one run.

    Args:
        dataset: As the worker has it.
        every: Take a snapshot after the first batch and after each so many, as `Pace` allows; 0 for never. Of a
            map-style dataset one is taken after `_MOST_SINCE` in any case.
        start: Where the run begins.
        sends: Snapshots go to another process.

    Attributes:
        made: The batches of a map-style dataset that were made after its state was taken: to be made again at once, for
            it may be that none follows in this run.
        is_put_back: The dataset has begun in a state that was told.
    """

    def __init__(self, dataset: Any, every: int, start: WorkerStart, *, sends: bool = False) -> None:
        self._gaps = deque(start.gaps())
        self.made: tuple[Made, ...] = start.made
        self._dataset = dataset
        self._every = every
        self._sends = sends
        self._snapshot = _thawed(start.snapshot) or {}
        self.is_put_back: bool = bool(self._snapshot) and is_stateful(dataset)
        self._things: dict[str, Any] = {"dataset": dataset} if is_stateful(dataset) else {}
        self._since = start.batches + len(start.made)  # batches since the last snapshot
        self._generators: list[int] = []  # what tells the global ones when a stream begins
        self._keeps_keys = True  # of batches since the last snapshot: those of a stream are only counted
        # What is drawn between the beginning and the first batch is not drawn again. A resumed run counts on from the
        # snapshot that it has begun from, as the run before would have done.
        self._is_first = not self._snapshot or "draws" in self._snapshot or bool(start.epochs)
        self._pace = Pace()
        self._is_merged = merges_states(dataset)  # which asks for a state at each batch
        if is_stateful(dataset):
            put_back(dataset, self._snapshot.get("dataset"))
        if (past := self._snapshot.get("past")) is not None:
            with contextlib.suppress(Exception):  # it need not be able to: nothing is read there
                iter(dataset).load_state_dict(past)
            if is_stateful(dataset):  # which may count its iterators
                put_back(dataset, self._snapshot.get("dataset"))

    def attach(self, iterator: Any) -> bool:
        """Bring back the state of the dataset's iterator, which was made after the dataset's; whether it had ended."""
        self._keeps_keys = False
        self._generators = list(map(check_of, GLOBAL))
        things = {"iterator": iterator, "dataset": self._dataset}
        if iterator is self._dataset:
            del things["dataset"]
        self._things = {name: thing for name, thing in things.items() if is_stateful(thing)}
        if self._snapshot.get("iterator") is not None and "iterator" in self._things:
            iterator.load_state_dict(self._snapshot["iterator"])
        return bool(self._snapshot.get("ended"))

    def gap(self) -> int:
        """Turn to the next batch of a stream; return how many are left out before it, for they were made already."""
        return self._gaps.popleft() if self._gaps else 0

    def take(self, *, ended: bool = False) -> Frozen | Untold | None:
        """Count a batch; return a snapshot if it is time for one."""
        if not self._every:
            return None
        self._since += 1
        is_turn = self._is_first or self._since % self._every == 0
        self._is_first = False
        if (is_turn and (self._pace.is_due() or self._is_merged)) or (self._keeps_keys and self._since >= _MOST_SINCE):
            return self.take_now(ended=ended)
        return None

    def take_now(self, *, ended: bool = False, **more: bool) -> Frozen | Untold | None:
        """Return a snapshot, with what more there is to say; None if nothing provides a state."""
        if not self._things or not self._every:
            return None
        self._pace.begin()
        self._since = 0  # nothing is kept either after a snapshot that could not be taken
        try:
            states = {name: thing.state_dict() for name, thing in self._things.items()}
            frozen = Frozen({"dataset": None, "iterator": None, "ended": ended, **states, **more}, ended=ended)
            if self._sends and not frozen.can_travel:
                pickle.dumps(states)  # raises what is the matter
            return frozen
        except Exception as error:
            return Untold(f"{type(error).__name__}: {error}")
        finally:
            self._pace.end()

    def take_last(self) -> Frozen | Untold | None:
        """Return what of the dataset's state outlasts the run, after a stream has come to its end.

        The state of its iterator in a worker may have the worker's generators, which go on in the next run.
        """
        past = self._things.get("iterator") if self._sends else None
        self._things = {"dataset": self._dataset} if is_stateful(self._dataset) else {}
        if past is not self._dataset and hasattr(past, "__next__"):
            self._things["past"] = past
        return self.take_now(draws=self._generators != list(map(check_of, GLOBAL)))


def dataset_here(dataset: Any, every: int | None = 1) -> WorkerStart:
    """Return where the dataset of this process is, which is the one that batches are made of without workers."""
    snapshot = Keeper(dataset, every or 0, WorkerStart()).take_now()
    return WorkerStart(0, snapshot) if isinstance(snapshot, Frozen) else WorkerStart()


def outlasting(snapshot: Any, dataset: Any) -> Frozen:
    """Return what of a snapshot outlasts a run that was left there: the dataset's state, as `Keeper.take_last` does.

    The next run has another iterator, which begins anew, also if that is the dataset itself.
    """
    states = _thawed(snapshot)
    is_its_own = states["dataset"] is None and is_stateful(dataset)
    return Frozen({"dataset": states["iterator" if is_its_own else "dataset"], "iterator": None, "ended": False})


def _thawed(snapshot: Any) -> Any:
    return snapshot.thaw() if isinstance(snapshot, Frozen) else copy.deepcopy(snapshot)
