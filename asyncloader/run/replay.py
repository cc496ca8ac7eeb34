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
from torch.utils.data import RandomSampler

from asyncloader.errors import ConfigurationError
from asyncloader.options import Options
from asyncloader.protocols import SuppliesKeys, is_stateful, members
from asyncloader.run.data_rank import data_rank
from asyncloader.run.fits import check
from asyncloader.run.inline_iterator import InlineIterator
from asyncloader.run.plan import samplers_within
from asyncloader.run.rng_snapshot import DRAW_NOTHING, KNOWN_SAMPLERS, restores_forgotten
from asyncloader.run.run_start import Drawn, RunStart, begin, draw_seed
from asyncloader.run.state import LoaderState
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.samplers.ordered import ResumableSampler, count_of
from asyncloader.seeding.generators import GLOBAL, left_alone
from asyncloader.seeding.own_generators import generators_of

_ROWLESS = (*DRAW_NOTHING, RandomSampler, range)
"""Samplers without rows of numbers, which could be changed in place without a trace."""
_OF_THE_RUN = ("collate_fn", "worker_init_fn", "on_error", "seeding", "concurrency", "drop_last", "generator")
"""Options that a batch depends on: they are those of its run, whatever was set since."""


class Found(NamedTuple):
    """A batch that was found.

    Attributes:
        twin: A loader like the one that was asked, over copies of its samplers and generators.
        keys: The keys of its samples, or of its one sample without batching.
        first: Number of the first sample in the order of the epoch, where that is known; otherwise 0.
        start: How its run has begun on the copies.
        told: The epoch that each of the dataset's listeners had been told when the run began; nothing if it has not
            begun yet.
    """

    twin: Any
    keys: Any
    first: int
    start: RunStart
    told: list[int | None]


def keys_of(loader: Any, epoch: int, number: int) -> Any:
    """Return which samples a batch has. See `asyncloader.DataLoader.batch_keys`."""
    return _find(loader, epoch, number).keys


def batch_of(loader: Any, epoch: int, number: int) -> Any:
    """Make a batch again. See `asyncloader.DataLoader.batch`."""
    found = _find(loader, epoch, number)
    _refuse_epoch(loader, found.told)
    state = _of_one_batch(found, number)
    twin, runs = found.twin, found.twin._runs
    options: Options = twin._loader_options()
    runs.set_epochs.of_past_run = [] if options.is_in_process else found.told
    runs.set_epochs.note_load(options)  # what was told by now is no other epoch than that of the batch
    iterator: Any
    with left_alone(_drawn_from(options)), restores_forgotten():
        if options.is_inline:
            iterator = InlineIterator(twin, options, runs, state)
        else:
            iterator = WorkerIterator(twin, options, runs, wait_for_start=True, state=state)
        with iterator:
            for batch in iterator:
                return batch
    raise IndexError(f"batch {number} of epoch {epoch} is left out: none of its samples could be loaded")


def _find(loader: Any, epoch: int, number: int) -> Found:
    epoch, number = (count_of(name, given, least=None) for name, given in (("epoch", epoch), ("number", number)))
    if min(epoch, number) < 0:
        raise IndexError(f"epochs and batches are counted from 0, but got batch {number} of epoch {epoch}")
    twin = copy.copy(loader)
    past = next((run for run in reversed((*loader._runs.past,)) if run.common.epoch == epoch), None)
    if past is not None:
        vars(twin).update((name, getattr(past.options, name)) for name in _OF_THE_RUN)
    _refuse(twin._loader_options(), _ROWLESS if past is not None else (*KNOWN_SAMPLERS, list, tuple, range))
    state: LoaderState | None = loader._runs.loaded if past is None else past.at_beginning()
    if state is None or state.epoch != epoch:
        raise IndexError(
            f"nothing is known of epoch {epoch}: a loader knows of the last 8 runs that it has begun itself, or of the "
            "one that a loaded state goes on with. Load a state that was saved in that epoch, or at the end of the one "
            "before."
        )
    check(state, twin._loader_options())  # what samplers hold may have changed since the state was loaded
    if number < state.position:
        raise IndexError(
            f"batch {number} lies before the state that this run was resumed from, which is of batch "
            f"{state.position}: load one of epoch {epoch} that was saved before it"
        )
    _copy_samplers(twin)
    options: Options = twin._loader_options()
    size = options.batch_size and options.index_sampler.batch_size if options.knows_places else 1
    if size is not None:  # otherwise the batches before it are read one by one, which counts their samples
        by = number - state.position
        sample = state.sample if state.sample < 0 else state.sample + size * by
        state = replace(state, position=number, drawn=state.drawn + by, sample=sample)
    with left_alone(_drawn_from(options)), restores_forgotten():
        start = _begun(twin, options, state)
        keys = [*islice(start.plan, number - state.position, number - state.position + 1)]
    if not keys:
        raise IndexError(f"epoch {epoch} has no batch {number}; they are counted from 0")
    first = start.checkpointer.progress.placed(number, keys[0]).first if options.knows_places else 0
    return Found(twin, keys[0], first, start, state.dataset_epochs)


def _refuse(options: Options, known: tuple[type, ...]) -> None:
    """Say why batches are no function of their number, or why nobody can be sure of their keys, if so.

    Args:
        options: The loader's.
        known: Kinds of samplers whose order is known, beside those of this package.
    """
    samplers = samplers_within(options.index_sampler)
    unknown = [each for each in samplers if not (type(each) in known or isinstance(each, ResumableSampler))]
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
            f"the order of {type(unknown[0]).__name__} cannot be known again, as what it draws from, or holds, may "
            "have changed. That of torch's samplers is known, and that of asyncloader.samplers; where a sampler of "
            "torch's holds numbers, or is a list, load a state of it, which has their checksum"
        )
    else:
        return
    raise ConfigurationError(f"batches of this loader cannot be made again by their number: {why}")


def _refuse_epoch(loader: Any, told: list[int | None]) -> None:
    """See that the dataset can be at the epoch of a run: the one of this process is told nothing here."""
    options: Options = loader._loader_options()
    for now, then in zip(loader._runs.set_epochs.of_dataset(options), told, strict=False):
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


def _begun(twin: Any, options: Options, state: LoaderState) -> RunStart:
    """Begin a run on the copies from a state. The dataset hears of no epoch: it is not read. No batch is left out."""
    seeds: list[int] = []

    def prepare() -> None:
        seeds.append(draw_seed(options))

    def iterate() -> Drawn:
        keys = iter(options.index_sampler)
        return Drawn(keys, seeds[0] if seeds else draw_seed(options), None)

    untold = replace(state, dataset_epochs=[], ahead=[])
    return begin(options, untold, copy.copy(twin._runs), iterate, prepare=None if options.is_inline else prepare)


def _of_one_batch(found: Found, number: int) -> LoaderState:
    """Have the twin give this batch alone, made by one worker if it has some; return the state it begins from."""
    twin = found.twin
    options: Options = twin._loader_options()
    vars(twin).update(
        {"batch_sampler": [found.keys]} if options.auto_collation else {"sampler": [found.keys]},
        num_workers=int(options.has_workers),
        persistent_workers=False,
        worker_backend="process" if options.provider is not None else twin.worker_backend,  # on this machine
        generator=torch.Generator(),  # its base seed is known, and the trainer's generator is not asked
        seeding_rank=data_rank(options),
        **dict.fromkeys(("max_errors", "max_workers", "max_worker_memory", "trace")),
    )
    # No generator is set, and nobody is told an epoch.
    common = found.start.checkpointer.common
    return replace(common, at_iter="[]", set_epochs=[], position=number, sample=found.first)
