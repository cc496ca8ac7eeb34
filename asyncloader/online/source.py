"""Source: where a feed's items come from, in their order, and the place in there.

A thread reads the source ahead, and tells when an item has come that was not there. So none of the source's code runs
with the feed's lock held. Whoever calls holds that lock.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any

from asyncloader.datasets.stream_keys import Items, Place, Raised, Reading, StreamKeys, Told, is_stream
from asyncloader.errors import ConfigurationError
from asyncloader.plain import as_text, unplain
from asyncloader.protocols import is_stateful

_MOST_ITEMS = 256
_MOST_BYTES = 64 << 20
WAITS: Any = object()
"""In place of an item that has not come yet."""


class Source:
    """A source of items.

    Args:
        source: An iterable, an async iterable, or a function that returns one.
        tell: Is called when an item has come that was not there, in the thread that reads.

    Raises:
        ConfigurationError: if it is none of these.

    Attributes:
        drawn: How many items were drawn.
        waits: The next one was not there; until `tell` is called.
    """

    def __init__(self, source: Any, tell: Callable[[], object]) -> None:
        if not (is_stream(source) or callable(source)):
            raise ConfigurationError(
                "source should be an iterable of items, an async one, or a function that returns one, but is "
                f"{source!r}"
            )
        self.drawn = 0
        self.waits = False
        self._source = source
        self._tell = tell
        self._items: Any = None
        is_known = is_stateful(source)
        self._begin(Place(told=Told(0, pickle.dumps({"stream": source.state_dict()})) if is_known else None))

    def _begin(self, place: Place) -> None:
        before = (weakref.ref(self._items),) if self._items is not None and is_stream(self._source) else ()
        reading = Reading(self._source, 0, (0, 0), place, 0, 1, _MOST_ITEMS, _MOST_BYTES, before=before)
        items = self._items = Items(reading)
        self._keys: StreamKeys | None = StreamKeys(lambda: items, _nothing)

    def draw(self) -> Any:
        """Return the next item, or `WAITS`.

        Raises:
            StopIteration: if there is none.
            Exception: of the source.
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

    def place(self) -> tuple[int, Told]:
        """Return how many items were drawn, and the last states of the source before, if it has some: for `written`."""
        told = self._items.place(self.drawn - self._items.reading.place.number).told
        return self.drawn, told or Told(0, pickle.dumps({}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place.

        Args:
            state: What `written` has returned.

        Raises:
            ConfigurationError: if the source is an iterator that was read, and cannot go back.
        """
        states = unplain(state["states"])
        kind = type(self._source)
        if self._items.is_read and not states and (hasattr(kind, "__next__") or hasattr(kind, "__anext__")):
            raise ConfigurationError(
                "the source is an iterator that was read: give the feed a function that returns one"
            )
        self.drawn, self.waits = state["drawn"], False
        told = Told(state["given"], pickle.dumps(states)) if states else None
        self._begin(Place(self.drawn, told=told))

    def close(self) -> None:
        """Draw no more: the thread ends."""
        self._keys = None


def written(drawn: int, told: Told) -> dict[str, Any]:
    """Write a place down, without the feed's lock: the states are the user's."""
    return {"drawn": drawn, "given": told.given, "states": as_text(pickle.loads(told.pickled))}


def _nothing(items: Items) -> None:
    """Nobody asks when reading begins."""
