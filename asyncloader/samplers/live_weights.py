"""Weights that are changed while samples are drawn by them, and what they were and will be at other samples.

    post ──> waiting ── advance: its sample is drawn next ──> done: in force; what was there before is kept with it

A loader draws ahead: the state of a batch is asked for when later samples have been drawn already. So updates that came
into force since are undone for it, and updates that are still to come are part of it.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import AsyncLoaderError
from asyncloader.samplers.sums import CumulativeSums, SumTree

Moment = tuple[int, int]
"""The number of a pass over the order, and a position in it: the moment just before the sample there is drawn."""
_FOREVER: Moment = (1 << 62, 0)
_KEPT = 1 << 20


@dataclass(eq=False)
class Update:
    """Weights that change.

    Attributes:
        begin: The moment from which on the weights hold.
        indices: The samples.
        weights: A weight for each of them.
        can_wait: The weights may hold from a later moment on, if another thread has drawn samples there meanwhile.
        before: The weights before the update, once it is in force.
    """

    begin: Moment
    indices: NDArray[np.int64]
    weights: NDArray[np.float64]
    can_wait: bool = False
    before: NDArray[np.float64] | None = None


class LiveWeights:
    """Weights in force, and those that will be. Called from the thread that draws; `post` from any.

    The last updates are kept, with the weights before them: a million changed weights, or as many as there are samples.

    Args:
        initial: The weights before the first update.

    Attributes:
        sums: The sums of the weights in force.
        latest: The update that was posted last.
    """

    sums: CumulativeSums | SumTree
    latest: Update | None

    def __init__(self, initial: NDArray[np.float64]) -> None:
        self._initial = initial
        self.load(None)

    def post(self, update: Update) -> None:
        """Have weights change at a moment that is still to come."""
        self._waiting.append(update)
        self.latest = update

    def next_moment(self) -> Moment:
        """Return the next moment at which weights are to change."""
        return min((update.begin for update in self._waiting), default=_FOREVER)

    def advance(self, drawn: Moment, moment: Moment) -> None:
        """Bring all updates into force that hold at a moment.

        Args:
            drawn: The moment after the last sample that was drawn.
            moment: The moment of the next sample.

        Raises:
            AsyncLoaderError: if another thread has drawn samples that an update was for, before it was posted.
        """
        for update in self._due(drawn, moment):
            update.begin = begin = self._begin(update, drawn)
            if (drawn[0], 0) <= begin < drawn and update.before is None:
                raise AsyncLoaderError(
                    f"weights should have changed from sample {begin[1]} on, but samples up to {drawn[1]} were drawn "
                    "in another thread meanwhile: update the sampler in the thread that reads it"
                )
            self._apply(update)

    def at(self, moment: Moment, drawn: Moment) -> NDArray[np.float64]:
        """Return the weights at a moment, by the updates that were posted so far.

        Raises:
            AsyncLoaderError: if the moment is so long ago that its weights are not known any more.
        """
        if moment < self._forgotten:
            raise AsyncLoaderError(
                f"the weights of sample {moment[1]} are not known any more: more than {self._most_kept} were changed "
                "since. Let the loader read fewer batches ahead, or update fewer weights at once"
            )
        weights = self.sums.weights.copy()
        for update in reversed(self._done):
            if update.begin > moment:
                weights[update.indices] = update.before
        for update in self._due(drawn, moment):  # an update that a Ctrl-C has kept from coming into force is among them
            weights[update.indices] = update.weights
        return weights

    def sums_at(self, moment: Moment) -> CumulativeSums | SumTree:
        """Return the sums of the weights at a moment that was reached."""
        is_now = not self._done or self._done[-1].begin <= moment
        return self.sums if is_now else SumTree(self.at(moment, moment))

    def after_all(self) -> NDArray[np.float64]:
        """Return the weights after all updates that were posted so far."""
        return self.at(_FOREVER, _FOREVER)

    def state(self, moment: Moment, drawn: Moment) -> dict[str, Any] | None:
        """Return, as plain data, the weights that have changed up to a moment, and later updates; None without any.

        Args:
            moment: The moment that the state is of.
            drawn: The moment after the last sample that was drawn.
        """
        known = [*self._done, *(update for update in self._due(drawn, _FOREVER) if not self._is_done(update))]
        if not (known or self._has_past):
            return None
        later = [update for update in known if self._begin(update, drawn) > moment]
        in_force = None
        if self._has_past or len(later) < len(known):
            weights = self.at(moment, drawn)
            changed = np.flatnonzero(weights != self._initial)
            if 2 * len(changed) > len(weights):
                in_force = [None, _text(weights)]
            else:
                in_force = [_text(changed), _text(weights[changed])]
        waiting = [
            [begin[0] - moment[0], begin[1], _text(update.indices), _text(update.weights)]
            for update in later
            for begin in [self._begin(update, drawn)]
        ]
        return {"in_force": in_force, "waiting": waiting}

    def load(self, state: dict[str, Any] | None) -> None:
        """Take weights and updates from a state, or the initial weights. Passes are counted anew from here."""
        in_force = None if state is None else state["in_force"]
        if in_force is None:
            self.sums = CumulativeSums(self._initial)
        else:
            weights = self._initial.copy()
            weights[slice(None) if in_force[0] is None else _row(in_force[0], np.int64)] = _row(in_force[1], np.float64)
            self.sums = SumTree(weights)
        self._waiting = [
            Update((number, position), _row(indices, np.int64), _row(weights, np.float64))
            for number, position, indices, weights in (state["waiting"] if state is not None else ())
        ]
        self._done: deque[Update] = deque()
        self._most_kept = max(_KEPT, len(self._initial))
        self._kept = 0
        self._has_past = in_force is not None  # updates are in force that are not in `_done`
        self._forgotten: Moment = (0, 0)  # the moment of the last of these updates
        self.latest = None

    def _apply(self, update: Update) -> None:
        """Bring an update into force. After a Ctrl-C in between the update is still waiting, and comes here again."""
        if isinstance(self.sums, CumulativeSums):
            self.sums = SumTree(self.sums.weights)
        if update.before is None:
            update.before = self.sums.weights[update.indices]
        if not self._is_done(update):
            self._done.append(update)
            self._kept += len(update.indices)
        self.sums.set(update.indices, update.weights)
        self._waiting.remove(update)
        while self._kept > self._most_kept and len(self._done) > 1:
            forgotten = self._done.popleft()
            self._kept -= len(forgotten.indices)
            self._has_past, self._forgotten = True, forgotten.begin

    def _is_done(self, update: Update) -> bool:
        """Whether an update that is waiting is in force, or was being brought into force at a Ctrl-C."""
        return bool(self._done) and self._done[-1] is update

    def _begin(self, update: Update, drawn: Moment) -> Moment:
        """Return the moment from which on an update holds."""
        has_waited = update.can_wait and update.before is None and update.begin[0] == drawn[0]
        return max(update.begin, drawn) if has_waited else update.begin

    def _due(self, drawn: Moment, moment: Moment) -> list[Update]:
        """Return the waiting updates that hold at a moment, in the order in which they begin to."""
        waiting = [(self._begin(update, drawn), update) for update in tuple(self._waiting)]
        due = [each for each in waiting if each[0] <= moment]
        return [update for _, update in sorted(due, key=lambda each: each[0])]


def _text(row: NDArray[Any]) -> str:
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<")).tobytes()).decode()


def _row(text: str, kind: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)
