"""What a loader is told of workers on other machines: taken apart from those of this one, and checked."""

from __future__ import annotations

from asyncloader.errors import ConfigurationError
from asyncloader.options import Options, WorkerBackend
from asyncloader.protocols import RemoteWorkers


def places(worker_backend: WorkerBackend | RemoteWorkers) -> tuple[WorkerBackend, RemoteWorkers | None]:
    """Return where workers of this machine run, and what is said of those on others."""
    if isinstance(worker_backend, str) and worker_backend != "ray":
        return worker_backend, None
    if worker_backend != "ray":
        return "process", worker_backend
    from asyncloader.ray import RayWorkers

    return "process", RayWorkers()


def checked(options: Options) -> Options:
    """Return the options, if workers on other machines can do what they say.

    Raises:
        ConfigurationError: if not; it says why.
    """
    if options.remote is None:
        return options
    if not hasattr(options.remote, "launcher"):
        raise ConfigurationError(
            f'worker_backend should be "process", "thread", "ray" or RayWorkers(...), but got {options.remote!r}'
        )
    if options.worker_backend == "thread" and options.num_workers:
        raise ConfigurationError("workers on other machines go together with local processes, not with threads")
    if (factor := options.prefetch_factor) is not None and factor < 1:
        raise ConfigurationError(f"prefetch_factor should be an integer of at least 1, but got {factor!r}")
    if options.is_auto and options.remote.num_workers is not None:
        raise ConfigurationError(
            'with num_workers="auto" the number of workers on other machines looks after itself too: give '
            "RayWorkers(max_workers=...) for the most, or how many there are to be on this machine (0 for none)"
        )
    if options.scheduling == "split":
        raise ConfigurationError('scheduling="split" is for workers of this machine alone, not beside those on others')
    if (why := options.why_workers_stay) and options.remote.num_workers is None:
        raise ConfigurationError(
            f"say how many workers there are to be on other machines, RayWorkers(num_workers=...): they cannot come "
            f"and go as there is room for them, since {why}"
        )
    return options
