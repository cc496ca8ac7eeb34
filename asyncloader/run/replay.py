"""A batch of a run by its number, made again, while nothing else moves.

    epoch, number ──> a state of that run ──> begun on copies of samplers and generators, read up to there ──> keys
                                     keys, number, seeds ──> a run of this one batch, in one worker ──> batch

A batch of a map-style dataset depends on its keys, its number and the seeds of its run. Keys come as they come at a
resume (:mod:`asyncloader.run.run_start`), and the batch as any other, so there is one way to each, and a run notes
nothing for it. Batches whose keys nobody can be sure of are refused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from asyncloader.epochs import as_number
from asyncloader.errors import ConfigurationError
from asyncloader.messages.indices import listed
from asyncloader.messages.snapshot import Frozen
from asyncloader.options import Options
from asyncloader.protocols import SuppliesKeys, is_stateful, members
from asyncloader.run.checkpoint import Checkpointer, initial_state
from asyncloader.run.data_rank import data_rank
from asyncloader.run.fits import check
from asyncloader.run.inline_iterator import InlineIterator
from asyncloader.run.plan import samplers_within
from asyncloader.run.rng_snapshot import KNOWN_SAMPLERS
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.state import LoaderState
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.samplers.ordered import OrderedSampler, ResumableSampler
from asyncloader.seeding.generators import GLOBAL, left_alone
from asyncloader.seeding.own_generators import generators_of

_END: Any = object()
_ROWLESS = (SequentialSampler, RandomSampler, DistributedSampler, BatchSampler, range)
"""Samplers without rows of numbers, which could be changed in place without a trace."""
_OF_THE_RUN = ("collate_fn", "worker_init_fn", "on_error", "seeding", "concurrency", "drop_last", "generator")
"""Options that a batch depends on: they are those of its run, whatever was set since."""


class Found(NamedTuple):
    """A batch that was found.

    Attributes:
        twin: A loader like the one that was asked, over copies of its samplers and generators.
        keys: The keys of its samples, or of its one sample without batching.
        first: Number of the first sample in the order of the epoch, where that is known; otherwise 0.
        seeds: Makes states of the run on copies, which has the seeds.
        told: The epoch that each of the dataset's listeners had been told when the run began; nothing if it has not
            begun yet.
    """

    twin: Any
    keys: Any
    first: int
    seeds: Checkpointer
    told: list[int | None]


def keys_of(loader: Any, epoch: int, number: int) -> Any:
    """Return which samples a batch has. See `asyncloader.DataLoader.batch_keys`."""
    return _find(loader, _whole("epoch", epoch), _whole("number", number)).keys


def batch_of(loader: Any, epoch: int, number: int) -> Any:
    """Make a batch again. See `asyncloader.DataLoader.batch`."""
    number = _whole("number", number)
    found = _find(loader, _whole("epoch", epoch), number)
    _refuse_epoch(loader, found.told)
    state = _of_one_batch(found, number)
    twin, runs = found.twin, found.twin._runs
    options: Options = twin._loader_options()
    runs.set_epochs.of_past_run = [] if options.is_in_process else found.told
    runs.set_epochs.note_load(options)  # what was told by now is no other epoch than that of the batch
    iterator: Any
    with left_alone(_drawn_from(options)):
        if options.is_inline:
            iterator = InlineIterator(twin, options, runs, state)
        else:
            iterator = WorkerIterator(twin, options, runs, wait_for_start=True, state=state)
        with iterator:
            for batch in iterator:
                return batch
    raise IndexError(f"batch {number} of epoch {epoch} is left out: none of its samples could be loaded")


def _find(loader: Any, epoch: int, number: int) -> Found:
    runs: Runs = loader._runs
    twin = copy.copy(loader)
    _refuse(twin._loader_options(), None)
    past = _past(runs, epoch)
    if past is not None:
        vars(twin).update((name, getattr(past.options, name)) for name in _OF_THE_RUN)
    _refuse(twin._loader_options(), past)
    state = runs.loaded if past is None else past.at_beginning()
    assert state is not None
    check(state, twin._loader_options())  # what samplers hold may have changed since the state was loaded
    _copy_samplers(twin)
    options: Options = twin._loader_options()
    if number < state.position:
        raise IndexError(
            f"batch {number} lies before the state that this run was resumed from, which is of batch "
            f"{state.position}: load one of epoch {epoch} that was saved before it"
        )
    with left_alone(_drawn_from(options)):
        there = _put(twin, options, state, number)
        start = _begun(twin, options, there)
        keys = next(islice(start.plan, number - there.position, None), _END)
    if keys is _END:
        raise IndexError(f"epoch {epoch} has no batch {number}; they are counted from 0")
    first = start.checkpointer.progress.placed(number, keys).first if options.knows_places else 0
    return Found(twin, listed(keys), first, start.checkpointer, state.dataset_epochs)


def _whole(name: str, given: Any) -> int:
    number = None if isinstance(given, bool) else as_number(given)
    if number is None:
        raise ConfigurationError(f"{name} should be an integer, but got {given!r}")
    if number < 0:
        raise IndexError(f"{name} is counted from 0, but got {number}")
    return number


def _past(runs: Runs, epoch: int) -> Checkpointer | None:
    """Return what makes states of a run; None for that which a loaded state goes on with.

    Raises:
        IndexError: if nothing is known of the run.
    """
    if runs.loaded is not None:
        if (known := [runs.loaded.epoch]) == [epoch]:
            return None
    else:
        past = tuple(runs.past)  # other threads may begin runs
        for checkpointer in reversed(past):
            if checkpointer.epoch == epoch:
                return checkpointer
        known = sorted({checkpointer.epoch for checkpointer in past})
    raise IndexError(
        f"nothing is known of epoch {epoch}: this loader knows of "
        + (f"epochs {known}" if known else "none, for it was not iterated over")
        + ". Load a state that was saved in that epoch, or at the end of the one before."
    )


def _refuse(options: Options, past: Checkpointer | None) -> None:
    """Say why batches are no function of their number, or why nobody can be sure of their keys, if so.

    Args:
        options: The loader's.
        past: The run; None for that of a loaded state, whose checksums the rows of samplers are compared with.
    """
    samplers = [each for each in samplers_within(options.index_sampler) if not isinstance(each, ResumableSampler)]
    unknown = [each for each in samplers if type(each) not in (*KNOWN_SAMPLERS, list, tuple, range)]
    rows = [each for each in samplers if type(each) not in _ROWLESS]
    if options.is_iterable:
        why = "an iterable dataset is read from its beginning on"
    elif isinstance(options.dataset, SuppliesKeys):
        why = "its keys arrive as time goes by"
    elif options.seeding == "worker" and options.has_workers:
        why = 'seeding="worker" keeps streams of random numbers, which depend on what each worker had made before'
    elif options.snapshot_every and is_stateful(options.dataset):
        why = (
            "the dataset has a state of its own, which depends on what was read before (snapshot_every_n_steps=0 says "
            "that samples do not)"
        )
    elif unknown:
        why = (
            f"the order of {type(unknown[0]).__name__} cannot be known again, as it may depend on anything. That of "
            "torch's samplers is known, and that of asyncloader.samplers"
        )
    elif rows and past is not None:
        why = f"what {type(rows[0]).__name__} holds may have changed since: load a state of it, which says so"
    else:
        return
    raise ConfigurationError(f"batches of this loader cannot be made again by their number: {why}")


def _refuse_epoch(loader: Any, told: list[int | None]) -> None:
    """See that the dataset can be at the epoch of a run: the one of this process is told nothing here."""
    options: Options = loader._loader_options()
    for now, then in zip(loader._runs.set_epochs.of_dataset(options.dataset), told, strict=False):
        if now != then and (options.is_in_process or then is None):
            raise ConfigurationError(
                f"the dataset is at epoch {now} in this process, and was at epoch {then} in that run: call "
                "set_epoch before batch, or use worker processes, whose copies of it are told that epoch; none can be "
                "told that there was none"
            )


def _copy_samplers(twin: Any) -> None:
    """Put copies of its samplers and generators into a loader. What they only read is left as it is.

    Raises:
        ConfigurationError: if they cannot be copied.
    """
    memo: dict[int, Any] = {id(each): each for each in (torch.default_generator, *members(twin.dataset))}
    for sampler in samplers_within(twin._index_sampler):
        is_torchs = type(sampler) in KNOWN_SAMPLERS
        parts = vars(sampler).items() if is_torchs and hasattr(sampler, "__dict__") else ()
        memo |= {id(part): part for name, part in parts if name not in ("sampler", "generator")}
    names = ("sampler", "batch_sampler", "generator")
    try:
        vars(twin).update(zip(names, copy.deepcopy([getattr(twin, name) for name in names], memo), strict=True))
    except Exception as error:
        raise ConfigurationError(
            f"the samplers of this loader cannot be copied ({type(error).__name__}: {error}), and to draw from them "
            "would move them: give them a __deepcopy__, or a __getstate__, without what cannot be"
        ) from error


def _drawn_from(options: Options) -> list[Any]:
    """List the generators of the trainer that may be drawn from meanwhile."""
    return [*GLOBAL, *generators_of(options.dataset, options.collate_fn).values()]


def _put(twin: Any, options: Options, state: LoaderState, number: int) -> LoaderState:
    """Return the state at the batch, where the sampler's order can be looked at anywhere, so that nothing is drawn."""
    index_sampler, by = options.index_sampler, number - state.position
    is_wrapped = type(index_sampler) is BatchSampler
    sampler = index_sampler.sampler if is_wrapped else index_sampler
    if not isinstance(sampler, OrderedSampler) or state.samplers is None or not by:
        return state
    with left_alone((*GLOBAL, *filter(None, [options.generator]))):  # the trainer may have set them for this run
        next(_begun(twin, options, state).plan, None)  # now its newest iterator is that of this run
    size = index_sampler.batch_size if is_wrapped else 1
    after = Frozen({"sampler": sampler.state_after((state.drawn + by) * size), "iterator": None}).plain()
    there = replace(state, samplers=after, drawn=0, passes=[], finished=False, position=number)
    return there if state.sample < 0 else replace(there, sample=state.sample + by * size)


