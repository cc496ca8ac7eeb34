"""The state of a loader: what is in it, what it has to fit, and how a run begins from one.

    {"version": 2, "kind": "map" or "iterable",
     "epoch": runs of the loader before this one, "position": batches of it that are done with, "ahead": [more of them],
     "base_seed": of this run, or None if the next one draws its own,
     "draws": what the random generators were when the order began to be drawn (JSON), "check": what they are now,
     "inline": whether the base seed was drawn after that, "shared_seed": of data pipes,
     "set_epochs": what `set_epoch` of samplers had been called with, "samplers": the last state of theirs that was
     taken, "drawn": batches that were drawn since, "is_over": that was in the epoch before, which has ended since,
     "bad_count": samples of the run that have raised, and were left out or replaced,
     "finished": whether it is a state after the end of a run,
     "workers": where each worker is in a dataset that it has a place or a state in, "next_worker": whose turn it is,
     "fits": what of the loader must be the same}

Plain data, and a fresh dictionary at each call: strings, numbers, lists of them. States of the user's objects are in it
as JSON text if that says all there is, else as they are; so the keys of two states are the same whatever was saved,
which torch.distributed.checkpoint needs.

Two kinds of states: one in the middle of a run, from which that run is resumed, and one between two runs (before the
first, or after the end of one), where ``base_seed`` is None unless persistent workers keep theirs.

What samplers and datasets count over epochs is in the latter too. Samplers load their last state of the run that was
over and are drawn to its end, so they do by themselves what they do then. Datasets that outlast a run, without workers
or in persistent ones, provide their state after its end; others begin each run as the trainer's process has them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from asyncloader.errors import StateMismatchError
from asyncloader.iteration.fits import Fits
from asyncloader.iteration.plan import Plan, is_drawn_from, load_samplers, own_state, samplers_within, set_epochs
from asyncloader.iteration.progress import Progress, SamplerState
from asyncloader.iteration.rng_snapshot import Draws
from asyncloader.workers.protocol.snapshot import (
    Frozen,
    Pace,
    Start,
    as_plain,
    dataset_here,
    from_plain,
    is_stateful,
    unplain,
)

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader

log = logging.getLogger("asyncloader")

VERSION = 2


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
    if state["workers"] is not None and not _is_between_runs(state):
        advice = "A dataset with a state of its own in each worker can only go on with as many workers."
        _same("num_workers", len(from_plain(state["workers"])), max(1, loader.num_workers), advice)


def _is_between_runs(state: dict[str, Any]) -> bool:
    return state["finished"] or state["base_seed"] is None


def _same(name: str, saved: Any, now: Any, advice: str = "") -> None:
    if saved != now:
        raise StateMismatchError(name, saved, now, advice)


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
        is_persistent: The next run has the same workers, with their base seed and their datasets.
        keeps_dataset: The next run has the same datasets: persistent workers, or none.
        kind: "map" or "iterable".
        fits: Describes the loader.
        starts: Where workers begin, for datasets that they have a place or a state in. The session changes those of
            workers that it replaces.
    """

    progress: Progress
    draws: Draws
    begun: list[Any]
    epoch: int
    base_seed: int
    shared_seed: int | None
    inline: bool
    is_persistent: bool
    keeps_dataset: bool
    kind: str
    fits: Fits
    starts: dict[int, Start] | None
    _begun_text: str = ""
    _described: dict[str, Any] = field(default_factory=dict)
    _has_warned: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of what was yielded so far."""
        with self.progress.lock:
            state = self._after_the_run() if self.progress.finished else self._within_the_run()
        if self.progress.untold and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The state of the dataset could not be taken (%s). %s",
                self.progress.untold,
                "It is not in states of the loader."
                if self.kind == "map"
                else "To resume from here, batches since the last one are read again and dropped.",
            )
        return state

    def carried(self) -> dict[int, Start] | None:
        """Return where the datasets are that outlast the run, for the next one; None if none does, or has a state."""
        progress = self.progress
        if not self.keeps_dataset or progress.workers is None:
            return None
        if self.kind == "map":
            return dict(progress.workers) if self.is_persistent else {0: dataset_here(self.fits.dataset)}
        if not progress.ends:
            return None
        return {worker: Start(0, progress.ends.get(worker)) for worker in progress.workers}

    def samplers_after(self) -> SamplerState:
        """Return where samplers are before the next run."""
        samplers = self.progress.sampler_state()
        if samplers.is_over or samplers.state is None or not self.progress.finished:
            return SamplerState(own_state(self.fits.index_sampler))
        return samplers._replace(is_over=True)

    def _after_the_run(self) -> dict[str, Any]:
        samplers = self.samplers_after()
        carried = self.carried()
        return _state(
            self.kind,
            self.epoch + 1,
            self._describe(),
            self.draws.as_text(self.draws.capture()),
            base_seed=self.base_seed if self.is_persistent else None,
            shared_seed=self.shared_seed if self.is_persistent else None,
            samplers=samplers.state and samplers.state.plain(),
            drawn=samplers.drawn,
            is_over=samplers.is_over,
            finished=True,
            workers=None if carried is None else as_plain(carried),
        )

    def _within_the_run(self) -> dict[str, Any]:
        progress = self.progress
        self._begun_text = self._begun_text or self.draws.as_text(self.begun)
        position = progress.position
        samplers = progress.sampler_state()
        return _state(
            self.kind,
            self.epoch,
            self._describe(),
            self._begun_text,
            position=position,
            ahead=sorted(progress.ahead),
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            inline=self.inline,
            check=self.draws.check() if position else [],
            set_epochs=list(progress.set_epochs),
            bad_count=progress.bad_count,
            samplers=samplers.state and samplers.state.plain(),
            drawn=samplers.drawn,
            is_over=samplers.is_over,
            workers=None if progress.workers is None else as_plain(progress.workers),
            next_worker=progress.next_worker,
        )

    def _describe(self) -> dict[str, Any]:
        self._described = self._described or self.fits.describe()
        return self._described


class Beginning:
    """How a run begins: anew, or from a state. Constructors of iterators go through it from top to bottom.

    torch iterates over the samplers as often as without a state, so what they do then they do as often.

    Each random generator ends up where it was in the run that is resumed. If the trainer had set it to that by itself
    (the state's ``check`` tells), it is left alone: so what was drawn from it beside the loader is accounted for.
    Otherwise it is left where drawing the order anew takes it: right as long as nothing else draws from it.

    Args:
        loader: What is iterated over.
        state: To begin from, or None.
        inline: Nothing is read of the sampler before the first batch, and the base seed is drawn before that.
        last: The run before this one, if its workers make this one too.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        state: dict[str, Any] | None,
        *,
        inline: bool = False,
        last: Record | None = None,
    ) -> None:
        self.state = state
        self.goes_on = state is not None and state["base_seed"] is not None
        self._loader = loader
        self._index_sampler = loader._index_sampler
        self._draws = Draws(loader.generator, samplers_within(self._index_sampler))
        self._inline = inline
        self._last = last
        self._samplers = SamplerState(None)  # before what is drawn in this run
        self._states: dict[str, Any] | None = None  # theirs, to load
        self._begun = self._draws.capture()
        self._before = self._begun
        self._left_alone: list[bool] = []
        if state is not None:
            pairs = zip_longest(self._draws.check(), state["check"][: len(self._before)])
            self._left_alone = [now == saved for now, saved in pairs]
            loader._runs_begun = state["epoch"]
            self._states = unplain(state["samplers"])
            frozen = None if self._states is None else Frozen(self._states)
            self._samplers = SamplerState(frozen, state["drawn"], state["is_over"])
            if state["is_over"]:
                self._finish_last_run(state)
            self._begun = self._draws.from_text(state["draws"])
            self._draws.restore(self._begun)
        self._is_dataset_loaded = False
        if inline:
            self._load_samplers()
            self._load_dataset()

    def mark(self) -> None:
        """From here on the order is drawn. Called before torch iterates over the samplers in earnest."""
        if self.goes_on:
            self._draws.restore(self._begun)
        else:
            self._begun = self._draws.capture()
        self._load_samplers()

    def open(self, iterator: Any, *, is_persistent: bool = False, overlaps: bool = False) -> tuple[Plan, Record]:
        """Return the plan of the run in place of the sampler's iterator, which torch's constructor has made."""
        state, loader = self.state, self._loader
        is_iterable = isinstance(loader.dataset, IterableDataset)
        epoch = loader._next_epoch()
        if iterator._num_yielded or is_drawn_from(iterator._sampler_iter):
            self._read_on(iterator)
        if state is not None and self.goes_on:
            iterator._base_seed = state["base_seed"]
            iterator._shared_seed = state["shared_seed"]
            self._draw_as_it_was(iterator, state)
        starts = self._starts(is_iterable)
        carried = self._last and self._last.carried()
        known = carried or starts
        if starts is not None and not loader.num_workers and starts[0] == Start():
            known = {0: dataset_here(loader.dataset, loader.snapshot_every_n_steps)}
        progress = Progress(
            state["position"] if state is not None else iterator._num_yielded,
            set(state["ahead"]) if state is not None else None,
            in_order=loader.in_order,
            workers=known and dict(known),
            next_worker=state["next_worker"] if state is not None else None,
            bad_count=state.get("bad_count", 0) if state is not None else 0,
            key=None if is_iterable else (int(iterator._base_seed), epoch, iterator._rank),
            overlaps=overlaps,
        )
        iterator._num_yielded = progress.position
        plan = Plan(self._index_sampler, iterator._sampler_iter, progress, Pace())
        if state is not None and progress.position and not is_iterable:
            is_over = self._samplers.is_over
            plan.go_on(None if is_over else self._states, progress.position if is_over else self._samplers.drawn)
        if self._samplers.state is not None and not self._samplers.is_over:
            progress.sampler_states.append((progress.position - self._samplers.drawn, self._samplers.state))
        progress.samplers_before = self._samplers
        record = Record(
            progress,
            self._draws,
            self._begun,
            epoch,
            int(iterator._base_seed),
            iterator._shared_seed,
            self._inline,
            is_persistent,
            is_persistent or not loader.num_workers,
            "iterable" if is_iterable else "map",
            Fits.of(loader),
            starts,
        )
        return plan, record

    def _read_on(self, iterator: Any) -> None:
        """Begin where a patch of torch's constructor has advanced the sampler to, unless a state says where."""
        if self.state is not None:
            self._draws.restore(self._begun)
            if self._inline:
                self._draw_base_seed()
            iterator._sampler_iter = iter(self._index_sampler)
        else:
            self._begun, self._inline, self._samplers = self._before, True, SamplerState(None)

    def _draw_base_seed(self) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _finish_last_run(self, state: dict[str, Any]) -> None:
        """Have samplers come to the end of an epoch that was over: so they do what they do then, and begin another.

        An epoch that the user has set since the state was loaded is the one that begins now.
        """
        states = self._states
        if states is None:
            return
        chosen = set_epochs(self._index_sampler)
        load_samplers(self._index_sampler, states, ())
        plan = Plan(self._index_sampler, iter(self._index_sampler), Progress(), Pace())
        plan.go_on(states, state["drawn"])
        next(plan, None)
        for sampler, epoch, loaded in zip(
            samplers_within(self._index_sampler), chosen, self._loader._epochs_when_loaded, strict=False
        ):
            if epoch is not None and epoch != loaded:
                sampler.set_epoch(epoch)

    def _load_samplers(self) -> None:
        """Bring samplers to where they were, or note where they are, before they are iterated over."""
        state = self.state
        if state is not None:
            load_samplers(self._index_sampler, None if state["is_over"] else self._states, state["set_epochs"])
        elif (last := self._loader._record) is not None and last.progress.finished:
            self._samplers = last.samplers_after()
        if self._samplers.state is None:
            self._samplers = self._samplers._replace(state=own_state(self._index_sampler))

    def _load_dataset(self) -> None:
        """Bring the dataset of this process to where it was between two runs, before anything of the next one is drawn.

        It may be that the state sets a global generator. Where batches were made since, they are made again later.
        """
        state = self.state
        dataset: Any = self._loader.dataset
        if state is None or state["workers"] is None or not _is_between_runs(state):
            return
        starts = from_plain(state["workers"])
        if len(starts) == 1 and starts[0].snapshot and not starts[0].made and is_stateful(dataset):
            dataset.load_state_dict(starts[0].snapshot["dataset"])
            self._is_dataset_loaded = True

    def _draw_as_it_was(self, iterator: Any, state: dict[str, Any]) -> None:
        """Account for the base seed, which is drawn before the order by one kind of iterators, and not by the other."""
        if self._inline and not state["inline"]:  # torch's constructor has drawn it
            self._draws.restore(self._begun)
            iterator._sampler_iter = iter(self._index_sampler)
        elif state["inline"] and not self._inline:
            self._draw_base_seed()
        self._inline = state["inline"]

    def _starts(self, is_iterable: bool) -> dict[int, Start] | None:
        """Return where workers begin, if the dataset is one that they have a place or a state in."""
        loader, state = self._loader, self.state
        if not is_iterable and not (is_stateful(loader.dataset) and loader.snapshot_every_n_steps):
            return None
        places = max(1, loader.num_workers)
        anew = {worker: Start() for worker in range(places)}
        if state is None or state["workers"] is None or self._is_dataset_loaded:
            return anew
        starts = from_plain(state["workers"])
        if len(starts) != places:
            log.warning(
                "The state has those of the dataset in %d workers, and there are %d now: the dataset begins anew.",
                len(starts),
                places,
            )
            return anew
        again = sum(start.batches + len(start.ahead) for start in starts.values() if start.snapshot is None)
        if is_iterable and again:
            log.warning(
                "Neither the dataset nor its iterator has given a state (state_dict, load_state_dict): to resume, %d "
                "batches are read again and dropped.",
                again,
            )
        return starts

    def end(self) -> None:
        """The run has begun: its first batches of keys were read, if that happens before the first is taken."""
        if self._left_alone:
            self._draws.restore(self._before, self._left_alone)


def initial_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state of a loader that was not iterated over."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    draws = Draws(loader.generator, samplers_within(loader._index_sampler))
    samplers = own_state(loader._index_sampler)
    here = Start() if loader.num_workers else dataset_here(loader.dataset, loader.snapshot_every_n_steps)
    return _state(
        "iterable" if is_iterable else "map",
        loader._runs_begun,
        Fits.of(loader).describe(),
        draws.as_text(draws.capture()),
        samplers=samplers and samplers.plain(),
        workers=None if here == Start() else as_plain({0: here}),
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
        "bad_count": 0,
        "samplers": None,
        "drawn": 0,
        "is_over": False,
        "finished": False,
        "workers": None,
        "next_worker": None,
    }
    return {**state, **more, "fits": dict(fits)}
