"""The state of a loader: what is in it, and what it has to fit.

    {"version": 3, "kind": "map" or "iterable",
     "epoch": runs of the loader before this one, "position": batches of it that are done with, "ahead": [more of them],
     "base_seed": of this run, or None if the next one draws its own, "reruns": runs that had it before,
     "generators": the keys of generators that the dataset holds, by their paths (JSON),
     "at_iter": the random generators when the samplers were iterated over (JSON), "at_next": when these were first read
     (JSON), "" if the same; or now, if that was not yet, which "is_drawn" tells,
     "check": tells what the global generators are now, -1 if nobody can say, "shared_seed": of data pipes,
     "set_epochs": what `set_epoch` of samplers had been called with, "dataset_epochs": that of datasets,
     "samplers": the last state of samplers that was taken, "passes": how many answers each iterator that is dropped by
     now has given since, "drawn": how many batches the present one has given since,
     "sample": samples of the epoch before that position; -1 if the run has not counted them,
     "bad_count": samples of the run that have raised, and were left out or replaced,
     "finished": whether it is a state after the end of a run,
     "has_past": its workers had made epochs before this one,
     "num_workers": how many there are, where their number looks after itself,
     "workers": where each worker is in a dataset that it has a place or a state in, "next_worker": whose turn it is,
     "fits": what of the loader must be the same; "samplers" and "datasets" in it are lists of identities (JSON)}

Plain data, and a fresh dictionary at each call: strings, numbers, lists of them. States of the user's objects are in it
as JSON text if that says all there is, else as they are; so the keys of two states are the same whatever was saved,
which torch.distributed.checkpoint needs.

Two kinds of states: one in the middle of a run, from which that run is resumed, and one between two runs (before the
first, or after the end of one), where ``base_seed`` is None unless persistent workers keep theirs.

A state between two runs also contains the counts of epochs that samplers and datasets keep. Samplers load their last
state of the run that was over and are drawn to its end, so they do by themselves what they do then. Datasets that
outlast a run, without workers or in persistent ones, provide their state after its end; others begin each run as the
trainer's process has them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncloader import identity
from asyncloader.engine.progress import Progress, SamplerState
from asyncloader.errors import StateMismatchError
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.snapshot import WorkerStart, as_plain, dataset_here, from_plain
from asyncloader.options import Options
from asyncloader.protocols import is_stateful, members, probe
from asyncloader.run.plan import is_elastic, keeps_place, order_generators, own_state, samplers_within, written
from asyncloader.run.rng_snapshot import OrderDraw
from asyncloader.seeding.own_generators import Key
from asyncloader.seeding.sample_context import EpochKey

log = logging.getLogger("asyncloader")

VERSION = 4

_OTHER_RANKS = (
    "A state of this sampler fits as many ranks as it was taken on. asyncloader.samplers.ElasticSampler, in the place "
    "of DistributedSampler when the state is taken, is resumed on any number."
)
_ADVICE = {
    "rank": (
        "Each rank has to load the state that it has saved itself; with asyncloader.samplers.ElasticSampler in the "
        "place of DistributedSampler a state fits every rank."
    ),
    "seeding_rank": (
        "It is part of the seeds. Give it, or leave it out, as when the state was taken; otherwise the run would go on "
        "with other random numbers."
    ),
    "division": (
        "(It is batch_size, num_replicas and rank of each sampler.) With in_order=False a state names batches that "
        "came early by their numbers, which are other samples in another division. Save between epochs, or with "
        "in_order=True."
    ),
    "generators": "Give the loader and its samplers as many generators of their own as they had.",
    "dataset_state": (
        "It says whether a state has that of the dataset: so it is if the dataset provides one, unless "
        "snapshot_every_n_steps is 0 or None."
    ),
    "num_workers": "A dataset with a state of its own in each worker can only go on with as many workers.",
}
"""By what differs: what to do about it."""

_DIVISION = ("batch_size", "num_replicas", "rank")
"""What of samplers says which samples batch n has."""


def check(state: dict[str, Any], options: Options) -> None:
    """See whether a state fits what is to be iterated over.

    Raises:
        StateMismatchError: if it does not; it says what differs.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        version = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise StateMismatchError("version", version, VERSION, "It is not a state of this version of asyncloader.")
    keys = _empty().keys()
    if missing := keys - state.keys():
        advice = f"It is not all that a loader had given: without {', '.join(sorted(missing))}."
        raise StateMismatchError("keys", sorted(state), sorted(keys), advice)
    _same("kind", state["kind"], _kind(options))
    saved, here = dict(state["fits"]), describe(options)
    is_between = is_between_runs(state)
    if not options.is_iterable:  # of which there are more where this process reads the stream
        saved["generators"], here["generators"] = len(json.loads(state["at_iter"])), len(order_generators(options))
    if state["workers"] is not None and not is_between:
        saved["num_workers"], here["num_workers"] = len(from_plain(state["workers"])), options.num_at_start
    free = {"samplers", "datasets"}  # which are compared one by one
    free |= set() if state["ahead"] else {"division"}
    saved_ranks, ranks = saved["num_replicas"], here["num_replicas"]
    if saved_ranks != ranks and None not in (saved_ranks, ranks):  # before their samples are, which follow from that
        _same("num_replicas", saved_ranks, ranks, _OTHER_RANKS)
    identity.check(saved, here, free=free, advice=_ADVICE)
    for name in ("samplers", "datasets"):
        _check_each(name, json.loads(saved[name]), json.loads(here[name]), identity.RANKS if is_between else ())


