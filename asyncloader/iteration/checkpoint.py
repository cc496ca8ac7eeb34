"""The state of a loader: what is in it, what it has to fit, and how a run begins from one.

    {"version": 1, "kind": "map" or "iterable",
     "epoch": runs of the loader before this one, "position": batches of it that are done with, "ahead": [more of them],
     "base_seed": of this run, or None if the next one draws its own,
     "draws": what the random generators were when the order began to be drawn (JSON), "check": what they are now,
     "inline": whether the base seed was drawn after that, "shared_seed": of data pipes,
     "set_epochs": what `set_epoch` of samplers had been called with, "samplers": their states,
     "workers": where each worker is in a dataset that it has a place in, "next_worker": whose turn it is,
     "fits": what of the loader must be the same}

Plain data, and a fresh dictionary at each call: strings, numbers, lists of them. States of the user's objects are in it
as JSON text if that says all there is, else as they are; so the keys of two states are the same whatever was saved,
which torch.distributed.checkpoint needs.

Two kinds of states: one in the middle of a run, which goes on with that run, and one between two runs (before the
first, or after the end of one), where ``base_seed`` is None unless persistent workers keep theirs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from asyncloader.errors import StateMismatchError
from asyncloader.iteration.plan import Plan, load_samplers, own_states, samplers_within
from asyncloader.iteration.progress import Progress
from asyncloader.iteration.rng_snapshot import Draws
from asyncloader.protocols import probe
from asyncloader.samplers import ElasticSampler
from asyncloader.workers.protocol.snapshot import Start, as_plain, from_plain, is_stateful, plain, unplain

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader

log = logging.getLogger("asyncloader")

VERSION = 1


# ------------------------------------------------------------------------------------------------------ what must fit


@dataclass(frozen=True)
class Fits:
    """Describes what of a loader must be the same for its states to mean the same batches.

    Holds the parts of the loader, not the loader: its iterator, which is told by this, must not keep it alive.
    """

    dataset: Any
    sampler: Any
    index_sampler: Any
    batch_size: int | None
    drop_last: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Fits:
        """Look at a loader as it is now."""
        return cls(loader.dataset, loader.sampler, loader._index_sampler, loader.batch_size, loader.drop_last)

    def describe(self) -> dict[str, Any]:
        """Return what must be the same, as plain data."""
        samplers = samplers_within(self.index_sampler)
        is_elastic = any(isinstance(sampler, ElasticSampler) for sampler in samplers)
        is_iterable = isinstance(self.dataset, IterableDataset)
        divided = next((sampler for sampler in samplers if _is_divided(sampler)), None)
        return {
            "dataset_length": None if is_iterable else _length(self.dataset),
            "batch_size": None if is_elastic else self.batch_size,
            "drop_last": self.drop_last,
            "sampler": "(".join(type(sampler).__name__ for sampler in samplers) + ")" * (len(samplers) - 1),
            "samples": None if is_elastic or is_iterable else _length(self.sampler),
            "num_replicas": None if is_elastic or divided is None else divided.num_replicas,
            "rank": None if is_elastic or divided is None else divided.rank,
        }


def _is_divided(sampler: Any) -> bool:
    return isinstance(probe(sampler, "num_replicas"), int) and isinstance(probe(sampler, "rank"), int)


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def check(state: dict[str, Any], loader: DataLoader[Any]) -> None:
    """See whether a state fits a loader.

    Raises:
        StateMismatchError: if it does not; it says what differs.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        version = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise StateMismatchError("version", version, VERSION, "It is not a state of this version of asyncloader.")
    kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map"
    _same("kind", state["kind"], kind)
    for name, now in Fits.of(loader).describe().items():
        _same(name, state["fits"].get(name), now)
    if state["workers"] is not None:
        advice = "A dataset with a state of its own in each worker can only go on with as many workers."
        _same("num_workers", len(from_plain(state["workers"])), max(1, loader.num_workers), advice)


def _same(name: str, saved: Any, now: Any, advice: str = "") -> None:
    if saved != now:
        raise StateMismatchError(name, saved, now, advice)


# ------------------------------------------------------------------------------------------------------------- record


