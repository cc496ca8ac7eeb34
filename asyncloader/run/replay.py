"""A batch of a run by its number, made again, while nothing else moves.

    epoch, number ──> a state of that run, moved there ──> begun on copies of samplers and generators ──> keys
                                        keys, number, seeds ──> a run of this one batch, in one worker ──> batch

A batch of a map-style dataset depends on its keys, its number and the seeds of its run. Keys come as they come at a
resume (:mod:`asyncloader.run.run_start`), and the batch as any other, so there is one way to each. Samplers whose order
can be looked at anywhere are put to the batch; others draw again what comes before it, and no data are read for that.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from asyncloader.engine.actions import VOID
from asyncloader.epochs import Told, as_number, listeners
from asyncloader.errors import ConfigurationError
from asyncloader.messages.indices import listed
from asyncloader.messages.snapshot import Frozen
from asyncloader.options import Options
from asyncloader.protocols import SuppliesKeys, is_stateful, members, probe
from asyncloader.run.checkpoint import Checkpointer, initial_state, moved
from asyncloader.run.data_rank import data_rank
from asyncloader.run.device_iterator import on_device
from asyncloader.run.exclusions import Exclusions
from asyncloader.run.inline_iterator import InlineIterator
from asyncloader.run.plan import digest, samplers_within
from asyncloader.run.rng_snapshot import DRAW_FROM_TORCH, KNOWN_SAMPLERS, draws_once
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.samplers.ordered import OrderedSampler, ResumableSampler
from asyncloader.seeding.generators import GLOBAL, left_alone, restore, states_of
from asyncloader.seeding.own_generators import generators_of
from asyncloader.seeding.turns import untouched

_END: Any = object()


class Found(NamedTuple):
    """A batch that was found.

    Attributes:
        keys: The keys of its samples, or of its one sample without batching.
        number: The number of the batch.
        first: Number of the first sample in the order of the epoch, where that is known; otherwise 0.
        made_with: The options of its run.
        seeds: Makes states of the run on copies, which has the seeds.
        told: The epoch that each of the dataset's listeners had been told when the run began; nothing if it has not
            begun yet.
    """

    keys: Any
    number: int
    first: int
    made_with: Options
    seeds: Checkpointer
    told: list[int | None]


def find(twin: Any, runs: Runs, epoch: int, number: int) -> Found:
    """Return which samples a batch has. No generator or sampler of the trainer's is moved.

    Args:
        twin: A loader over copies of the samplers: see `apart`.
        runs: The runs of the loader itself.
        epoch: The run: how many of the loader there were before it.
        number: The number of the batch in that run, from 0.

    Raises:
        IndexError: if the run has no such batch, or nothing is known of it here; it says what is.
        ConfigurationError: if batches of this loader are not a function of their number; it says why.
    """
    options: Options = twin._loader_options()
    _refuse(options)
    epoch, number = _whole("epoch", epoch), _whole("number", number)
    past, samples = _past(runs, epoch), _samples_in_each(options)
    state = runs.begins_from if past is None else past.at_beginning()
    assert state is not None
    has_to_count = options.knows_places and samples is None  # the samples of all batches before it
    there = moved(state, int(state["position"]) if has_to_count else number, samples)
    if there["drawn"] < 0 or number < there["position"]:
        raise IndexError(
            f"batch {number} lies before the state that this run was resumed from, which is of batch "
            f"{state['position']}: load one of epoch {epoch} that was saved before it"
        )
    with _kept(options):
        start = _begun(twin, options, there if has_to_count else _put(twin, there, options))
        keys = next(islice(start.plan, number - there["position"], None), _END)
    known = 0 if past is None else past.progress.digest_of(number)
    if known and known != (0 if keys is _END else digest(keys)):
        raise ConfigurationError(
            "the sampler does not give the same order again: what it is drawn from is neither in its state (state_dict "
            "and load_state_dict) nor in a generator of torch's, numpy's or Python's that the loader knows of; or it, "
            "its epoch or the loader's generator was changed after the run had begun"
        )
    if keys is _END:
        raise IndexError(f"epoch {epoch} has no batch {number}; they are counted from 0")
    if keys is VOID:
        raise IndexError(f"batch {number} of epoch {epoch} is left out: all of its samples are excluded")
    progress = start.checkpointer.progress
    first = progress.placed(number, keys).first if options.knows_places else 0
    made_with = options if past is None else past.options
    return Found(listed(keys), number, first, made_with, start.checkpointer, state["dataset_epochs"])


def _whole(name: str, given: Any) -> int:
    number = None if isinstance(given, bool) else as_number(given)
    if number is None:
        raise ConfigurationError(f"{name} should be an integer, but got {given!r}")
    if number < 0:
        raise IndexError(f"{name} is counted from 0, but got {number}")
    return number


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


def _put(twin: Any, state: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return a state whose sampler is at the batch, where its order can be looked at anywhere."""
    index_sampler = options.index_sampler
    is_wrapped = type(index_sampler) is BatchSampler
    sampler = index_sampler.sampler if is_wrapped else index_sampler
    if not isinstance(sampler, OrderedSampler) or state["samplers"] is None:
        return state
    if (batches := state["drawn"]) == 0:
        return state
    at_first = {**state, "drawn": 0, **({"position": 0} if state["passes"] else {})}
    own = options.generator  # of the copy; the order is drawn from no generator, and others' are not to be moved
    before = None if own is None else own.get_state()
    next(_begun(twin, options, at_first).plan, None)  # now its newest iterator is that of this run
    if own is not None and before is not None:
        own.set_state(before)  # which may be what the trainer has set for this run
    after = sampler.state_after(batches * (index_sampler.batch_size if is_wrapped else 1))
    there = Frozen({"sampler": after, "iterator": None}).plain()
    return {**state, "samplers": there, "drawn": 0, "passes": [], "finished": False}


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

    told_nothing = {**state, "dataset_epochs": []}
    return begin(
        options, told_nothing, copy.copy(twin._runs), iterate, prepare=None if options.is_inline else draw_seed
    )


