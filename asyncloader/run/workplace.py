"""Where batches are made, and what is done about those who make them, as the options say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from asyncloader.backends.backend import Backend
from asyncloader.backends.processes.pool import Pool
from asyncloader.backends.threads.pool import LocalPool
from asyncloader.engine.controller import Controller
from asyncloader.engine.engine import Engine
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.finisher import Finisher
from asyncloader.engine.portal import get_portal
from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.engine.scheduler import Scheduler
from asyncloader.machine import usable_cores
from asyncloader.messages.messages import EpochSpec, WorkerSpec
from asyncloader.observe.faults import Faults
from asyncloader.options import Options
from asyncloader.run.plan import may_be_looked_at
from asyncloader.run.runs import Runs
from asyncloader.worker.guarded_loop import GuardedLoop


def make_engine(
    options: Options,
    runs: Runs,
    spec: WorkerSpec,
    run: Run,
    home: asyncio.AbstractEventLoop | None,
    make_finisher: Callable[[GuardedLoop], Finisher | None],
    tell: Callable[[int], None],
) -> Engine:
    """Return an engine that begins with a run, and its workers, which are not started yet.

    Args:
        options: The options of the loader.
        runs: The runs of the loader.
        spec: The workers' view of the options.
        run: The first run.
        home: The loop of the user's that the dataset has to run on, where there are no workers; None for the portal's.
        make_finisher: Makes what pins batches, if that is to be done.
        tell: Is told of each change of a number of workers that looks after itself, on the loop thread.

    Raises:
        Exception: as the pickling of the dataset or a function raises it, or as a provider's backend does.
    """
    portal = get_portal()
    loop = GuardedLoop(portal.loop)
    pool = _make_pool(options, spec, loop, home)
    controller = Controller(options, options.num_workers, usable_cores()) if options.is_auto else None
    return Engine(portal, loop, pool, run, options, make_finisher(loop), controller, tell)


def _make_pool(
    options: Options,
    spec: WorkerSpec,
    loop: GuardedLoop,
    home: asyncio.AbstractEventLoop | None,
) -> Backend:
    """Decide where the workers run: on a loop (0 of them), on threads, in processes, where a provider has them."""
    if options.is_in_process:
        return LocalPool(loop, spec, on_threads=options.num_workers > 0, home=home)
    if options.provider is not None:
        backend: Backend = options.provider.make_backend(options, spec, loop)
        return backend
    pool = Pool(loop, options.start_context, spec)
    pool.pack()
    return pool


def make_run(options: Options, runs: Runs, epoch: EpochSpec, plan: Iterator[Any], progress: Progress) -> Run:
    """Return a run, which nobody has begun.

    Args:
        options: The options of the run.
        runs: The runs of the loader.
        epoch: The run, as workers are to know it.
        plan: The keys of its batches.
        progress: Where it begins.
    """
    faults = Faults()
    scheduler = Scheduler(
        options,
        first=progress.now.position,
        next_worker=progress.now.next_worker,
        runs_ahead=not may_be_looked_at(options.index_sampler),
    )
    arrives = bool(getattr(plan, "arrives", False))
    meter = runs.make_meter(options, epoch.epoch, options.num_at_start, scheduler.window, faults, keys_arrive=arrives)
    limit = ErrorLimit(options, progress, faults)
    return Run(options, scheduler, epoch, meter, plan, progress, limit)