@dataclass
class Record:
    """What is known of one run, to make states of. Held by the iterator and by its loader.

    Attributes:
        progress: How far it is.
        draws: The generators that its order is drawn from.
        begun: What they were when the order began to be drawn.
        epoch: Runs of the loader before this one.
        base_seed: Of this run.
        shared_seed: Of data pipes.
        inline: The base seed was drawn between `begun` and the first batch.
        keeps_seed: The next run has the same base seed: persistent workers.
        kind: "map" or "iterable".
        fits: Describes the loader.
        starts: Where workers begin, for datasets that they have a place in. The session changes those of workers that
            it replaces.
    """

    progress: Progress
    draws: Draws
    begun: list[Any]
    epoch: int
    base_seed: int
    shared_seed: int | None
    inline: bool
    keeps_seed: bool
    kind: str
    fits: Fits
    starts: dict[int, Start] | None
    _begun_text: str = ""
    _described: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of what was yielded so far."""
        progress = self.progress
        self._described = self._described or self.fits.describe()
        if progress.finished:
            return _state(
                self.kind,
                self.epoch + 1,
                self._described,
                self.draws.as_text(self.draws.capture()),
                base_seed=self.base_seed if self.keeps_seed else None,
                shared_seed=self.shared_seed if self.keeps_seed else None,
            )
        self._begun_text = self._begun_text or self.draws.as_text(self.begun)
        position = progress.position
        return _state(
            self.kind,
            self.epoch,
            self._described,
            self._begun_text,
            position=position,
            ahead=sorted(progress.ahead),
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            inline=self.inline,
            check=self.draws.check() if position else [],
            set_epochs=list(progress.set_epochs),
            samplers=plain(progress.sampler_states.get(position)),
            workers=None if progress.workers is None else as_plain(progress.workers),
            next_worker=progress.next_worker,
        )


class Beginning:
    """How a run begins: anew, or from a state. Constructors of iterators go through it from top to bottom.

    Each random generator ends up where it was in the run that goes on. If the trainer had set it to that by itself (the
    state's ``check`` tells), it is left alone: so what was drawn from it beside the loader is accounted for. Else it is
    left where drawing the order anew takes it: right as long as nothing else draws from it.

    Args:
        loader: What is iterated over.
        state: To begin from, or None.
        inline: Nothing is read of the sampler before the first batch, and the base seed is drawn before that.
    """

    def __init__(self, loader: DataLoader[Any], state: dict[str, Any] | None, *, inline: bool = False) -> None:
        self.state = state
        self.goes_on = state is not None and state["base_seed"] is not None
        self._loader = loader
        self._draws = Draws(loader.generator, samplers_within(loader._index_sampler))
        self._inline = inline
        self._begun = self._draws.capture()
        self._before = self._begun
        self._left_alone: list[bool] = []
        if state is not None:
            pairs = zip_longest(self._draws.check(), state["check"][: len(self._before)])
            self._left_alone = [now == saved for now, saved in pairs]
            loader._runs_begun = state["epoch"]
            self._begun = self._draws.from_text(state["draws"])
            self._draws.restore(self._begun)

    def mark(self) -> None:
        """From here on the order is drawn."""
        if not self.goes_on:
            self._begun = self._draws.capture()

    def open(self, iterator: Any, *, keeps_seed: bool = False) -> tuple[Plan, Record]:
        """Return the plan of the run in place of the sampler's iterator, which torch's constructor has made."""
        state, loader = self.state, self._loader
        index_sampler = loader._index_sampler
        is_iterable = isinstance(loader.dataset, IterableDataset)
        starts = self._starts(is_iterable)
        progress = Progress(in_order=loader.in_order, workers=starts and dict(starts))
        sampler_iterator, samplers = iterator._sampler_iter, None
        if state is not None:
            if self.goes_on:
                progress = Progress(
                    state["position"],
                    set(state["ahead"]),
                    in_order=loader.in_order,
                    workers=starts and dict(starts),
                    next_worker=state["next_worker"],
                )
                iterator._base_seed = state["base_seed"]
                iterator._shared_seed = state["shared_seed"]
                self._inline = state["inline"]
                self._draws.restore(self._begun)
            samplers = unplain(state["samplers"])
            if self.goes_on or samplers:
                load_samplers(index_sampler, samplers or {}, state["set_epochs"])
                sampler_iterator = iter(index_sampler)
            if self.goes_on and self._inline:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # torch's constructor draws it
        plan = Plan(index_sampler, sampler_iterator, progress)
        if progress.position and not is_iterable:
            plan.go_on(progress.position, samplers or {})
        if (own := samplers or own_states(index_sampler)) is not None:
            progress.sampler_states[progress.position] = own
        record = Record(
            progress,
            self._draws,
            self._begun,
            loader._next_epoch(),
            int(iterator._base_seed),
            iterator._shared_seed,
            self._inline,
            keeps_seed,
            "iterable" if is_iterable else "map",
            Fits.of(loader),
            starts,
        )
        return plan, record

    def _starts(self, is_iterable: bool) -> dict[int, Start] | None:
        """Return where workers begin, if the dataset is one that they have a place in."""
        loader, state = self._loader, self.state
        if not is_iterable and not is_stateful(loader.dataset):
            return None
        if state is None or state["workers"] is None:
            return {worker: Start() for worker in range(max(1, loader.num_workers))}
        starts = from_plain(state["workers"])
        again = sum(start.batches + len(start.ahead) for start in starts.values() if start.snapshot is None)
        if is_iterable and again:
            log.warning(
                "Neither the dataset nor its iterator has state_dict and load_state_dict: to go on, %d batches are "
                "read again and dropped.",
                again,
            )
        return starts

    def end(self) -> None:
        """The run has begun: its first batches of keys were read, if that happens before the first is taken."""
        if self._left_alone:
            self._draws.restore(self._before, self._left_alone)


def initial_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state of a loader that was not iterated over."""
    kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map"
    draws = Draws(loader.generator, samplers_within(loader._index_sampler))
    samplers = plain(own_states(loader._index_sampler))
    return _state(
        kind, loader._runs_begun, Fits.of(loader).describe(), draws.as_text(draws.capture()), samplers=samplers
    )


def _state(kind: str, epoch: int, fits: dict[str, Any], draws: str, **more: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "version": VERSION,
        "kind": kind,
        "epoch": epoch,
        "position": 0,
        "ahead": [],
        "base_seed": None,
        "shared_seed": None,
        "draws": draws,
        "check": [],
        "inline": False,
        "set_epochs": [],
        "samplers": None,
        "workers": None,
        "next_worker": None,
    }
    return {**state, **more, "fits": dict(fits)}
