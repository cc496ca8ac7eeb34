"""The memory of a loader that outlasts its runs over the data, and which of them its methods speak of.

    for batch in loader:                    run 0
        if step == 6:
            picture(next(iter(loader)))     run 1 begins and is dropped after a batch: it was a look beside run 0
    loader.state_dict()                     run 0 was used last: the methods speak of it

A run that was dropped after one batch at most was a look, and the methods speak of the run beside it, if that has
outlived it. Nothing is noted for this when a batch is given: figures have the time at which it was taken.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from asyncloader.engine.progress import SamplerState
from asyncloader.observe.meter import Meter
from asyncloader.observe.trace import Trace, shared_trace
from asyncloader.observe.verdict import facts_of
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer, initial_state, nobody, warn_once
from asyncloader.run.plan import keeps_place, order_generators, since_preload
from asyncloader.run.rng_snapshot import Mark, RNGSnapshot
from asyncloader.run.set_epochs import SetEpochs
from asyncloader.run.state import LoaderState
from asyncloader.seeding.own_generators import GeneratorKeys, seeded_generators_of

_REMEMBERED = 8
"""Runs whose batches can be made again by their numbers: their generators are some 10 kB each."""
_SHARED = (
    "The sampler provides its own state, and two iterators of the loader have read it in turns: it has one place for "
    "both, so a state of the loader may go on with other samples than the iterator does. To look at a batch inside a "
    "loop, use another loader with a sampler of its own."
)
_MOST_DROPPED = 64
"""References to iterators that are gone."""
_IN_DOUBT = (
    "The loader's state was asked for while two of its iterators were in use. It is that of the one that has given %d "
    "batches, not of the other, which has given %d. If the other one is meant, call state_dict() of that iterator. If "
    "an iterator is no longer needed, delete it, or close() it."
)
_USED_UP = (
    "The state that was loaded is used up: an iterator has begun at it, and was dropped before its end, after %d "
    "batches. The iterator that begins now begins an epoch anew. If that was a look at a batch before training, load "
    "the state again after the look."
)

_RESTARTED = (
    "iter(loader) was called while another iterator was in use, which had given %d batches and was not at its end. "
    "With persistent_workers=True both are one: a loop that is still going on goes on in the new run, from its "
    "beginning. To look at a batch inside a loop, use another loader, or loader.batch(epoch, number)."
)


class Runs:
    """The runs of one loader. Its iterators write; nobody here holds an iterator, or the loader.

    Used in the threads of consumers; iterators may be dropped in any thread.

    Attributes:
        begun: How many there were, which is the epoch of the next one.
        past: Makes states of the last ones of the same history: of those before a state was loaded there are none.
        records: The newest run, and before it those whose iterators were alive when it began.
        loaded: A state that the next one begins from.
        set_epochs: What samplers and the dataset were told by `set_epoch`.
        warned: The warnings that were logged about states, once each.
        generator_keys: The keys of generators that the dataset holds.
    """

    def __init__(self) -> None:
        self.begun: int = 0
        self.warned: set[str] = set()
        self.records: tuple[Checkpointer, ...] = ()
        # References to iterators that were dropped, in this order. Each is put here without a function of ours: what
        # the handler of a signal raises in one, while an object goes, is lost.
        self._dropped: deque[Any] = deque(maxlen=_MOST_DROPPED)
        self.past: deque[Checkpointer] = deque(maxlen=_REMEMBERED)
        self._meter: Meter | None = None
        self.loaded: LoaderState | None = None
        self._marks: list[Mark | None] = []  # of the generators when a state was loaded
        self.set_epochs: SetEpochs = SetEpochs()
        self.generator_keys: GeneratorKeys = GeneratorKeys({}, {})
        self._trace: Trace | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("begun", "warned", "loaded", "_marks", "generator_keys")
        copied = {name: getattr(self, name) for name in kept}
        return {**vars(Runs()), **copied, "set_epochs": copy.copy(self.set_epochs)}

    def state(self, options: Callable[[], Options]) -> LoaderState:
        """Return a state to go on from: in the middle of the newest run, or before the next one.

        Args:
            options: Makes what a first run would be made with; that takes as long as all the rest.
        """
        if self.loaded is not None:
            state = copy.deepcopy(self.loaded)
            there = options()
            samplers = since_preload(there.index_sampler, state.samplers)
            if state.is_between_runs:  # another loader has begun since, perhaps
                rng, news = order_generators(there), self.set_epochs.since_load(there)
                state = replace(state, at_iter=rng.as_text(self.at_iter(state, rng)))
            else:  # the same epoch is no news to a state in its middle
                news = self.set_epochs.of_another(state, there)
            return replace(
                state, samplers=samplers, next_epochs=[*news] if any(each is not None for each in news) else []
            )
        run = self.run(of_state=True)
        if run is None:
            there = options()
            keys = self.generator_keys.following(self.generators(there), self.begun)
            return initial_state(there, self.begun, keys)
        return self.state_of(run)

    def state_of(self, run: Checkpointer) -> LoaderState:
        """Return a state of a run, with how many runs there were.

        Something else may have begun a run beside this one, for a look: later epochs come after that one, too.
        """
        newest = self.past[-1] if self.past else run
        has_others = newest is not run or self._is_sampler_shared
        if has_others and keeps_place(run.options.index_sampler):
            state = run.state(newest)
            if self._is_sampler_shared or not state.finished:
                warn_once(self.warned, _SHARED)
        else:
            state = run.state()
        return replace(state, epoch=self.begun) if state.finished else replace(state, begun=self.begun)

    @property
    def _is_sampler_shared(self) -> bool:
        """Whether two runs have read the sampler in turns."""
        pairs = ((run.progress.asked_alone, run.progress.asked) for run in self.past)
        return any(alone is not None and asked > alone for alone, asked in pairs)

    def samplers_now(self) -> SamplerState:
        """Return where samplers are before a run that begins; without a state where they say it themselves."""
        return SamplerState(None) if not self.past or self._is_sampler_shared else self.past[-1].samplers_after()

    @property
    def meter(self) -> Meter | None:
        """Counts what happens in the run that is spoken of; that of the last one, if a state was loaded since."""
        run = self.run()
        return self._meter if run is None else run.meter

    @property
    def iterator(self) -> Any:
        """The iterator over the run that is spoken of; None if that is gone, or there is no run."""
        return None if (run := self.run()) is None else run.iterator()

    def begin(self, checkpointer: Checkpointer, state: LoaderState | None, iterator: Any) -> None:
        """Note a run that begins, anew or from a state, with its iterator; None if nobody will be given that.

        With persistent workers the iterator had another run before, which is over.
        """
        last, others = self.run(), [each for each in self.records if each.is_alive and each.iterator() is not iterator]
        is_left = last is not None and last.iterator is not nobody and last not in others
        if last is not None and is_left and last.is_resumed and not last.progress.end_is_known:
            warn_once(self.warned, _USED_UP, last.given)
        self.records = (*others, checkpointer)
        if iterator is not None:
            checkpointer.iterator = weakref.ref(iterator, self._dropped.append)
        if state is not None:
            self.past.clear()
        self.begun = max(checkpointer.common.epoch + 1, 0 if state is None else state.begun)
        if not checkpointer.options.is_iterable:
            for run in self.past:
                if run.progress.asked_alone is None:
                    run.progress.asked_alone = run.progress.asked
            self.past.append(checkpointer)

    def run(self, *, of_state: bool = False) -> Checkpointer | None:
        """Return the current run; None before the first one.

        Args:
            of_state: A state is to be made of it. If there is doubt, a warning says which run that is.
        """
        if not self.records:
            return None
        *others, last = sorted(self.records, key=attrgetter("used_at"))
        rivals = [each for each in others if each.is_alive or (not last.is_alive and self._has_outlived(each, last))]
        if not rivals or (last is self.records[-1] and last.is_alive):
            return last
        meant, other = (rivals[-1], last) if last.was_a_look else (last, rivals[-1])
        if of_state:
            warn_once(self.warned, _IN_DOUBT, meant.given, other.given)
        return meant

    def warn_of_restart(self) -> None:
        """Warn if the run whose workers are to begin another one has given batches, and has more."""
        last = self.run()
        if last is not None and last.given and not last.progress.end_is_known and last.iterator() is not None:
            warn_once(self.warned, _RESTARTED, last.given)

    def _has_outlived(self, run: Checkpointer, other: Checkpointer) -> bool:
        """Whether the iterator of a run was dropped after that of another one, or may have come to its end after it."""
        dropped = list(self._dropped)
        if run.iterator not in dropped or other.iterator not in dropped:  # closed, or at its end, some time ago
            return True
        return dropped.index(run.iterator) > dropped.index(other.iterator)

    def load(self, state: LoaderState | None, options: Options) -> None:
        """Have the next run begin from a state that fits; None for the very first.

        What is set from now on, by the trainer, counts in the state's place.
        """
        self.loaded = state
        self.set_epochs.note_load(options, state)
        self._marks = _marks(order_generators(options), state) if state else []
        self.generator_keys = (
            GeneratorKeys(self.generators(options), state.generator_keys) if state else GeneratorKeys({}, {})
        )
        for each in self.records:
            if (iterator := each.iterator()) is not None:
                iterator.leave()
        self.records = ()
        self.past.clear()
        self.begun = 0

    def at_iter(self, state: LoaderState, rng: RNGSnapshot) -> list[Any]:
        """Return where the generators are when the samplers are iterated over in a run that begins from a state.

        Where an epoch begins, generators stay that the trainer has set.
        """
        at_iter = rng.from_text(state.at_iter)
        if not state.is_between_runs:
            return at_iter
        pairs = zip(rng.capture(), at_iter, self.set_by_trainer(rng), strict=False)
        return [trainers if is_set else saved for trainers, saved, is_set in pairs]

    def set_by_trainer(self, rng: RNGSnapshot) -> list[bool]:
        """Return which generators an epoch that begins after a loaded state leaves as they are.

        The trainer has seeded or set them since the load, or another loader that has begun from its own state: this one
        draws after that one, as in the run before. Or the load found them where the state has them, so whatever the
        trainer draws after it is what it draws after the state: it had restored them, or has gone on in this process.
        """
        return rng.set_since(self._marks) if self._marks else [False] * len(rng)

    def generators(self, options: Options) -> dict[str, Any]:
        """Return the generators that the dataset holds and the loader seeds, by their paths."""
        return seeded_generators_of(options.dataset, options.collate_fn) if options.seeds_generators else {}

    def make_meter(self, num_workers: int, window: int, *, keys_arrive: bool) -> Meter:
        """Return what counts what happens in the run that has just begun; remember it.

        Args:
            num_workers: Workers that it begins with.
            window: Batches in flight or waiting at a time.
            keys_arrive: Keys of samples become known as time goes by: they come from a stream, or a feed.
        """
        run = self.records[-1]
        options = run.options
        self._meter = run.meter = Meter(
            run.common.epoch,
            num_workers,
            window,
            trace=self._open_trace(options),
            options=facts_of(options, keys_arrive=keys_arrive),
        )
        return self._meter

    def _open_trace(self, options: Options) -> Trace | None:
        """Return where the timeline of a run is written. All runs share one file, with other loaders that name it."""
        if options.trace is not None and (self._trace is None or self._trace.path != Path(options.trace)):
            self._trace = shared_trace(options.trace, self)
            weakref.finalize(self, self._trace.write, wait=False)
        return None if options.trace is None else self._trace


def _marks(rng: RNGSnapshot, state: LoaderState) -> list[Mark | None]:
    """Return the marks of the generators when a state is loaded; None for those that are where the state has them."""
    if state.is_between_runs:
        is_other = rng.differ(rng.capture(), rng.from_text(state.at_iter))
    else:
        checks = zip(rng.is_global, rng.check(), state.check, strict=False)
        is_other = [here != there or not is_global for is_global, here, there in checks]
    return rng.marks(is_other)
