"""How a run over the data starts: anew, or from a state.

    generators, samplers, dataset as they were ──> torch draws and iterates ──> plan, progress, where workers begin

torch iterates over the samplers as often as without a state, so what they do then they do as often.

How the order is drawn again, and what becomes of the generators, is told in `asyncloader.run.rng_snapshot`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from operator import index
from typing import Any, NamedTuple

import torch

from asyncloader.engine.progress import Progress, SamplerState
from asyncloader.engine.tracks import make_tracks
from asyncloader.epochs import EpochNotice, listeners, tell
from asyncloader.log import log
from asyncloader.messages.snapshot import Frozen, Pace, WorkerStart, dataset_here
from asyncloader.options import Options
from asyncloader.plain import unplain
from asyncloader.protocols import is_stateful, leaves_out_buffer
from asyncloader.run.checkpoint import Checkpointer, warn_of_draws
from asyncloader.run.data_rank import data_rank
from asyncloader.run.fits import describe
from asyncloader.run.plan import Plan, load_samplers, order_generators, own_state, samplers_within
from asyncloader.run.rng_snapshot import OrderDraw, RNGSnapshot
from asyncloader.run.runs import Runs
from asyncloader.run.set_epochs import counting
from asyncloader.run.state import LoaderState
from asyncloader.samplers.ordered import ResumableSampler
from asyncloader.seeding.own_generators import GeneratorKeys


class Drawn(NamedTuple):
    """The seeds that torch's iterator has drawn for a run, and its iterator over the keys of batches."""

    keys: Iterator[Any]
    base_seed: int
    shared_seed: int | None
    num_yielded: int = 0


class RunStart(NamedTuple):
    """How a run starts.

    Attributes:
        plan: Yields the keys of its batches.
        checkpointer: Makes its states; with its progress, epoch and seeds.
        starts: Where workers begin, for datasets that they have a place or a state in. The session changes those of
            workers that it replaces.
    """

    plan: Plan
    checkpointer: Checkpointer
    starts: dict[int, WorkerStart] | None


def begin(
    options: Options,
    state: LoaderState | None,
    runs: Runs,
    draw: Callable[[], Drawn],
    *,
    prepare: Callable[[], object] | None = None,
    last: Checkpointer | None = None,
    left: RunStart | None = None,
    iterator: Any = None,
) -> RunStart:
    """Bring generators, samplers and the dataset to where the run begins, and have it drawn.

    1. All are put to where they were when the samplers of this run were iterated over: now, or in the state.
    2. torch's iterator draws the base seed and iterates over the samplers, in its order.
    3. What a state says of the run takes the place of what was drawn, and the generators go to where they belong.

    Args:
        options: The loader's.
        state: To begin from, or None.
        runs: The loader's; it is told of this one.
        draw: Iterates over the samplers, as torch's iterator does. Without workers it draws the base seed as well.
        prepare: Runs torch's constructor, before the order is drawn.
        last: The run before this one, if its workers make this one too.
        left: The run before this one, if it was left as soon as it had begun.
        iterator: Gives the batches of the run; None if it is begun to be left, or to be looked at.
    """
    runs.set_epochs.look(options)  # before a state sets an epoch of its own
    rng = order_generators(options)
    before, check = rng.capture(), [] if state is None else rng.check()  # what the trainer has set, perhaps
    if state is None:
        at_iter, samplers, starts = _put_anew(options, runs, rng, prepare, left)
        epoch = runs.begun
    else:
        at_iter, samplers, starts = _put_back(options, state, runs, rng, prepare)
        epoch = state.epoch
    # Before the order is drawn: the dataset may hold the generator that it is drawn from.
    generators = _generator_keys(options, state, runs, epoch)
    loaded = rng.capture()  # a sampler's state may have set its own
    drawn = draw()
    there = state or LoaderState(epoch=epoch, position=drawn.num_yielded, drawn=drawn.num_yielded, sample=-1)
    if state is None and drawn.num_yielded:  # a patch of torch's constructor has read the sampler
        at_iter = loaded = before
    order, epochs, fits = _order(options, runs, rng, at_iter, is_drawn=there.is_drawn)
    drawn = _as_saved(options, there, drawn, rng, loaded)
    if state is not None:
        order.note_state()
    if not there.is_between_runs:
        order.resume(there, before, check, rng.differ(at_iter, loaded))
    key = _key(options, there, drawn, left.checkpointer if left is not None and options.persistent_workers else last)
    notice = EpochNotice((*runs.set_epochs.of_dataset(options),), runs.set_epochs.count)
    known = _known(options, starts, last, notice)
    progress = _progress(options, there, key, known, samplers._replace(drawn=there.drawn))
    plan = _plan(options, there, progress, drawn.keys, order)
    common = LoaderState(
        epoch=epoch,
        base_seed=drawn.base_seed,
        reruns=key[1],
        shared_seed=drawn.shared_seed,
        generators=generators,
        set_epochs=epochs,
        fits=fits,
        has_past=last is not None,
    )
    checkpointer = Checkpointer(
        options,
        progress,
        order,
        key,
        common,
        notice,
        runs.warned,
        is_resumed=not there.is_between_runs,
        left_out=index(there.left_out),  # a file that was tampered with may say anything
    )
    runs.begin(checkpointer, state, iterator)
    return RunStart(plan, checkpointer, starts)


