"""One batch of a run by its number, made again, while nothing else moves.

    epoch, number ──> a state of that run, moved there ──> begun on copies of samplers and generators ──> keys
                                        keys, number, seeds ──> a run of this one batch, in one worker ──> batch

A batch of a map-style dataset depends on its keys, its number and the seeds of its run. Keys come as they come at a
resume (:mod:`asyncloader.run.run_start`), and the batch as any other, so there is one way to each. Samplers whose order
can be looked at anywhere are put to the batch; others draw again what comes before it, and no data are read for that.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from asyncloader.engine.actions import VOID
from asyncloader.epochs import listeners
from asyncloader.errors import ConfigurationError
from asyncloader.messages.indices import listed
from asyncloader.messages.snapshot import Frozen, unplain
from asyncloader.options import Options
from asyncloader.protocols import SuppliesKeys, is_stateful, members, probe
from asyncloader.run.checkpoint import Checkpointer, initial_state, moved
from asyncloader.run.data_rank import data_rank
from asyncloader.run.inline_iterator import InlineIterator
from asyncloader.run.plan import samplers_within, stateful_sampler
from asyncloader.run.rng_snapshot import KNOWN_SAMPLERS
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.samplers.ordered import OrderedSampler, ResumableSampler
from asyncloader.seeding.generators import GLOBAL, restore, states_of
from asyncloader.seeding.turns import untouched

_END: Any = object()
_HOW_FAR = frozenset({"cursor", "epoch", "world", "version"})
"""What of the state of a sampler like ours changes as it is read."""


class Found(NamedTuple):
    """A batch that was found.

    Attributes:
        keys: Of its samples, or of its one sample without batching.
        first: Number of the first sample in the order of the epoch, where that is known; otherwise 0.
        seeds: Makes states of the run on copies, which has the seeds.
        told: What each of the dataset's listeners had been told when the run began; nothing if it has not begun yet.
    """

    keys: Any
    first: int
    seeds: Checkpointer
    told: list[int | None]


def find(twin: Any, runs: Runs, epoch: int, number: int) -> Found:
    """Return which samples a batch has. No generator or sampler of the trainer's is moved.

    Args:
        twin: A loader over copies of the samplers: see `apart`.
        runs: Of the loader itself.
        epoch: The run: how many of the loader there were before it.
        number: Of the batch in that run, from 0.

    Raises:
        IndexError: if the run has no such batch, or nothing is known of it here; it says what is.
        ConfigurationError: if batches of this loader are not a function of their number; it says why.
    """
    options: Options = twin._loader_options()
    _refuse(options)
    if number < 0:
        raise IndexError(f"batches are counted from 0, but got {number}")
    past, samples = _past(runs, epoch), _samples_in_each(options)
    state = runs.loaded if past is None else past.state_before(number)
    assert state is not None
    began = int(state["position"])
    # What comes before the batch is drawn where its samples have to be counted, or the sampler is not to be trusted.
    is_read = (options.knows_places and samples is None) or (past is not None and not _is_known(options.index_sampler))
    if is_read and past is not None:
        state = past.state_before(began)
    there = moved(state, began if is_read else number, samples)
    if there["drawn"] < 0 or number < there["position"]:
        raise IndexError(
            f"batch {number} lies before the state that this run was resumed from, which is of batch {began}: load one "
            f"of epoch {epoch} that was saved before it"
        )
    if past is not None:
        _refuse_changes(there, past.last_sampler_state(), stateful_sampler(options.index_sampler))
    with kept():
        start = _begun(twin, options, there if is_read else _put(twin, there, options))
        progress = start.checkpointer.progress
        keys = _read(start.plan, number - there["position"], past.progress.first_keys if is_read and past else None)
    if keys is _END:
        raise IndexError(f"epoch {epoch} has {progress.read} batches, counted from 0: none {number}")
    if keys is VOID:
        raise IndexError(f"batch {number} of epoch {epoch} is left out: all of its samples are excluded")
    first = progress.placed(number, keys).first if options.knows_places else 0
    return Found(listed(keys), first, start.checkpointer, state["dataset_epochs"])


def _read(plan: Iterator[Any], count: int, first: Any) -> Any:
    """Return the keys after so many batches, or that there are none.

    Raises:
        ConfigurationError: if the sampler begins otherwise than it had.
    """
    keys = next(plan, _END)
    if first is not None and not _are_alike(keys, first):
        raise ConfigurationError(
            "the sampler does not give the same order again: what it is drawn from is neither in its state (state_dict "
            "and load_state_dict) nor in a generator of torch's, numpy's or Python's that the loader knows of"
        )
    return keys if count == 0 else next(islice(plan, count - 1, None), _END)


def _are_alike(keys: Any, others: Any) -> bool:
    try:
        return bool(listed(keys) == listed(others))
    except Exception:  # two tensors, for instance
        return pickle.dumps(keys) == pickle.dumps(others)


def _is_known(index_sampler: Any) -> bool:
    """Whether a sampler is drawn from known generators, or has a state that says all."""
    kinds = (*KNOWN_SAMPLERS, list, tuple, range)
    return is_stateful(index_sampler) or all(
        isinstance(sampler, kinds) or is_stateful(sampler) for sampler in samplers_within(index_sampler)
    )


def _samples_in_each(options: Options) -> int | None:
    """Return how many samples each batch has, but for the last one; None if they differ."""
    if not options.auto_collation:
        return 1
    return options.index_sampler.batch_size if type(options.index_sampler) is BatchSampler else None


def _refuse(options: Options) -> None:
    """Say why batches are no function of their number, if so."""
    if options.is_iterable:
        why = "an iterable dataset is read from its beginning on"
    elif isinstance(options.dataset, SuppliesKeys) or any(
        probe(sampler, "keys_arrive") is True for sampler in samplers_within(options.index_sampler)
    ):
        why = "its keys arrive as time goes by"
    elif options.seeding == "worker" and options.has_workers:
        why = 'seeding="worker" keeps streams of random numbers, which depend on what each worker had made before'
    elif options.snapshot_every and is_stateful(options.dataset):
        why = (
            "the dataset has a state of its own, which depends on what was read before (snapshot_every_n_steps=0 says "
            "that samples do not)"
        )
    else:
        return
    raise ConfigurationError(f"batches of this loader cannot be made again by their number: {why}")


def _past(runs: Runs, epoch: int) -> Checkpointer | None:
    """Return what makes states of a run; None for that which a loaded state goes on with.

    Raises:
        IndexError: if nothing is known of the run.
    """
    if runs.loaded is not None:
        known = [int(runs.loaded["epoch"])]
        if known == [epoch]:
            return None
    else:
        for checkpointer in reversed(runs.past):
            if checkpointer.epoch == epoch:
                return checkpointer
        known = sorted({checkpointer.epoch for checkpointer in runs.past})
    raise IndexError(
        f"nothing is known of epoch {epoch}: this loader knows of "
        + (f"epochs {known}" if known else "none, for it was not iterated over")
        + ". Load a state that was saved in that epoch, or at the end of the one before."
    )


def _refuse_changes(state: dict[str, Any], last: dict[str, Any] | None, sampler: Any) -> None:
    """Say so if a sampler of the user's was changed later in the run. States of ours have what was changed, and where.

    Raises:
        ConfigurationError: if it was: nobody knows from which batch on that holds.
    """
    states = unplain(state["samplers"])
    if states is None or last is None or not isinstance(states["sampler"], dict) or last["sampler"] is None:
        return
    if isinstance(sampler, ResumableSampler) or not callable(probe(sampler, "state_after")):
        return  # a sampler without `state_after` may keep anything in its state
    mine = states["sampler"]
    changed = sorted(name for name, now in last["sampler"].items() if name not in _HOW_FAR and mine.get(name) != now)
    if changed:
        raise ConfigurationError(
            f"{', '.join(changed)} of {type(sampler).__name__} changed in this run, and which batches that was "
            "for is not known any more: load a state that was saved after the last change before the batch"
        )


def _put(twin: Any, state: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return a state whose sampler is at the batch, where its order can be looked at anywhere."""
    index_sampler = options.index_sampler
    is_wrapped = type(index_sampler) is BatchSampler
    sampler = index_sampler.sampler if is_wrapped else index_sampler
    if not isinstance(sampler, OrderedSampler) or state["samplers"] is None:
        return state
    batches = state["position"] if state["is_over"] else state["drawn"]
    if batches == 0:
        return state
    at_first = {**state, "position": 0, "drawn": 0} if state["is_over"] else {**state, "drawn": 0}
    next(_begun(twin, options, at_first).plan, None)  # now its newest iterator is that of this run
    after = sampler.state_after(batches * (index_sampler.batch_size if is_wrapped else 1))
    there = Frozen({"sampler": after, "iterator": None}).plain()
    return {**state, "samplers": there, "drawn": 0, "is_over": False, "finished": False}