def _begun(twin: Any, options: Options, state: LoaderState) -> RunStart:
    """Begin a run on the copies from a state. The dataset hears of no epoch: it is not read. No batch is left out."""
    seed: list[int] = []

    def draw_seed() -> None:
        seed.append(int(torch.empty((), dtype=torch.int64).random_(generator=options.generator).item()))

    def iterate() -> Drawn:
        keys = iter(options.index_sampler)
        if not seed:
            draw_seed()
        return Drawn(keys, seed[0], None)

    untold = replace(state, dataset_epochs=[], ahead=[])
    return begin(options, untold, copy.copy(twin._runs), iterate, prepare=None if options.is_inline else draw_seed)


def _of_one_batch(found: Found, number: int) -> LoaderState:
    """Have the twin give this batch alone, made by one worker if it has some; return the state it begins from."""
    twin = found.twin
    options: Options = twin._loader_options()
    vars(twin).update(
        {"batch_sampler": [found.keys]} if options.auto_collation else {"sampler": [found.keys]},
        num_workers=int(options.has_workers),
        prefetch_factor=1 if options.has_workers else None,
        persistent_workers=False,
        worker_backend="process" if options.provider is not None else twin.worker_backend,  # on this machine
        generator=torch.Generator(),  # its base seed is known, and the trainer's generator is not asked
        seeding_rank=data_rank(options),
        scheduling="static",
        max_errors=None,
        max_workers=None,
        max_worker_memory=None,
        trace=None,
    )
    base_seed, reruns, _ = (seeds := found.seeds).key
    state = initial_state(twin._loader_options(), seeds.epoch, seeds.generators)
    begun = replace(state, position=number, sample=found.first, base_seed=base_seed, reruns=reruns)
    return replace(begun, at_iter="[]")  # no generator is set