# ----------------------------------------------------------------------------------------------------- 1. where it is


def _put_anew(
    options: Options, runs: Runs, rng: RNGSnapshot, prepare: Callable[[], object] | None, left: RunStart | None
) -> tuple[list[Any], SamplerState, dict[int, WorkerStart] | None]:
    """Have samplers begin an epoch; return where generators, when they are iterated over, samplers and dataset are."""
    if prepare is not None:  # it draws the base seed; so generators are looked at after it
        prepare()
    last = None
    if (latest := runs.run()) is not None:
        last = [*latest.common.set_epochs, *latest.notice.epochs]
        if latest.progress.finished:
            runs.set_epochs.warn_of_same_order(options, last)
    at_iter = rng.capture()
    samplers = _begin_epoch(options, runs, runs.samplers_now(), last)
    if left is not None and options.keeps_dataset and not options.is_iterable:
        return at_iter, samplers, left.starts
    return at_iter, samplers, _starts(options, None)


def _order(
    options: Options, runs: Runs, rng: RNGSnapshot, at_iter: list[Any], *, is_drawn: bool
) -> tuple[OrderDraw, list[int | None], dict[str, Any]]:
    """Return what follows the drawing of the order, and what is noted then: epochs of samplers, and what has to fit."""
    set_epochs, index_sampler = runs.set_epochs, options.index_sampler
    epochs, fits = set_epochs.of_samplers(index_sampler), describe(options) if is_drawn else dict[str, Any]()

    def note() -> None:  # samplers look at epochs, lengths and weights only then; the runs would refer to themselves
        epochs[:] = set_epochs.of_samplers(index_sampler)
        fits.update(describe(options))

    return OrderDraw(rng, at_iter, partial(warn_of_draws, index_sampler, runs.warned), note), epochs, fits


def _put_back(
    options: Options, state: LoaderState, runs: Runs, rng: RNGSnapshot, prepare: Callable[[], object] | None
) -> tuple[list[Any], SamplerState, dict[int, WorkerStart] | None]:
    """Put generators, samplers and the dataset to where they are in a state; return where that is.

    The order matters. To repeat passes draws from the generators, so that is done before these are put back. Torch's
    constructor draws from them too, which is undone where the state has the base seed. States of samplers and of the
    dataset are loaded last, as they may set generators of their own, which then stay.
    """
    at_iter, states = runs.at_iter(state, rng), unplain(state.samplers)
    _repeat_passes(options, state, runs)
    rng.restore(at_iter)
    if prepare is not None:
        prepare()
        if state.keeps_seed:
            rng.restore(at_iter)
        else:
            at_iter = rng.capture()
    within, those_told = samplers_within(options.index_sampler), [*listeners(options.dataset)]
    since = runs.set_epochs.since_load(options)
    load_samplers(options.index_sampler, None if state.passes else states, state.set_epochs)
    if state.is_between_runs:  # an epoch that was set since the load is the one that begins
        tell(within, since)
    tell(those_told, state.dataset_epochs)
    news = since[len(within) :] if state.is_between_runs else ()
    tell([each if counting([each]) else None for each in those_told], news)
    last = runs.set_epochs.now(options) if state.finished else None
    # In another epoch that was set since the load the samplers say anew where they are.
    has_moved = state.is_between_runs and not state.passes and any(told is not None for told in since[: len(within)])
    frozen = None if states is None or has_moved else Frozen(states)
    samplers = _begin_epoch(options, runs, SamplerState(frozen, state.drawn, tuple(state.passes)), last)
    runs.set_epochs.note_state(state, options)
    if state.is_between_runs:  # a copy in a worker loads its state of the epoch before, and is told the one that begins
        pairs = zip_longest(those_told, news)
        news = tuple(each.epoch if counting([each]) else told for each, told in pairs)
    starts = _starts(options, state, news)
    if starts is not None and options.is_inline and state.is_between_runs and _has_dataset(options, starts[0]):
        # Before anything of the run is drawn: the dataset's state may set a global generator.
        options.dataset.load_state_dict(starts[0].snapshot["dataset"])
        tell(listeners(options.dataset), news, again=not counting([options.dataset]))
        starts = {0: WorkerStart()}
    return at_iter, samplers, starts