def _check_each(name: str, saved: list[dict[str, Any]], here: list[dict[str, Any]], free: Collection[str]) -> None:
    """See whether samplers or datasets are those that a state was taken with."""
    _same(name, [one["kind"] for one in saved], [one["kind"] for one in here])
    for one, other in zip(saved, here, strict=True):
        identity.check(one, other, free=free)


def describe(options: Options) -> dict[str, Any]:
    """Return what must be the same for a state to mean the same batches, as plain data."""
    samplers = samplers_within(options.index_sampler)
    elastic = any(map(is_elastic, samplers))
    divided = next((sampler for sampler in samplers if _is_divided(sampler)), None)
    return {
        "dataset_length": None if options.is_iterable else _length(options.dataset),
        "batch_size": None if elastic else options.batch_size,
        "drop_last": options.drop_last,
        "seeding": None if options.is_iterable else options.seeding,
        "sampler": "(".join(type(sampler).__name__ for sampler in samplers) + ")" * (len(samplers) - 1),
        "samples": None if elastic or options.is_iterable else _length(options.sampler),
        "num_replicas": None if elastic or divided is None else divided.num_replicas,
        "rank": None if elastic or divided is None else divided.rank,
        # Not which one: the states of ranks are alike, and many trainers save that of the first for all.
        "seeding_rank": None if options.seeding_rank is None else "given",
        "division": division(options),
        "dataset_state": not options.is_iterable and options.snapshot_every > 0 and is_stateful(options.dataset),
        "samplers": json.dumps([_identity(sampler, elastic) for sampler in samplers], default=identity.plain),
        "datasets": json.dumps([known for one in members(options.dataset) if len(known := identity.of(one)) > 1]),
    }


def division(options: Options) -> list[list[int | None]]:
    """Return what of the samplers says which samples batch n has."""
    return [[_whole(sampler, name) for name in _DIVISION] for sampler in samplers_within(options.index_sampler)]


def _identity(sampler: Any, elastic: bool) -> dict[str, Any]:
    """Return what a state of the loader belongs to of one of its samplers."""
    found = identity.of(sampler)
    if isinstance(sampler, (list, tuple, range, np.ndarray, torch.Tensor)):
        return {**found, "keys": identity.checksum(sampler)}
    return {name: value for name, value in found.items() if not (elastic and name == "batch_size")}


def keys_in(state: dict[str, Any]) -> dict[str, Key]:
    """Return the keys of generators that a state has."""
    return {path: (check, first) for path, (check, first) in json.loads(state["generators"]).items()}


def is_between_runs(state: dict[str, Any]) -> bool:
    """Whether a state is of the time before a run or after it, and not in its middle."""
    return state["finished"] or state["base_seed"] is None


def _kind(options: Options) -> str:
    return "iterable" if options.is_iterable else "map"


def _is_divided(sampler: Any) -> bool:
    return _whole(sampler, "num_replicas") is not None and _whole(sampler, "rank") is not None


def _whole(sampler: Any, name: str) -> int | None:
    value = probe(sampler, name)
    return value if isinstance(value, int) else None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _same(name: str, saved: Any, now: Any, advice: str = "") -> None:
    if saved != now:
        raise StateMismatchError(name, saved, now, advice)


