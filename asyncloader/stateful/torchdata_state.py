"""Reads states of torchdata's StatefulDataLoader, 0.8 to 0.11, as states of ours. Nothing in them is unpickled.

    without workers   {_num_yielded, _sampler_iter_state, ..., fetcher_state, dataset_state, _iterator_finished}
    with workers      {_snapshot: {_main_snapshot: {_sampler_iter_state, ...}, _worker_snapshots, _snapshot_step, ...},
                       _steps_since_snapshot, _iterator_finished}

Most generators, and epochs that were set, are not in such a state: they are as they are when the run begins.

Batches since the snapshot are only counted; where a stream provides no state, all batches are. Which worker made which
of several workers cannot be known, as some streams may have ended earlier. So the consumer reads these batches again,
in order, and drops them: `LoaderState.left_out`. The snapshot of an epoch that is over was taken with the last batch:
where workers persist, their streams are read on to the end.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from typing import Any, NamedTuple

import torch

from asyncloader.errors import StateMismatchError
from asyncloader.log import log
from asyncloader.messages.snapshot import WorkerStart, as_plain
from asyncloader.options import Options
from asyncloader.plain import plain
from asyncloader.protocols import is_stateful, leaves_out_buffer, probe
from asyncloader.run.fits import describe
from asyncloader.run.plan import order_generators, samplers_within
from asyncloader.run.rng_snapshot import DRAW_FROM_TORCH, KNOWN_SAMPLERS
from asyncloader.run.state import ALL, LoaderState

_OF_GRAPHS = {"root", "num_yielded"}
_OLD_ORDER = (
    "The state is of torchdata 0.10 or older. The rest of its epoch is the same; later epochs have the order of 0.11, "
    "which is another one."
)
_OWN_ORDER = (
    "The state does not have the generator of %s: the order of its epoch is drawn from it as it is now, and what was "
    "done is left out of that. For the same order, seed the generator as at the beginning of that epoch."
)
_NO_GENERATOR = (
    "The order is drawn from a generator that is in no state of torchdata, so nobody can know it. Give the sampler a "
    "generator of its own, seeded as torch's was at the beginning of the epoch; or begin an epoch without the state."
)


class _Saved(NamedTuple):
    """What a state says.

    Attributes:
        main: States of the samplers after `done` batches.
        workers: States of the dataset after `done` batches, by worker; without workers, that of the trainer's.
        num_workers: How many workers there were.
        done: Batches before the snapshot.
        since: Batches after it.
        next_worker: The worker that gives the first batch after the snapshot.
        is_over: The epoch is over: what follows is the next one.
    """

    main: dict[str, Any]
    workers: list[dict[str, Any]]
    num_workers: int
    done: int
    since: int
    next_worker: int
    is_over: bool


def converted(state: dict[str, Any], options: Options) -> LoaderState:
    """Return a state of torchdata's as one of ours.

    Raises:
        StateMismatchError: if it is not a whole one, or if nobody can know how the loader would go on from it.
    """
    if state.keys() >= _OF_GRAPHS:
        advice = "Its states are of a program of its own, and fit no loader. docs/moving.md has what to write here."
        raise StateMismatchError("kind", "a graph of torchdata", "a loader", advice)
    try:
        return _converted(_read(state), options)
    except (KeyError, TypeError) as error:
        advice = f"It has no version of ours, and is not a whole state of StatefulDataLoader: {error!r}."
        raise StateMismatchError("keys", sorted(state), "those of torchdata 0.8 to 0.11", advice) from error


def _read(state: dict[str, Any]) -> _Saved:
    is_over = state["_iterator_finished"]
    if "_snapshot" not in state:
        return _Saved(state, [state], 0, state["_num_yielded"], 0, 0, is_over)
    snapshot, since = state["_snapshot"], state["_steps_since_snapshot"]
    main = snapshot["_main_snapshot"]
    number = main["_num_workers"]
    workers = [snapshot["_worker_snapshots"][f"worker_{worker}"] for worker in range(number)]
    next_worker = (snapshot["_last_yielded_worker_id"] + 1) % number
    return _Saved(main, workers, number, snapshot["_snapshot_step"], since, next_worker, is_over)


def _converted(saved: _Saved, options: Options) -> LoaderState:
    kind = "map" if saved.workers[0]["fetcher_state"] is None else "iterable"
    if kind != (here := "iterable" if options.is_iterable else "map"):
        raise StateMismatchError("kind", kind, here)
    dataset = _dataset(saved, options)
    is_over = saved.is_over and dataset["left_out"] != ALL
    is_again = is_over and options.persistent_workers  # which keep their seed
    has_seed = is_again or not is_over
    seed = saved.main.get("_base_seed", torch.initial_seed() % 2**63)  # without workers nothing was seeded
    return LoaderState(
        epoch=int(is_over),
        finished=is_over,
        base_seed=seed if has_seed else None,
        reruns=int(is_again),
        shared_seed=saved.main["_shared_seed"] if has_seed else None,
        has_past=is_again,
        fits=describe(options),
        **dataset,
        **_order(saved, options, dataset["left_out"]),
    )


# ------------------------------------------------------------------------------------------------------------ samplers


def _order(saved: _Saved, options: Options, left_out: int) -> dict[str, Any]:
    """Return where samplers and generators are."""
    since = 0 if left_out else saved.since
    order: dict[str, Any] = {"drawn": saved.done + since, "is_drawn": True, "sample": -1}
    rng, main = order_generators(options), saved.main
    untold = rng.text_of()
    order |= {"at_iter": untold, "at_next": untold}
    if options.is_iterable:
        return order
    states: dict[str, Any] = {"sampler": main["_index_sampler_state"], "iterator": main["_sampler_iter_state"]}
    whole = None
    if options.batch_size is not None:  # torchdata's own BatchSampler: its state, or until 0.10 that of its iterator
        whole = states["iterator"] if states["sampler"] is None else states["sampler"]
        _check_batches(whole, main["_sampler_iter_yielded"], saved, options)
        states = {"sampler": whole.get("sampler_state"), "iterator": whole.get("sampler_iter_state")}
    if (generator_after := probe(options.sampler, "generator_after")) is not None:
        if states["iterator"] is None:
            raise StateMismatchError("sampler", "not shuffled", "RandomSampler")
        order |= _generators(saved, options, rng, states["iterator"]["generator"], generator_after)
    elif states != {"sampler": None, "iterator": None}:
        _check_sampler(states, options)
        if whole is not None and type(options.index_sampler) not in KNOWN_SAMPLERS:
            states["iterator"] = whole  # of `asyncloader.stateful.BatchSampler`, which reads it as torchdata's does
        order |= {"samplers": plain(states), "drawn": since}
        if saved.is_over:
            # With workers the state is of the last batch, before the sampler was asked for its end; unless that batch
            # is short, which shows the end as well.
            is_short = whole is not None and whole["samples_yielded"] < saved.done * (options.batch_size or 1)
            is_at_end = not saved.num_workers or (is_short and not saved.since)
            order |= {"drawn": 0, "passes": [] if is_at_end else [saved.since + 1]}
    else:
        for sampler in samplers_within(options.index_sampler):
            if type(sampler) in DRAW_FROM_TORCH:
                order |= _drawn_again(saved, options, rng, sampler)
    return order


def _drawn_again(saved: _Saved, options: Options, rng: Any, sampler: Any) -> dict[str, Any]:
    """Return where the generator of a sampler of torch's was, which is now as at the beginning of the epoch."""
    name, generator = type(sampler).__name__, sampler.generator
    if generator is None or generator is torch.default_generator:
        raise StateMismatchError("generator", "not told", f"the global one, for {name}", _NO_GENERATOR)
    log.warning(_OWN_ORDER, name)
    again = copy.copy(sampler)
    again.generator = after = torch.Generator()
    after.set_state(generator.get_state())
    if generator is options.generator:  # a base seed was drawn from it, before the order
        torch.empty((), dtype=torch.int64).random_(generator=after)
    elif not saved.is_over:
        return {}  # as it is when the run begins
    if saved.is_over:
        deque(again, maxlen=0)
    now = rng.text_of(generator, after.get_state())
    return {"at_next": now, "at_iter": now} if saved.is_over else {"at_next": now}