# ------------------------------------------------------------------------------------------------------ one batch


def apart(loader: Any) -> Any:
    """Return a loader like this one, over copies of its samplers and generators and with no run yet.

    Raises:
        ConfigurationError: if they cannot be copied.
    """
    samplers = samplers_within(loader._index_sampler)
    memo: dict[int, Any] = {id(each): each for each in members(loader.dataset)}
    for holder in (loader, *samplers):
        # The attributes of plain sequences and torch's samplers are read, and never changed.
        memo |= {id(holder): holder} if type(holder) in (list, tuple, range) else {}
        parts = vars(holder) if type(holder) in KNOWN_SAMPLERS and hasattr(holder, "__dict__") else {}
        memo |= {id(part): part for name, part in parts.items() if name not in ("sampler", "generator")}
        memo |= {id(part): part for part in (probe(holder, "data_source"), probe(holder, "dataset"))}
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
    twin._runs.exclusions = Exclusions()  # those that count are in the state that it begins from
    if twin.generator in (None, torch.default_generator) and all(map(_draws_from_its_own, samplers)):
        twin.generator = torch.default_generator.clone_state()  # its base seed is drawn from that, if it has to be
    return twin


def of_one_batch(twin: Any, found: Found) -> dict[str, Any]:
    """Return the state from which a loader gives this batch alone; it is one by now, whose one worker makes it."""
    options: Options = twin._loader_options()
    keys, made_with = [found.keys], found.made_with
    vars(twin).update(
        {"batch_sampler": keys} if options.auto_collation else {"sampler": keys},
        num_workers=int(options.has_workers),
        prefetch_factor=1 if options.has_workers else None,
        persistent_workers=False,
        worker_backend="process" if options.provider is not None else twin.worker_backend,  # on this machine
        generator=torch.Generator(),  # its base seed is known, and the trainer's generator is not asked
        collate_fn=made_with.collate_fn,
        worker_init_fn=made_with.worker_init_fn,
        on_error=made_with.on_error,
        device_transform=made_with.device_transform,
        seeding=made_with.seeding,
        seeding_rank=data_rank(options),
        scheduling="static",
        max_errors=None,
        max_workers=None,
        max_tasks_per_child=None,
        max_worker_memory=None,
        trace=None,
    )
    base_seed, reruns, _ = (seeds := found.seeds).key
    begun = {"position": found.number, "sample": found.first, "base_seed": base_seed, "reruns": reruns}
    state = initial_state(twin._loader_options(), seeds.epoch, generators=seeds.generators)
    return {**state, **begun, "at_iter": "[]"}  # no generator is set


@contextlib.contextmanager
def _kept(options: Options) -> Iterator[None]:
    """Leave generators as they are, whatever is drawn meanwhile: the global ones too, if samplers draw from these.

    For the thread that trains: what another thread draws from them meanwhile is drawn again.
    """
    samplers = samplers_within(options.index_sampler)
    generators: list[Any] = []
    if options.generator in (None, torch.default_generator) or not all(map(_draws_from_its_own, samplers)):
        generators += GLOBAL
    known = (*KNOWN_SAMPLERS, list, tuple, range)
    if not all(type(sampler) in known or isinstance(sampler, ResumableSampler) for sampler in samplers):
        generators += generators_of(options.dataset).values()
    with untouched():
        states = states_of(generators)
    try:
        yield
    finally:
        with untouched():
            try:
                restore(states)
            except BaseException:  # Ctrl-C: all are set once more
                restore(states)
                raise