def _begin_epoch(
    options: Options, runs: Runs, samplers: SamplerState, last: Sequence[int | None] | None
) -> SamplerState:
    """Have what counts epochs count them; return where samplers are, or that they say it themselves."""
    runs.set_epochs.begin_epoch(options, last=last)
    if samplers.state is None or samplers.passes:
        for sampler in samplers_within(options.index_sampler):
            if isinstance(sampler, ResumableSampler):  # its newest iterator may have been left, in the same epoch
                sampler.announce_reading()
    return samplers if samplers.state is not None else samplers._replace(state=own_state(options.index_sampler))


def _repeat_passes(options: Options, state: LoaderState, runs: Runs) -> None:
    """Have samplers be read as they were in epochs that are over or were left: so they do what they do then."""
    index_sampler, states = options.index_sampler, unplain(state.samplers)
    if states is None or not state.passes:
        return
    chosen = runs.set_epochs.since_load(options)
    load_samplers(index_sampler, states, ())
    for number, answers in enumerate(state.passes):
        keys = iter(index_sampler)
        # An iterator that follows consumers goes on where they are, and waits for what comes. One that was not read has
        # not iterated over the sampler within, if it is torch's.
        if answers and not hasattr(keys, "follow"):
            Plan(index_sampler, keys, Progress(), Pace()).resume(None if number else states, answers)
    tell(samplers_within(index_sampler), chosen)


def _generator_keys(options: Options, state: LoaderState | None, runs: Runs, epoch: int) -> str:
    """Return the keys of generators that the dataset holds: of its own, or of the epoch that goes on. As JSON."""
    generators = runs.generators(options)
    keys = runs.generator_keys.following(generators, epoch)
    if state is not None and not state.is_between_runs:
        keys |= state.generator_keys
    runs.generator_keys = GeneratorKeys(generators, keys)
    return json.dumps(keys)


# ------------------------------------------------------------------------------------------------------ 3. as it was