def _generators(saved: _Saved, options: Options, rng: Any, began: torch.Tensor, generator_after: Any) -> dict[str, Any]:
    """Return where the generator of torchdata's RandomSampler was when the order was drawn, and afterwards."""
    sampler_generator, after = options.sampler.generator, generator_after(began, is_over=saved.is_over)
    if options.batch_size is not None and saved.main["_index_sampler_state"] is not None:
        log.warning(_OLD_ORDER)
    elif sampler_generator is options.generator and not saved.num_workers:  # it draws a base seed, too, after the order
        torch.empty((), dtype=torch.int64).random_(generator=after)
    at_next = rng.text_of(sampler_generator, after.get_state())
    return {"at_iter": at_next if saved.is_over else rng.text_of(sampler_generator, began), "at_next": at_next}


def _check_batches(whole: Any, batches: int, saved: _Saved, options: Options) -> None:
    """See whether batches have as many samples as they had: what is left out is counted in batches."""
    samples, size = whole["samples_yielded"], options.batch_size or 1
    if not saved.is_over and not (batches - 1) * size < samples <= batches * size:
        raise StateMismatchError("batch_size", f"{samples} samples in {batches} batches", size)


def _check_sampler(states: dict[str, Any], options: Options) -> None:
    """See whether somebody here can load the states of a sampler and its iterator."""
    is_of_batches = options.auto_collation and options.batch_size is None
    sampler, advice = options.index_sampler if is_of_batches else options.sampler, ""
    if type(sampler) in KNOWN_SAMPLERS:
        if states["iterator"] is not None and states["iterator"].keys() == {"generator", "yielded"}:
            advice = "asyncloader.stateful.StatefulDataLoader has the order of torchdata's."
        raise StateMismatchError("sampler", "one with a state", type(sampler).__name__, advice)
    if states["sampler"] is not None and not is_stateful(sampler):
        raise StateMismatchError("sampler", "one with a state", f"{type(sampler).__name__}, without")


