"""Source: where a feed's items come from, in their order, and the place in there.

    PlainSource     an iterable that gives its items at once: it is read as they are leased
    StreamSource    whatever may have to be waited for: a thread reads ahead, and tells when an item has come

Whoever calls holds the feed's lock. A state of one is good for the other, if both
sources have a state, or neither has.
"""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from asyncloader.datasets.stream_keys import Items, Place, Raised, Reading, StreamKeys, Told, is_stream
from asyncloader.errors import ConfigurationError
from asyncloader.plain import as_text, plain, unplain
from asyncloader.protocols import is_stateful

_MOST_ITEMS = 256
_MOST_BYTES = 64 << 20
WAITS: Any = object()
"""In place of an item that has not come yet."""
_END: Any = object()
_OF_C = frozenset(map(type, (iter([]), iter(()), iter(range(0)))))
"""Iterators that call nobody's code, so that no handler of a signal has to be let in: that takes 3 us."""


def source_of(source: Any, tell: Callable[[], object]) -> PlainSource | StreamSource:
    """Return what reads a source.

    Args:
        source: An iterable, an async iterable, or a function that returns one.
        tell: Is called when an item has come that was not there, in a thread of the source's own.

    Raises:
        ConfigurationError: if it is none of these.
    """
    if not (is_stream(source) or callable(source)):
        raise ConfigurationError(
            f"source should be an iterable of items, an async one, or a function that returns one, but is {source!r}"
        )
    is_plain = hasattr(type(source), "__iter__") and not isinstance(source, IterableDataset)
    return PlainSource(source) if is_plain else StreamSource(source, tell)


class PlainSource:
    """A source whose items are there.

    Args:
        source: An iterable.

    Attributes:
        drawn: How many items were drawn.
        waits: Never.
    """

    waits = False

    def __init__(self, source: Any) -> None:
        self.drawn = 0
        self._source = source
        self._items: Iterator[Any] | None = None

    def draw(self, call: Callable[..., Any]) -> Any:
        """Return the next item.

        Args:
            call: Calls the source's code.

        Raises:
            StopIteration: if there is none.
        """
        if self._items is None:
            self._items = call(iter, self._source)
        items = self._items
        if (item := next(items, _END) if type(items) in _OF_C else call(next, items, _END)) is _END:
            raise StopIteration
        self.drawn += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and the state of the source if it has one."""
        states = {"stream": self._source.state_dict()} if is_stateful(self._source) else {}
        return {"drawn": self.drawn, "given": self.drawn if states else 0, "states": plain(states)}

    def load_state_dict(self, state: dict[str, Any], call: Callable[..., Any]) -> None:
        """Go on from a place.

        Args:
            state: The place.
            call: Calls the source's code.

        Raises:
            ConfigurationError: if the source is a generator that was read.
        """
        states, given = unplain(state["states"]), state["given"]
        if states.keys() == {"stream"} and is_stateful(self._source):
            call(self._source.load_state_dict, states["stream"])
        elif self._items is not None and hasattr(type(self._source), "__next__"):
            raise read_before()
        else:
            given = 0
        items = call(iter, self._source)
        self._items, self.drawn = itertools.islice(items, state["drawn"] - given, None), state["drawn"]

    def close(self) -> None:
        """Draw no more."""


class StreamSource:
    """A source whose items may have to be waited for.

    Args:
        source: An iterable, an async iterable, or a function that returns one.
        tell: Is called when an item has come that was not there.

    Attributes:
        drawn: How many items were drawn.
        waits: The next one was not there; until `tell` is called.
    """

    def __init__(self, source: Any, tell: Callable[[], object]) -> None:
        self.drawn = 0
        self.waits = False
        self._source = source
        self._tell = tell
        self._items: Any = None
        self._begin(Place())

    def _begin(self, place: Place) -> None:
        before = (weakref.ref(self._items),) if self._items is not None and is_stream(self._source) else ()
        reading = Reading(self._source, 0, (0, 0), place, 0, 1, _MOST_ITEMS, _MOST_BYTES, before=before)
        items = self._items = Items(reading)
        self._keys: StreamKeys | None = StreamKeys(lambda: items, _nothing)

    def draw(self, call: Callable[..., Any]) -> Any:
        """Return the next item, or `WAITS`.

        Args:
            call: Not needed: the source's code runs in a thread.

        Raises:
            StopIteration: if there is none.
        """
        assert self._keys is not None
        self.waits = not self._keys.arrived(1, self._tell)
        if self.waits:
            return WAITS
        number, item = next(self._keys)
        if type(item) is Raised:
            raise item.error
        self.drawn = number + 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and the last states of the source before it, if it has some."""
        told = self._items.place(self.drawn - self._items.reading.place.number).told or Told(0, pickle.dumps({}))
        return {"drawn": self.drawn, "given": told.given, "states": as_text(pickle.loads(told.pickled))}

    def load_state_dict(self, state: dict[str, Any], call: Callable[..., Any]) -> None:
        """Go on from a place.

        Args:
            state: The place.
            call: Not needed.

        Raises:
            ConfigurationError: if the source is a generator that was read.
        """
        if self._items.is_read and isinstance(self._source, (Generator, AsyncGenerator)):
            raise read_before()
        self.drawn, self.waits = state["drawn"], False
        told = Told(state["given"], pickle.dumps(unplain(state["states"]))) if state["given"] else None
        self._begin(Place(self.drawn, told=told))

    def close(self) -> None:
        """Draw no more: the thread ends."""
        self._keys = None


def read_before() -> ConfigurationError:
    """Say that a generator cannot be read again."""
    return ConfigurationError("the source is an iterator that was read: give the feed a function that returns one")


def _nothing(items: Items) -> None:
    """Nobody asks when reading begins."""