def draw_seed(options: Options) -> int:
    """Draw a base seed as torch's iterator does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=options.generator).item())


def _as_saved(options: Options, there: LoaderState, drawn: Drawn, rng: RNGSnapshot, loaded: list[Any]) -> Drawn:
    """Return the seeds of a state, and an iterator over keys that is still to be read.

    Args:
        options: See `begin`.
        there: Where the run begins.
        drawn: By torch's iterator.
        rng: The generators.
        loaded: Where they were before that.
    """
    # The base seed that is drawn without workers is one that nobody wants where persistent ones had theirs.
    has_drawn_more = there.is_between_runs and there.keeps_seed and options.is_inline
    if drawn.num_yielded or has_drawn_more:  # otherwise samplers are iterated over once: they may count that
        rng.restore(loaded)
        drawn = drawn._replace(keys=iter(options.index_sampler))
        if not there.keeps_seed and (options.is_inline or there.position):
            draw_seed(options)
    if there.base_seed is not None:
        drawn = drawn._replace(base_seed=there.base_seed, shared_seed=there.shared_seed)
    return drawn


def _key(options: Options, there: LoaderState, drawn: Drawn, had_seed: Checkpointer | None) -> tuple[int, int, int]:
    """Return the seeds of batches: base seed, how many runs have had it before, rank.

    Args:
        options: See `begin`.
        there: Where the run begins.
        drawn: With the base seed.
        had_seed: The run that has had the same base seed, or None.
    """
    reruns = there.reruns if there.keeps_seed or had_seed is None else had_seed.key[1] + 1
    return drawn.base_seed, reruns, data_rank(options)


def _plan(options: Options, there: LoaderState, progress: Progress, keys: Iterator[Any], order: OrderDraw) -> Plan:
    """Return the plan, from where the run begins."""
    # A stream that this process reads draws nothing at the first key; its state may have set the generators.
    goes_on = options.is_inline and options.is_iterable and not there.is_between_runs and there.workers is not None
    drawn_by = None if goes_on and there.position else order
    plan = Plan(options.index_sampler, keys, progress, Pace(), is_batched=options.auto_collation, order=drawn_by)
    if there.position and not options.is_iterable:
        plan.resume(None if there.passes else unplain(there.samplers), there.drawn)
    return plan


def _progress(
    options: Options,
    there: LoaderState,
    key: tuple[int, int, int],
    workers: dict[int, WorkerStart] | None,
    samplers: SamplerState,
) -> Progress:
    """Return how far the run is before its first batch."""
    sample = there.position * (options.batch_size or 1) if there.sample < 0 else there.sample
    seeds = None if options.is_iterable else key
    return Progress(
        there.position,
        there.ahead,
        in_order=options.in_order,
        tracks=make_tracks(workers, seeds, overlaps=options.overlaps),
        next_worker=there.next_worker,
        bad_count=there.bad_count,
        sample=sample if options.knows_places else 0,
        knows_places=options.knows_places,
        samplers=samplers,
    )


# -------------------------------------------------------------------------------------------------------- the dataset


def _has_dataset(options: Options, start: WorkerStart) -> bool:
    """Whether a state has where the dataset is, with no batches since then that are to be made again."""
    return bool(start.snapshot) and not start.made and is_stateful(options.dataset)


def _starts(
    options: Options, state: LoaderState | None, news: tuple[int | None, ...] = ()
) -> dict[int, WorkerStart] | None:
    """Return where workers begin, if the dataset is one that they have a place or a state in."""
    if not options.is_iterable and not (options.snapshot_every and is_stateful(options.dataset)):
        return None
    anew = {worker: WorkerStart() for worker in range(options.num_at_start)}
    _warn_of_other_numbers(options, state)
    if state is None or (starts := state.starts) is None:
        return anew
    if len(starts) != len(anew):
        log.warning(
            "The state has those of the dataset in %d workers, and there are %d now: the dataset begins anew.",
            len(starts),
            len(anew),
        )
        return anew
    again = sum(start.batches + len(start.ahead) for start in starts.values() if start.snapshot is None)
    if again and leaves_out_buffer(options.dataset):
        log.warning(
            "The state of a shuffled stream of `datasets` lacks what is in its shuffle buffer. To resume exactly, the "
            "stream is read again: %d batches are read and dropped.",
            again,
        )
    elif options.is_iterable and again:
        log.warning(
            "Neither the dataset nor its iterator has given a state (state_dict, load_state_dict): to resume, %d "
            "batches are read again and dropped.%s",
            again,
            _what_else_counts(options, state),
        )
    return {worker: start.told(news) for worker, start in starts.items()}


def _what_else_counts(options: Options, state: LoaderState) -> str:
    """Return what to say of the random numbers of a stream that is read again."""
    if len(json.loads(state.at_iter)) != len(order_generators(options)):
        return (
            " They were read with workers, or without, and now it is the other way: what the stream draws from global "
            "random generators is not the same."
        )
    if options.is_inline:
        return " What it draws from global random generators while it is read depends on what else draws from them."
    return ""


def reads_again(options: Options, starts: dict[int, WorkerStart] | None) -> bool:
    """Whether this process itself reads a stream again, from its beginning to where the run begins."""
    is_here = options.is_inline and options.is_iterable
    return is_here and starts is not None and starts[0].snapshot is None and starts[0].gaps() != [0]


def _warn_of_other_numbers(options: Options, state: LoaderState | None) -> None:
    """Say that workers draw other numbers for a stream than those that had drawn for earlier epochs as well."""
    if state is None or not state.has_past or not (options.is_iterable and options.has_workers):
        return
    starts = state.starts or {0: WorkerStart()}
    if any(start.snapshot is None or start.snapshot.get("draws") for start in starts.values()):
        log.warning(
            "The state is of persistent workers that had read the stream in epochs before. Their random generators had "
            "moved on from epoch to epoch, and those of the workers that start now have not: if the stream draws from "
            "the global generators, it yields other numbers. Draw from asyncloader.sample_rng(), or have the dataset "
            "provide its state, with a generator of its own in it."
        )


def _known(
    options: Options, starts: dict[int, WorkerStart] | None, last: Checkpointer | None, notice: EpochNotice
) -> dict[int, WorkerStart] | None:
    """Return where datasets are before the first batch, as far as this process knows."""
    known = (last and last.carried()) or starts
    if known and last is not None:  # the datasets were told the epoch since
        known = {worker: start.told(notice.since(last.notice)) for worker, start in known.items()}
    if starts is not None and not options.has_workers and starts[0] == WorkerStart():
        return {0: dataset_here(options.dataset, options.snapshot_every)}
    return known and dict(known)
