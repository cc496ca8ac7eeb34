"""Where batches are made, and what is done about those who make them, as the settings say."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from asyncloader.backends.backend import Backend, Elastic
from asyncloader.backends.processes.pool import Pool
from asyncloader.backends.threads.pool import LocalPool
from asyncloader.engine.controller import Controller
from asyncloader.engine.progress import Progress
from asyncloader.engine.recovery import Policy
from asyncloader.engine.renewal import Renewal
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.session import Session
from asyncloader.engine.slicer import Slicer
from asyncloader.engine.splitter import Splitter
from asyncloader.engine.supervisor import Auto
from asyncloader.epochs import Told
from asyncloader.machine import usable_cores
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.original import Original
from asyncloader.messages.pickled_spec import pickle_for_elsewhere
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import Meter
from asyncloader.observe.traffic import Traffic
from asyncloader.protocols import has_samples, is_collated, is_stateful, leaves_out_buffer, probe
from asyncloader.run.plan import may_be_looked_at
from asyncloader.run.runs import Runs
from asyncloader.settings import Settings
from asyncloader.transport import batch_slabs, collate
from asyncloader.transport.slab import slab_pool
from asyncloader.worker.gather import gathers
from asyncloader.worker.guarded_loop import GuardedLoop


def make_pool(
    settings: Settings,
    spec: WorkerSpec,
    loop: GuardedLoop,
    traffic: Traffic,
    elsewhere: int,
    original: Original,
    home: asyncio.AbstractEventLoop | None = None,
) -> Backend:
    """Decide where the workers run: on a loop (0 of them), on threads, in processes, on other machines.

    Args:
        settings: Of the loader.
        spec: What the workers work with.
        loop: The portal's.
        traffic: Counts what comes from other machines.
        elsewhere: How many there are to be on other machines at the beginning, where that looks after itself.
        original: The dataset in the spec.
        home: The loop of the user's that the dataset has to run on, where there are no workers; None for the portal's.

    Raises:
        Exception: as the pickling of the dataset or a function raises it, or who launches workers elsewhere.
    """
    if settings.is_in_process:
        return LocalPool(loop, spec, on_threads=settings.num_workers > 0, home=home, original=original)
    if settings.remote is None:
        return _make_local(settings, spec, loop, original)
    # Imported where they are asked for: a loader without workers on other machines needs none of it.
    from asyncloader.ray.pool import RemotePool
    from asyncloader.ray.together import Together

    launcher = settings.remote.launcher()
    launcher.open(pickle_for_elsewhere(replace(spec, origin=None)))
    first = settings.first_elsewhere
    local = _make_local(settings, spec, loop, original) if spec.num_workers else None
    slots, wanted = settings.num_slots, elsewhere if settings.is_auto else None
    remote = RemotePool(loop, spec, settings.remote, launcher, first, traffic, wanted=wanted, slots=slots)
    return remote if local is None else Together(local, remote, first)


def _make_local(settings: Settings, spec: WorkerSpec, loop: GuardedLoop, original: Original) -> Pool:
    pool = Pool(loop, settings.start_context, spec, original)
    pool.pack()
    return pool


def make_original(dataset: Any, runs: Runs) -> Original:
    """Return what knows what a loader's dataset has heard. It keeps neither the runs of the loader alive nor it."""
    return Original(dataset, partial(_heard, weakref.ref(runs), dataset))


def _heard(runs: weakref.ref[Runs], dataset: Any) -> tuple[Told, ...]:
    alive = runs()
    return () if alive is None or alive.is_telling else alive.heard(dataset)


def watched(session: Session, original: Original) -> Session:
    """Have it be known when a run of this session is over, and return the session."""
    original.is_over = partial(_is_over, weakref.ref(session))
    return session


def _is_over(session: weakref.ref[Session]) -> bool:
    alive = session()
    return alive is not None and alive.run.ended


def make_scheduler(settings: Settings, progress: Progress) -> Scheduler:
    """Return what decides who does which ticket of a run.

    Args:
        settings: Of the run.
        progress: Where it begins.
    """
    return Scheduler(
        num_workers=settings.num_places,
        num_expected=settings.num_expected,
        prefetch_factor=settings.prefetch,
        scheduling="static" if settings.scheduling == "static" or settings.is_iterable else "dynamic",
        in_order=settings.in_order,
        max_buffered_bytes=0 if may_be_looked_at(settings.index_sampler) else settings.max_buffered_bytes,
        on_crash=settings.on_crash,
        on_timeout=settings.on_timeout,
        max_retries=settings.max_retries,
        overlapping=settings.tickets_at_once,
        first=progress.now.position,
        next_worker=progress.now.next_worker,
    )