@dataclass
class Checkpointer:
    """Makes states of one run. Held by its iterator and by the loader.

    Attributes:
        options: The loader's.
        progress: How far it is.
        order: When its order was drawn.
        key: Base seed, runs that had it before, and rank of the data: batches are seeded by them.
        epoch: How many runs of the loader were before this one.
        generators: The keys of generators that the dataset holds, by their paths.
        shared_seed: The seed that data pipes share.
        sampler_epochs: The epochs that `set_epoch` had told samplers when the run began, from the outermost on.
        dataset_epochs: The epochs that it had told the dataset.
        has_past: The workers of this run had made runs before it.
        num_workers: How many there are now, where their number looks after itself.
        warned: The warnings that the loader has logged about its states, once each.
    """

    options: Options
    progress: Progress
    order: OrderDraw
    key: EpochKey
    epoch: int
    generators: dict[str, Key]
    shared_seed: int | None
    sampler_epochs: list[int | None]
    dataset_epochs: list[int | None]
    has_past: bool
    num_workers: int | None
    warned: set[str]
    _described: dict[str, Any] = field(default_factory=dict)

    @property
    def base_seed(self) -> int:
        """The number that seeds of workers and of batches are made of."""
        return self.key[0]

    def epoch_spec(self, number: int, starts: dict[int, WorkerStart] | None) -> EpochSpec:
        """Return the run in the form that workers receive, as that of this number in their pool."""
        epochs = tuple(self.dataset_epochs) if self.options.has_workers else ()  # without, the dataset has been told
        return EpochSpec(number, self.key, self.shared_seed, starts, epochs, 0, self.epoch, self.generators)

    def state_dict(self, newest: Checkpointer | None = None) -> dict[str, Any]:
        """Return the state as of what was yielded so far.

        Args:
            newest: The run that has read the sampler last, for a look beside this one: the next run comes after that.
        """
        with self.progress.lock:
            state = self._after_the_run(newest or self) if self.progress.finished else self._within_the_run()
        if untold := self.progress.now.untold:
            self.warn(
                f"The state of the dataset could not be taken ({untold}). "
                + (
                    "It is not in states of the loader."
                    if not self.options.is_iterable
                    else "To resume from here, batches since the last one are read again and dropped."
                )
            )
        self.order.note_state()
        return state

    def warn(self, text: str) -> None:
        """Log a warning about states, once for a loader."""
        warn_once(self.warned, text)

    def carried(self) -> dict[int, WorkerStart] | None:
        """Return where the datasets are that outlast the run, for the next one; None if none does, or has a state."""
        options, ends, workers = self.options, self.progress.ends, self.progress.now.workers
        if not options.keeps_dataset or workers is None:
            return None
        if not options.is_iterable:
            if options.persistent_workers:
                return workers
            return {0: dataset_here(options.dataset, options.snapshot_every)}
        return {worker: WorkerStart(0, ends.get(worker)) for worker in workers} if ends else None

    def samplers_after(self) -> SamplerState:
        """Return where samplers are before the next run, which iterates over them anew; None if they say it."""
        progress, index_sampler = self.progress, self.options.index_sampler
        if not (progress.finished or keeps_place(index_sampler)):
            return SamplerState(None)
        if progress.finished:
            samplers = progress.sampler_state(progress.now.position)
            answers = samplers.drawn + 1  # the end is one
        else:
            # The next iterator may make use of a state that was loaded, and after which nothing is read. So one answer
            # is read again at least, if there was one.
            at = max(progress.began[0], progress.asked - 1)
            samplers = progress.sampler_state(at)
            answers = samplers.drawn + progress.asked - at
        has_no_state = samplers.passes and answers and not progress.sampler_states
        if samplers.state is None or has_no_state:
            return SamplerState(None)
        return SamplerState(samplers.state, 0, (*samplers.passes, answers))

    def _after_the_run(self, newest: Checkpointer) -> dict[str, Any]:
        samplers = newest.samplers_after()
        if samplers.state is None:
            samplers = SamplerState(own_state(self.options.index_sampler))
        carried = self.carried()
        return _state(
            self.options,
            self.epoch + 1,
            describe(self.options),  # anew: between two runs the trainer may change its samplers
            samplers,
            at_iter=_generators_now(self.options),
            base_seed=self.base_seed if self.options.persistent_workers else None,
            reruns=self.key[1] + 1 if self.options.persistent_workers else 0,
            generators=json.dumps(self.generators),
            shared_seed=self.shared_seed if self.options.persistent_workers else None,
            finished=True,
            has_past=self.options.persistent_workers,
            num_workers=self.num_workers,
            workers=None if carried is None else as_plain(carried),
        )

    def at_beginning(self) -> dict[str, Any]:
        """Return a state as of the beginning of the run, which `moved` takes on to any batch of it."""
        position, sample = self.progress.began
        return self._of_the_run(self.progress.sampler_state(position), position=position, sample=sample)

    def _within_the_run(self) -> dict[str, Any]:
        progress, now = self.progress, self.progress.now
        position = progress.counted_until(now.position)
        return self._of_the_run(
            progress.sampler_state(position),
            position=position,
            ahead=[*range(position, now.position), *sorted(now.ahead)],
            check=self.order.check(),
            bad_count=now.bad_count,
            sample=progress.first_sample(position),
            workers=None if now.workers is None else as_plain(now.workers),
            next_worker=now.next_worker,
        )

    def _of_the_run(self, samplers: SamplerState, **how_far: Any) -> dict[str, Any]:
        return _state(
            self.options,
            self.epoch,
            self._describe(),
            samplers,
            **self.order.as_plain(),
            base_seed=self.base_seed,
            reruns=self.key[1],
            generators=json.dumps(self.generators),
            shared_seed=self.shared_seed,
            set_epochs=list(self.sampler_epochs),
            dataset_epochs=list(self.dataset_epochs),
            has_past=self.has_past,
            num_workers=self.num_workers,
            **how_far,
        )

    def _describe(self) -> dict[str, Any]:
        self._described = self._described or describe(self.options)
        return self._described