def _begun(twin: Any, options: Options, state: dict[str, Any]) -> RunStart:
    """Begin a run on the copies from a state. The dataset hears of no epoch: it is not read."""
    seed: list[int] = []

    def draw_seed() -> None:
        seed.append(int(torch.empty((), dtype=torch.int64).random_(generator=options.generator).item()))

    def iterate() -> Drawn:
        keys = iter(options.index_sampler)
        if not seed:
            draw_seed()
        return Drawn(keys, seed[0], None)

    here = not (options.has_workers or options.overlaps)
    unheard = {**state, "dataset_epochs": []}
    return begin(options, unheard, copy.copy(twin._runs), iterate, prepare=None if here else draw_seed, inline=here)


# ------------------------------------------------------------------------------------------------------ one batch


def apart(loader: Any) -> Any:
    """Return a loader like this one, over copies of its samplers and generators and with no run yet.

    Raises:
        ConfigurationError: if they cannot be copied.
    """
    memo: dict[int, Any] = {id(each): each for each in members(loader.dataset)}
    for holder in (loader, *samplers_within(loader._index_sampler)):
        own = probe(holder, "generator")
        if isinstance(own, torch.Generator):
            memo[id(own)] = own if own is torch.default_generator else own.clone_state()
    names = ("sampler", "batch_sampler", "generator")
    twin = copy.copy(loader)
    try:
        copies = copy.deepcopy([getattr(loader, name) for name in names], memo)
    except Exception as error:
        raise ConfigurationError(
            f"the samplers of this loader cannot be copied ({type(error).__name__}: {error}), and to draw from them "
            "would move them: give them a __deepcopy__, or a __getstate__, without what cannot be"
        ) from error
    vars(twin).update(zip(names, copies, strict=True), _iterator=None)
    return twin