def make_splitter(
    settings: Settings, scheduler: Scheduler, progress: Progress, slicer: Slicer, faults: Faults
) -> Splitter | None:
    """Return what divides the batches of a run into slices; None where they stay whole.

    Args:
        settings: Of the run.
        scheduler: Of the run.
        progress: Where it begins.
        slicer: Knows what samples cost.
        faults: Of the run.
    """
    if not (settings.splits and _can_join(settings)):
        return None
    return Splitter(
        scheduler,
        slicer,
        first=progress.now.position,
        on_error=settings.on_error,
        faults=faults,
        prefetch_factor=settings.prefetch,
        batch_size=settings.samples_in_batch,
        obtain=None if settings.is_in_process else partial(batch_slabs.obtain, slab_pool()),
    )


def _can_join(settings: Settings) -> bool:
    """Whether slices of batches can be joined: torch's default collates them, and not the dataset makes whole ones."""
    dataset, collate_fn = settings.dataset, settings.collate_fn
    makes_whole = is_collated(dataset) or not has_samples(dataset) or gathers(dataset, True, collate_fn)
    return collate.copies_samples(collate_fn) and not makes_whole


def make_meter(settings: Settings, runs: Runs, epoch: int, window: int, faults: Faults) -> Meter:
    """Return what counts what happens in a run.

    Args:
        settings: Of the run.
        runs: Of the loader.
        epoch: Its number.
        window: Batches in flight or waiting.
        faults: Of the run.
    """
    return Meter(
        epoch,
        settings.num_places,
        window,
        faults,
        runs.open_trace(settings),
        runs.traffic,
        is_iterable=settings.is_iterable,
        scheduling=settings.scheduling,
        could_split=settings.could_split and _can_join(settings),
        max_buffered_bytes=settings.max_buffered_bytes,
        persistent_workers=settings.persistent_workers,
        concurrency=settings.samples_at_once,
        in_process=settings.is_in_process,
        elsewhere=settings.remote is not None,
        wanted_elsewhere=None if settings.remote is None else settings.remote.num_workers,
        auto=settings.is_auto,
        renews=settings.renews,
        can_renew=not (settings.is_in_process or settings.why_workers_stay),
    )


def make_auto(settings: Settings, pool: Backend, tell: Callable[[int, int], None], elsewhere: int) -> Auto | None:
    """Return what looks after the number of workers, or None if nothing does.

    Args:
        settings: Of the loader.
        pool: The workers.
        tell: Is told of each change, on the loop thread.
        elsewhere: How many there are to be on other machines at the beginning.
    """
    if not settings.is_auto:
        return None
    remote, elastic = settings.remote, cast(Elastic, pool)
    controller = Controller(
        settings.num_workers,
        max_computing=settings.most_computing,
        max_waiting=settings.most_waiting,
        cores=usable_cores(),
        overlaps=settings.overlaps,
        elsewhere=elsewhere,
        max_elsewhere=0 if remote is None else remote.max_workers or sys.maxsize,
    )
    return Auto(controller, tell, None if remote is None else elastic)


def make_renewal(settings: Settings) -> Renewal | None:
    """Return what says which workers are renewed, or None if none is."""
    return Renewal(settings.max_tasks_per_child, settings.max_worker_memory) if settings.renews else None


def policy_of(settings: Settings) -> Policy:
    """Say how the session is to find out whether a worker that died can be replaced.

    Not where a batch of a stream is to be left out: another worker would begin before it. Where a dataset tells its
    state, what this process has of it is what workers began with, but only in their first run, and only if they have
    processes or threads of their own.
    """
    stays = bool(settings.why_workers_stay)
    if not settings.is_iterable:
        return Policy(replaceable=True, stays=stays, on_timeout=settings.on_timeout)
    tells_place, dataset = settings.on_crash != "skip", settings.dataset
    return Policy(
        replaceable=tells_place and (probe(dataset, "deterministic") is True or leaves_out_buffer(dataset)),
        is_stream=True,
        stays=stays,
        tells_place=tells_place,
        has_initial_state=is_stateful(settings.dataset) and settings.has_workers,
        on_timeout=settings.on_timeout,
    )