def warn_once(warned: set[str], text: str) -> None:
    """Log a warning about states, unless the loader has logged it before."""
    if text not in warned:
        warned.add(text)
        log.warning("%s", text)


def warn_of_draws(index_sampler: Any, warned: set[str]) -> None:
    """Say that a sampler cannot be resumed exactly which draws while it is read, beside whatever else draws."""
    kinds = " over ".join(type(each).__name__ for each in samplers_within(index_sampler))
    warn_once(
        warned,
        f"The sampler ({kinds}) draws from global random generators while it is read, and not only when it begins: "
        "after a resume the rest of an epoch may be other samples than it would be, and some may come twice. Give the "
        "sampler a generator of its own, a seed, or a state (state_dict, load_state_dict).",
    )


def moved(state: dict[str, Any], number: int, samples: int | None) -> dict[str, Any]:
    """Return the state of a run that goes on at another batch of it; of a map-style dataset without a state.

    Args:
        state: A state of the run from which that batch can be reached; otherwise ``drawn`` of what is returned is below
            0.
        number: The number of the batch.
        samples: In each batch; None where batches differ. Then it is not known which sample of the epoch comes first.
    """
    by, sample = number - state["position"], state["sample"]
    if by and sample >= 0:
        # What lies before a state is read from the epoch's beginning on. Its last batch may have fewer samples.
        sample = -1 if samples is None else number * samples if by < 0 else sample + by * samples
    given: dict[str, Any] = {"ahead": [], "workers": None, "next_worker": None, "bad_count": 0, "check": []}
    return {**state, **given, "position": number, "drawn": state["drawn"] + by, "sample": sample}


def initial_state(options: Options, epoch: int, generators: dict[str, Key] | None = None) -> dict[str, Any]:
    """Return the state of a loader that was not iterated over since so many runs."""
    samplers = SamplerState(own_state(options.index_sampler))
    here = WorkerStart() if options.has_workers else dataset_here(options.dataset, options.snapshot_every)
    return _state(
        options,
        epoch,
        describe(options),
        samplers,
        at_iter=_generators_now(options),
        workers=None if here == WorkerStart() else as_plain({0: here}),
        num_workers=int(options.num_workers) if options.is_auto else None,
        generators=json.dumps(generators or {}),
    )


def _generators_now(options: Options) -> str:
    rng = order_generators(options)
    return rng.as_text(rng.capture())


def _state(options: Options, epoch: int, fits: dict[str, Any], samplers: SamplerState, **more: Any) -> dict[str, Any]:
    return {
        **_empty(),
        "kind": _kind(options),
        "epoch": epoch,
        "samplers": written(options.index_sampler, samplers.state),
        "drawn": samplers.drawn,
        "passes": list(samplers.passes),
        **more,
        "fits": dict(fits),
    }


def _empty() -> dict[str, Any]:
    """Return all that a state has, with nothing in it."""
    return {
        "version": VERSION,
        "kind": "",
        "epoch": 0,
        "begun": 0,
        "position": 0,
        "ahead": [],
        "base_seed": None,
        "reruns": 0,
        "generators": "{}",
        "shared_seed": None,
        "at_iter": "",
        "at_next": "",
        "is_drawn": False,
        "check": [],
        "set_epochs": [],
        "dataset_epochs": [],
        "bad_count": 0,
        "sample": 0,
        "samplers": None,
        "drawn": 0,
        "passes": [],
        "finished": False,
        "workers": None,
        "next_worker": None,
        "has_past": False,
        "num_workers": None,
        "fits": {},
    }
