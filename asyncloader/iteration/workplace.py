"""Where batches are made, and what is done about those who make them, as the settings say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncloader.engine.controller import Controller
from asyncloader.engine.recovery import Policy
from asyncloader.engine.staff import Auto
from asyncloader.machine import usable_cores
from asyncloader.protocols import is_stateful, probe
from asyncloader.settings import Settings
from asyncloader.workers.backend import Backend
from asyncloader.workers.local.pool import LocalPool
from asyncloader.workers.parent.pool import Pool
from asyncloader.workers.protocol.messages import WorkerSpec


def make_pool(settings: Settings, spec: WorkerSpec, loop: asyncio.AbstractEventLoop) -> Backend:
    """Decide where the workers run: on the portal's loop (0 of them), on threads, in processes.

    Raises:
        Exception: as the pickling of the dataset or a function raises it.
    """
    if settings.is_in_process:
        return LocalPool(loop, spec, on_threads=settings.num_workers > 0)
    pool = Pool(loop, settings.start_context, spec)
    pool.pack()
    return pool


def make_auto(settings: Settings, tell: Callable[[int], None]) -> Auto | None:
    """Return what looks after the number of workers, or None if nothing does.

    Args:
        settings: Of the loader.
        tell: Is told of each change, on the loop thread.
    """
    if not settings.is_auto:
        return None
    controller = Controller(
        settings.num_workers,
        max_computing=settings.most_computing,
        max_waiting=settings.most_waiting,
        cores=usable_cores(),
        overlaps=settings.overlaps,
    )
    return Auto(controller, tell)


def policy_of(settings: Settings) -> Policy:
    """Say how the session is to find out whether a worker that died can be replaced.

    Not where a batch of a stream is to be left out: another worker would begin before it. Where a dataset tells its
    state, what this process has of it is what workers began with, but only in their first run, and only if they have
    processes or threads of their own.
    """
    if not settings.is_iterable:
        return Policy(replaceable=True, on_timeout=settings.on_timeout)
    tells_place = settings.on_crash != "skip"
    return Policy(
        replaceable=tells_place and probe(settings.dataset, "deterministic") is True,
        is_stream=True,
        tells_place=tells_place,
        has_initial_state=is_stateful(settings.dataset) and settings.num_workers > 0,
        on_timeout=settings.on_timeout,
    )