def of_one_batch(twin: Any, found: Found, number: int) -> dict[str, Any]:
    """Have a loader give one batch, which one worker makes if it has any; return the state to begin its run from."""
    options: Options = twin._loader_options()
    keys = [found.keys]
    vars(twin).update(
        {"batch_sampler": keys} if options.auto_collation else {"sampler": keys},
        num_workers=int(options.has_workers),
        prefetch_factor=1 if options.has_workers else None,
        persistent_workers=False,
        worker_backend="process" if options.provider is not None else twin.worker_backend,
        seeding=options.seeding,
        seeding_rank=data_rank(options),
        scheduling="static",
        prefetch_epochs=0,
        max_workers=None,
        max_tasks_per_child=None,
        max_worker_memory=None,
        trace=None,
    )
    begun = {"position": number, "sample": found.first, "base_seed": found.seeds.base_seed, "inline": True}
    return {**initial_state(twin._loader_options(), found.seeds.epoch), **begun}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the global generators as they are, whatever is drawn from them meanwhile in this thread."""
    with untouched():
        states = states_of(GLOBAL)
    try:
        yield
    finally:
        with untouched():
            try:
                restore(states)
            except BaseException:  # Ctrl-C: all are set once more
                restore(states)
                raise


@contextlib.contextmanager
def _telling(dataset: Any, runs: Runs, epochs: list[int | None], *, is_read: bool) -> Iterator[None]:
    """Have the dataset be at the epoch of a run meanwhile; copies that other runs make of it hear which theirs is.

    Args:
        dataset: The loader's.
        runs: The loader's.
        epochs: What each of the dataset's listeners had been told before that run.
        is_read: A run that goes on reads this very dataset.

    Raises:
        ConfigurationError: if it does, and at another epoch.
    """
    told = zip(listeners(dataset), runs.heard(dataset), epochs, strict=False)
    changes = [(one, now.number, then) for one, now, then in told if then not in (None, now.number)]
    if changes and is_read:
        raise ConfigurationError(
            f"the dataset is at epoch {changes[0][1]} of a run that goes on in this process, so it cannot be told "
            f"epoch {changes[0][2]} now: close() that run first, or use worker processes"
        )
    with runs.telling():
        try:
            for one, _, then in changes:
                one.set_epoch(then)
            yield
        finally:
            for one, now, _ in changes:
                if now is not None:
                    one.set_epoch(now)


@contextlib.contextmanager
def making(loader: Any, epoch: int, number: int, *, wait_for_start: bool) -> Iterator[Any]:
    """Make a batch again: give the iterator over it alone, which ends at once if the batch was left out.

    Args:
        loader: Whose batch.
        epoch: See `find`.
        number: See `find`.
        wait_for_start: Workers are there when this returns.

    Raises:
        IndexError, ConfigurationError: see `find`.
    """
    twin, runs = apart(loader), loader._runs
    found = find(twin, runs, epoch, number)
    state = of_one_batch(twin, found, number)
    options: Options = twin._loader_options()
    is_read = options.is_in_process and runs.latest is not None and not runs.latest.progress.finished
    with _telling(loader.dataset, runs, found.told, is_read=is_read):
        with kept():
            if options.has_workers or options.overlaps:
                iterator: Any = WorkerIterator(twin, options, twin._runs, wait_for_start=wait_for_start, state=state)
            else:
                iterator = InlineIterator(twin, options, twin._runs, state)
        try:
            yield iterator
        finally:
            iterator.close()


def was_left_out(epoch: int, number: int) -> IndexError:
    """Return the error for a batch that there is not, as none of its samples is good."""
    return IndexError(f"batch {number} of epoch {epoch} is left out: none of its samples could be loaded")