def _draws_from_its_own(sampler: Any) -> bool:
    """Whether a sampler moves no global generator, and the state of none is saved for it."""
    if isinstance(sampler, ResumableSampler):
        return True
    own = probe(sampler, "generator")
    return draws_once(sampler) and (type(sampler) not in DRAW_FROM_TORCH or isinstance(own, torch.Generator))


_telling = threading.Lock()
"""Held while a dataset of this process is at another epoch than its own."""


def _begin_anew_in_child() -> None:
    global _telling
    _telling = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew_in_child)


def _refuse_untold(loader: Any, found: Found) -> None:
    """See that the dataset was not told its first epoch after the run of a batch: that cannot be taken back."""
    now = loader._runs.set_epochs.of_dataset(loader.dataset)
    if since := [told.number for told, then in zip(now, found.told, strict=False) if then is None is not told.number]:
        raise ConfigurationError(
            f"the dataset has been told epoch {since[0]} (set_epoch) since, and nothing before that run: it cannot be "
            "taken back to that. Make the batch with a new loader over a new dataset that was told nothing"
        )


@contextlib.contextmanager
def _told(loader: Any, epochs: Sequence[int | None], *, may_change: bool) -> Iterator[None]:
    """Have a dataset of this process be at the epoch of a run meanwhile.

    Args:
        loader: Has the dataset.
        epochs: What each of the dataset's listeners had been told before that run.
        may_change: Nothing else of this thread goes on meanwhile.

    Raises:
        ConfigurationError: if something else reads the dataset, at another epoch.
    """
    dataset, runs = loader.dataset, loader._runs
    with _telling if may_change else contextlib.nullcontext():
        told = zip(listeners(dataset), runs.set_epochs.of_dataset(dataset), epochs, strict=False)
        changes = [(one, now.number, then) for one, now, then in told if then not in (None, now.number)]
        newest = runs.iterator
        if changes and (not may_change or not (newest is None or newest.is_closed or runs.done == 0)):
            raise ConfigurationError(
                f"the dataset is at epoch {changes[0][1]} in this process, where something else may read it, so it "
                f"cannot be told epoch {changes[0][2]} now: close() the run that goes on and use batch(), or use "
                "worker processes"
            )
        with runs.set_epochs.telling():
            try:
                for one, _, then in changes:
                    one.set_epoch(then)
                yield
            finally:
                for one, now, _ in changes:
                    if now is not None:
                        one.set_epoch(now)


@contextlib.contextmanager
def making(loader: Any, epoch: int, number: int, *, in_async_for: bool = False) -> Iterator[Any]:
    """Give an iterator over one batch alone, which ends at once if the batch was left out. The caller closes it.

    Args:
        loader: Whose batch.
        epoch: See `find`.
        number: See `find`.
        in_async_for: Other tasks go on while the batch is made.

    Raises:
        IndexError, ConfigurationError: see `find`.
    """
    twin = apart(loader)
    found = find(twin, loader._runs, epoch, number)
    _refuse_untold(loader, found)
    state = of_one_batch(twin, found)
    options: Options = twin._loader_options()
    with contextlib.ExitStack() as steps:
        if options.is_in_process:
            steps.enter_context(_told(loader, found.told, may_change=not in_async_for))
            if not in_async_for:
                own = generators_of(options.dataset, options.collate_fn).values()
                steps.enter_context(left_alone((*GLOBAL, *own)))
        else:
            twin._runs.set_epochs.of_past_run = tuple(map(Told, found.told))
        twin._runs.set_epochs.note_load(options)  # what was told by now is no other epoch than that of the batch
        iterator: Any
        if options.is_inline:
            iterator = InlineIterator(twin, options, twin._runs, state)
        else:
            iterator = WorkerIterator(twin, options, twin._runs, wait_for_start=not in_async_for, state=state)
        if options.device is not None:
            iterator = on_device(iterator, options.device, 0, options.device_transform)
        yield iterator


def was_left_out(epoch: int, number: int) -> IndexError:
    """Return the error for a batch that there is not, as none of its samples is good."""
    return IndexError(f"batch {number} of epoch {epoch} is left out: none of its samples could be loaded")
