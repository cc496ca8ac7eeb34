"""Reads batches of keys from the sampler, so that an epoch can be gone on with in the middle.

How a plan goes on at batch n: samplers with a state load it. For others the generators are set to what they were when
the epoch began, and n batches are drawn and dropped; no data are read for it.

All of it happens in the consumer's thread: samplers are the user's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from asyncloader.protocols import probe
from asyncloader.workers.protocol.snapshot import is_stateful

if TYPE_CHECKING:
    from asyncloader.iteration.progress import Progress


def samplers_within(index_sampler: Any) -> list[Any]:
    """List an index sampler and the samplers that it is made of, the outermost first."""
    found: list[Any] = []
    todo = [index_sampler]
    while todo:
        sampler = todo.pop(0)
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            todo += [probe(sampler, name) for name in ("batch_sampler", "sampler")]
    return found


class Done:
    """In place of keys: a batch of the plan that was yielded before the run that goes on here."""


class Plan:
    """Iterator over the batches of keys of one epoch.

    torch's own BatchSampler is taken apart, so that the state of the iterator over the sampler within can be had, and
    what is skipped is not put into batches first.

    Args:
        index_sampler: What torch's loader iterates over.
        iterator: Its iterator, which torch has made.
        progress: Where is counted what was read; samplers' states are left there.
    """

    def __init__(self, index_sampler: Any, iterator: Iterator[Any], progress: Progress) -> None:
        self._index_sampler = index_sampler
        self._takes_apart = type(index_sampler) is BatchSampler
        # Not a generator: a Ctrl-C that hits inside one ends it, and with it the epoch.
        self._iterator = iter(self._batch, None) if self._takes_apart else iterator
        self._inner: Any = None  # the iterator over the sampler within, from the first batch on
        self._progress = progress
        self._done = frozenset(progress.ahead)
        self._is_stateful: bool | None = None  # known when the iterator within is there
        progress.set_epochs = [_epoch(sampler) for sampler in samplers_within(index_sampler)]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        keys = next(self._iterator)
        progress = self._progress
        if progress.read in self._done:
            keys = Done
        progress.read += 1
        if self._is_stateful is None:
            self._is_stateful = any(is_stateful(thing) for thing in self._things().values())
        if self._is_stateful:
            ended = self._takes_apart and len(keys) < self._index_sampler.batch_size
            progress.sampler_states[progress.read] = {"ended": True} if ended else self.state()
        return keys

    def state(self) -> dict[str, Any] | None:
        """Return the states of samplers and their iterators after what was read so far; None if none has one."""
        states = {name: thing.state_dict() for name, thing in self._things().items() if is_stateful(thing)}
        return copy.deepcopy(states) or None

    def _things(self) -> dict[str, Any]:
        """Name what may have a state; what is its own iterator is named once."""
        if self._takes_apart:
            things = {"sampler": self._index_sampler.sampler, "iterator": self._inner}
        else:
            things = {"index_sampler": self._index_sampler, "index_iterator": self._iterator}
        first, second = things.items()
        return dict([first] if first[1] is second[1] else [first, second])

    def go_on(self, skip: int, states: dict[str, Any]) -> None:
        """Go on in the middle, before anything was read.

        Args:
            skip: Batches to leave out, where nothing has a state.
            states: Of iterators over samplers; those of samplers were loaded before they were iterated over. Where a
                short batch was the last, the sampler has begun anew: then there is just nothing left.
        """
        iterator: Any = self._iterator
        if "ended" in states:
            self._iterator = iter(())
            return
        if self._takes_apart:
            iterator = self._inner = iter(self._index_sampler.sampler)
            skip *= self._index_sampler.batch_size
        for name in ("iterator", "index_iterator"):
            if name in states and is_stateful(iterator):
                iterator.load_state_dict(states[name])
        if not states:
            deque(islice(iterator, skip), maxlen=0)

    def _batch(self) -> list[Any] | None:
        """Return the next batch as torch's BatchSampler makes it, of an iterator that is looked after; None at the end.

        After an exception of the sampler there is nothing more, as with torch.
        """
        batching = self._index_sampler
        try:
            if self._inner is None:
                self._inner = iter(batching.sampler)
            batch = [*islice(self._inner, batching.batch_size)]
        except Exception:
            self._inner = iter(())
            raise
        is_short = len(batch) < batching.batch_size
        return None if not batch or (is_short and batching.drop_last) else batch


def load_samplers(index_sampler: Any, states: dict[str, Any], epochs: Sequence[int | None]) -> None:
    """Load the states of samplers, before they are iterated over; set epochs as they had been set."""
    for sampler, epoch in zip(samplers_within(index_sampler), epochs, strict=False):
        if epoch is not None and _epoch(sampler) not in (None, epoch):
            sampler.set_epoch(epoch)
    outer: Any = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    for name in ("sampler", "index_sampler"):
        if name in states and is_stateful(outer):
            outer.load_state_dict(states[name])


def own_states(index_sampler: Any) -> dict[str, Any] | None:
    """Return the state of a sampler that is not being iterated over; None if it has none."""
    apart = type(index_sampler) is BatchSampler
    sampler = index_sampler.sampler if apart else index_sampler
    if not is_stateful(sampler):
        return None
    return {"sampler" if apart else "index_sampler": copy.deepcopy(sampler.state_dict())}


def _epoch(sampler: Any) -> int | None:
    epoch = probe(sampler, "epoch")
    return epoch if isinstance(epoch, int) and callable(probe(sampler, "set_epoch")) else None
