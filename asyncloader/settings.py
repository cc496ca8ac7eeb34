"""Our own options, checked and frozen; torch's are checked by torch."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from os import PathLike
from typing import Any, Literal, get_args

from asyncloader.errors import ConfigurationError

Scheduling = Literal["static", "dynamic"]
Seeding = Literal["batch", "worker"]
OnError = Literal["raise", "skip", "replace"]
OnTimeout = Literal["raise", "retry", "skip"]
OnCrash = Literal["raise", "retry", "skip"]
WorkerBackend = Literal["process", "thread"]

RUN_AHEAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What :class:`asyncloader.DataLoader` takes beyond torch's arguments. See there for the meanings.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    concurrency: int | None = None
    scheduling: Scheduling = "static"
    seeding: Seeding = "batch"
    run_ahead_bytes: int = RUN_AHEAD_BYTES
    on_error: OnError = "raise"
    max_errors: int | float | None = None
    on_timeout: OnTimeout = "raise"
    on_crash: OnCrash = "retry"
    max_retries: int = 2
    worker_backend: WorkerBackend = "process"
    trace: str | PathLike[str] | None = None
    snapshot_every_n_steps: int | None = 1

    def __post_init__(self) -> None:
        _one_of("scheduling", self.scheduling, Scheduling)
        _one_of("seeding", self.seeding, Seeding)
        _one_of("on_error", self.on_error, OnError)
        _one_of("on_timeout", self.on_timeout, OnTimeout)
        _one_of("on_crash", self.on_crash, OnCrash)
        _one_of("worker_backend", self.worker_backend, WorkerBackend)
        if self.concurrency is not None:
            _count("concurrency", self.concurrency, least=1)
        _count("run_ahead_bytes", self.run_ahead_bytes, least=0)
        _count("max_retries", self.max_retries, least=0)
        if self.snapshot_every_n_steps is not None:
            _count("snapshot_every_n_steps", self.snapshot_every_n_steps, least=0)
        self._check_max_errors()

    def _check_max_errors(self) -> None:
        limit = self.max_errors
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
        is_share = isinstance(limit, float) and 0 <= limit <= 1
        if limit is not None and not (is_count or is_share):
            raise ConfigurationError(
                f"max_errors should be a count, a share between 0.0 and 1.0, or None, but got {limit!r}"
            )
        if limit is not None and self.on_error == "raise":
            raise ConfigurationError('max_errors is for on_error="skip" and "replace"; with "raise" it has no effect')


def makes_processes(context: BaseContext | None) -> bool:
    """Whether what a context calls processes are some: MONAI has one of threads. Their pids are nobody's to signal."""
    kind: Any = getattr(context, "Process", BaseProcess)
    return isinstance(kind, type) and issubclass(kind, BaseProcess)


def _one_of(name: str, value: object, kind: object) -> None:
    allowed = get_args(kind)
    if value not in allowed:
        raise ConfigurationError(f"{name} should be one of {', '.join(map(repr, allowed))}, but got {value!r}")


def _count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} should be an integer of at least {least}, but got {value!r}")
