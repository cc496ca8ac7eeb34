"""Source: where a feed's items come from, in their order, and the place in there.

A thread reads the source ahead, and tells when an item has come that was not there. So none of the source's code runs
with the feed's lock held. Whoever calls holds that lock.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncloader.datasets.stream_keys import Items, Place, StreamKeys, is_stream
from asyncloader.errors import ConfigurationError
from asyncloader.online.ledger import WAITS
from asyncloader.plain import as_text, unplain
from asyncloader.protocols import is_stateful

_MOST_ITEMS = 256
_MOST_BYTES = 64 << 20


class Source:
    """A source of items.

    Args:
        source: An iterable, an async iterable, or a function that returns one.
        tell: Is called when an item has come that was not there, in the thread that reads.
        is_kept: Whether somebody may take at the end of the program who has not begun yet.

    Raises:
        ConfigurationError: if it is none of these.

    Attributes:
        drawn: How many items were drawn.
        waits: The next one was not there; until `tell` is called.
    """

    def __init__(self, source: Any, tell: Callable[[], object], is_kept: Callable[[], bool] = bool) -> None:
        if not (is_stream(source) or callable(source)):
            raise ConfigurationError(
                "source should be an iterable of items, an async one, or a function that returns one, but is "
                f"{source!r}"
            )
        self.drawn: int = 0
        self.waits: bool = False
        self._source = source
        self._tell, self._is_kept = tell, is_kept
        self._readings: list[Items] = []  # of the source, that may go on
        self._begin(Place(states=pickle.dumps({"stream": source.state_dict()}) if is_stateful(source) else b""))

    def _begin(self, place: Place) -> None:
        items = self._items = Items(max_items=_MOST_ITEMS, max_bytes=_MOST_BYTES)
        items.is_kept = self._is_kept
        items.go_to(place)
        self._keys: StreamKeys | None = StreamKeys(items, partial(items.start, self._source, self._readings))

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
        self.drawn = number + 1
        return item

    def place(self) -> Place:
        """Return the place of the item that is drawn next: for `written`."""
        return self._items.place(self.drawn - self._items.begin.number)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place.

        Args:
            state: What `written` has returned.

        Raises:
            ConfigurationError: if the source is an iterator that was read, and cannot go back.
        """
        states = unplain(state["states"])
        kind = type(self._source)
        if self._readings and not states and (hasattr(kind, "__next__") or hasattr(kind, "__anext__")):
            raise ConfigurationError(
                "the source is an iterator that was read: give the feed a function that returns one"
            )
        self.drawn, self.waits = state["drawn"], False
        self._begin(Place(self.drawn, state["given"], pickle.dumps(states) if states else b""))

    def close(self) -> None:
        """Draw no more: the thread ends."""
        self._keys = None


def written(place: Place) -> dict[str, Any]:
    """Write a place down, without the feed's lock: the states are the user's."""
    states = as_text(pickle.loads(place.states)) if place.states else as_text({})
    return {"drawn": place.number, "given": place.given, "states": states}
