"""The memory of a loader that outlasts its runs over the data."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from asyncloader.engine.slices import Slicer
from asyncloader.observe.meter import Meter
from asyncloader.observe.trace import Trace, active_trace, shared_trace
from asyncloader.observe.traffic import Traffic
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer, division, initial_state, is_between_runs
from asyncloader.run.exclusions import Exclusions
from asyncloader.run.plan import left_after, since_preload
from asyncloader.run.set_epochs import SetEpochs

_HOW_FAR = ("position", "samplers", "drawn", "is_over", "set_epochs")
"""What of a state says how much of its epoch is left."""
_REMEMBERED = 8
"""Runs whose batches can be made again by their numbers: their generators are some 10 kB each."""
_numbers = count()
"""Of loaders that take as many steps as those of other ranks."""


class Runs:
    """The runs of one loader. Its iterators write; nobody here holds an iterator, or the loader.

    Args:
        is_in_step: The loader takes as many steps as those of other ranks. By its number ranks know whether they speak
            of the same loader, if all of them make their loaders in the same order.

    Attributes:
        begun: How many there were, which is the epoch of the next one.
        latest: Makes states of the newest one.
        past: Makes states of the last ones of the same history: of those before a state was loaded there are none.
        meter: Counts what happens in the newest one.
        loaded: A state that the next one begins from.
        exclusions: Samples that are left out, beside those of a loaded state.
        set_epochs: What samplers and the dataset were told by `set_epoch`.
        slicer: Knows what samples cost, where batches are made in slices.
        traffic: Counts what comes from other machines.
        num_on_nodes: Workers that there are to be on other machines, where their number looks after itself.
        resumed: How far the state was that the newest one has begun from, or None.
        warned: The warnings that were logged about states, once each.
    """

    def __init__(self, *, is_in_step: bool = False) -> None:
        self.begun = 0
        self.latest: Checkpointer | None = None
        self.past: deque[Checkpointer] = deque(maxlen=_REMEMBERED)
        self.meter: Meter | None = None
        self.loaded: dict[str, Any] | None = None
        self.exclusions = Exclusions()
        self.resumed: dict[str, Any] | None = None
        self._left: tuple[dict[str, Any], int | None] | None = None  # after a state, on this rank
        self.set_epochs = SetEpochs()
        self.warned: set[str] = set()
        self.slicer = Slicer()
        self.traffic = Traffic()
        self.num_on_nodes = 0
        self._trace: Trace | None = None
        self._number = next(_numbers) if is_in_step else None

    def __getstate__(self) -> dict[str, Any]:
        forgotten = dict.fromkeys(("latest", "_left", "meter", "_trace", "_number"))
        anew = {"past": deque(maxlen=_REMEMBERED), "slicer": Slicer(), "traffic": Traffic()}
        return {**vars(self), **forgotten, **anew, "set_epochs": copy.copy(self.set_epochs)}

    def state_dict(self, options: Callable[[], Options]) -> dict[str, Any]:
        """Return a state to go on from: in the middle of the newest run, or before the next one.

        Args:
            options: Makes what a first run would be made with; that takes as long as all the rest.
        """
        if (state := self.begins_from) is not None:
            return {**state, "samplers": since_preload(options().index_sampler, state["samplers"])}
        if self.latest is None:
            return initial_state(options(), self.begun, self.exclusions.state())
        return self.latest.state_dict()

    @property
    def begins_from(self) -> dict[str, Any] | None:
        """The state that the next run begins from, or None."""
        if self.loaded is None:
            return None
        return {**copy.deepcopy(self.loaded), "excluded": self._excluded(self.loaded).state()}

    @property
    def done(self) -> int:
        """How many batches of the newest run are done with, or of the one that a loaded state goes on with."""
        if self.loaded is not None:
            return int(self.loaded["position"]) + len(self.loaded["ahead"])
        if self.latest is None or self.latest.progress.finished:
            return 0
        now = self.latest.progress.now
        return now.position + len(now.ahead)

    @property
    def _has_begun(self) -> bool:
        """Whether a run is going on, or a loaded state is of the middle of one, if no batch of it is done with."""
        if self.loaded is not None:
            return not is_between_runs(self.loaded)
        return self.latest is not None and not self.latest.progress.finished

    def begin(self, checkpointer: Checkpointer, state: dict[str, Any] | None) -> None:
        """Note a run that begins, anew or from a state."""
        self.begun, self.latest = checkpointer.epoch + 1, checkpointer
        self.resumed = None
        if state is not None:
            self.past.clear()
        if not checkpointer.options.is_iterable:
            self.past.append(checkpointer)
        if state is not None and not is_between_runs(state):
            self.resumed = {name: state[name] for name in _HOW_FAR}

    def remaining(self, length: int, index_sampler: Any) -> int:
        """Return how many batches are left of the run that is spoken of, which has so many if it is a whole one.

        Where the samples are divided anew at each resume, batches before it were of another size, perhaps, and the
        epoch that is set now is another one: then what is left is counted from there.
        """
        done, began = self.done, self.loaded or self.resumed
        if began is not None and began["position"] <= done and (done or self._has_begun):
            if self._left is None or self._left[0] is not began:
                self._left = began, left_after(index_sampler, began)
            if (left := self._left[1]) is not None:
                return max(0, left + int(began["position"]) - done)
        return max(0, length - done)

    def load(self, state: dict[str, Any], options: Options) -> None:
        """Have the next run begin from a state that fits; an empty one for the very first."""
        self.loaded = copy.deepcopy(state) or None
        self.set_epochs.note_load(options)
        self.latest = self.resumed = None
        self.past.clear()
        self.begun = 0
        if not state:
            self.exclusions = Exclusions()

    def exclude(self, keys: Iterable[Any]) -> None:
        """Leave samples out of all batches that are yet to be read."""
        if self.loaded is not None:
            self.exclusions.add(keys, self.loaded["epoch"], self.loaded["position"])
        elif self._has_begun and self.latest is not None:
            with self.latest.progress.lock:
                self.exclusions.add(keys, self.latest.epoch, self.latest.progress.read)
        else:
            self.exclusions.add(keys, self.begun, 0)

    def _excluded(self, state: dict[str, Any], options: Options | None = None) -> Exclusions:
        """Return what a run goes on without that begins from a state: what that says, and what the loader was told."""
        found, here = Exclusions(state["excluded"]), (state["epoch"], state["position"])
        if options is not None and found and state["fits"]["division"] != division(options):
            found.hold_from(*here)
        found.add_those_of(self.exclusions, *here)
        return found

    def begin_from(self, state: dict[str, Any], options: Options) -> None:
        """Note what samplers and the dataset were told that a run begins with, and which samples it goes on without."""
        self.set_epochs.note_state(state, options)
        self.exclusions = self._excluded(state, options)

    def number_is_set(self) -> None:
        """Note that the number of workers looks after itself no longer: states do not say what it has come to."""
        if self.latest is not None:
            self.latest.num_workers = None

    def enrol(self) -> int:
        """Return the number of this loader among those in step; it gets one here if it was set to be in step later."""
        if self._number is None:
            self._number = next(_numbers)
        return self._number

    def open_trace(self, options: Options) -> tuple[Trace | None, int]:
        """Return where the timeline of a run is written, and the number of this loader in there.

        All runs share one file, with other loaders that name it.
        """
        if options.trace is None:
            trace = active_trace()
            return trace, 0 if trace is None else trace.number_of(self)
        if self._trace is None or self._trace.path != Path(options.trace):
            self._trace = shared_trace(options.trace, self)
            weakref.finalize(self, self._trace.write, wait=False)
        return self._trace, self._trace.number_of(self)