# ------------------------------------------------------------------------------------------------------------- dataset


def _dataset(saved: _Saved, options: Options) -> dict[str, Any]:
    """Return where the dataset is in each worker, how many batches are done with, and how many of those since then."""
    position = saved.done + saved.since
    whole = {"workers": None, "position": position, "left_out": 0, "next_worker": None}
    snapshots = list(map(_snapshot, saved.workers))
    is_told = any(each["dataset"] is not None or each["iterator"] is not None for each in snapshots)
    if saved.is_over:
        whole["position"] = 0
        keeps = options.persistent_workers or not options.has_workers
        if not (is_told and keeps and is_stateful(options.dataset)):
            return whole
        if saved.num_workers and not options.has_workers:
            advice = "It does not say whether workers persist, and go on with their states of the dataset."
            raise StateMismatchError("num_workers", saved.num_workers, 0, advice)
        if not (options.is_iterable and options.has_workers):
            snapshots = [_outlasting(each) for each in snapshots]
    elif is_told and not is_stateful(options.dataset) and any(each["dataset"] is not None for each in snapshots):
        if not leaves_out_buffer(options.dataset):
            raise StateMismatchError("dataset_state", "there", "not there", "The dataset had state_dict, and has none.")
        is_told = False  # the state lacks rows: the stream is read again
    if not is_told:
        return whole if not options.is_iterable or saved.is_over else _read_again(saved, whole)
    snapshots = _of_as_many(snapshots, options)
    has_end = saved.is_over and options.is_iterable and options.has_workers
    if has_end and not options.auto_collation and len(snapshots) > 1:
        advice = "With batch_size=None it does not say whether a stream was at its end, or before it: save in an epoch."
        raise StateMismatchError("workers", "of an epoch that is over", "persistent", advice)
    told = {"workers": as_plain(dict(enumerate(WorkerStart(0, each) for each in snapshots)))}
    if saved.is_over:
        return {**whole, **told, "left_out": ALL if has_end else 0}
    return {**whole, **told, "position": saved.done, "left_out": saved.since, "next_worker": saved.next_worker}


def _snapshot(worker: dict[str, Any]) -> dict[str, Any]:
    fetcher = worker["fetcher_state"] or {"dataset_iter_state": None, "fetcher_ended": False}
    iterator, ended = fetcher["dataset_iter_state"], fetcher["fetcher_ended"]
    return {"dataset": worker["dataset_state"], "iterator": iterator, "ended": ended}


def _outlasting(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return what of a snapshot outlasts the epoch: the dataset's state, or that of a dataset that is an iterator."""
    own = snapshot["iterator"] if snapshot["dataset"] is None else snapshot["dataset"]
    return {"dataset": own, "iterator": None, "ended": False}


def _read_again(saved: _Saved, whole: dict[str, Any]) -> dict[str, Any]:
    """Return what a stream without a state has to go on from: its beginning."""
    if saved.num_workers < 2:
        return {**whole, "workers": as_plain({0: WorkerStart(whole["position"])}), "next_worker": 0}
    starts = dict.fromkeys(range(saved.num_workers), WorkerStart())
    return {"workers": as_plain(starts), "position": 0, "left_out": whole["position"], "next_worker": 0}


def _of_as_many(snapshots: list[dict[str, Any]], options: Options) -> list[dict[str, Any]]:
    """Return snapshots for as many workers as there are now."""
    now = options.num_at_start
    if len(snapshots) == now:
        return snapshots
    texts = {json.dumps(each["dataset"], sort_keys=True, default=repr) for each in snapshots}
    if options.is_iterable or len(texts) > 1:
        advice = "Each worker had a state of the dataset of its own, which can only go on with as many workers."
        raise StateMismatchError("num_workers", len(snapshots), now, advice)
    return snapshots[:1] * now
