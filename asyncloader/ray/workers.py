"""Workers on other machines, placed by Ray: the same loader, the same dataset, the same batches.

    from asyncloader import DataLoader
    from asyncloader.ray import RayWorkers

    loader = DataLoader(dataset, 64, worker_backend=RayWorkers(32, num_cpus=1))

Ray is imported when a run begins. See docs/other-machines.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from asyncloader.checks import at_least, one_of
from asyncloader.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncloader.backends.backend import Backend
    from asyncloader.loops import GuardedLoop
    from asyncloader.messages.messages import WorkerSpec
    from asyncloader.options import Options

__all__ = ["RayWorkers"]

OnMismatch = Literal["raise", "warn"]

_OURS = {
    "max_restarts": "the loader starts lost workers again itself, since it knows which batches they had",
    "max_task_retries": "the loader has lost batches made again itself",
    "max_concurrency": "how many samples a worker fetches at once is DataLoader(concurrency=...)",
    "concurrency_groups": "a worker has one",
    "lifetime": "workers end with their loader",
    "name": "there are several workers",
    "get_if_exists": "there are several workers",
}
"""Options of Ray's actors that cannot be passed on, and why."""


class RayWorkers:
    """Have the workers of a loader run on the nodes of a Ray cluster: the ``worker_backend``. Experimental.

    Each worker is an actor. Workers of map-style datasets take part as soon as Ray has found room for them, and what a
    lost node had in hand is made by the others. Iterable datasets, datasets that keep a state in each worker, and
    ``seeding="worker"`` wait for all of their workers. Ray is the one that ``ray.init`` has connected to; if none has,
    a local one is started with Ray's defaults.

    Args:
        num_workers: How many workers there are to be; `DataLoader.set_num_workers` changes it.
        on_mismatch: "raise" ends the run, "warn" says so in the log, if the versions or the processor of a node would
            make batches that differ in a bit. Another version of asyncloader ends the run in any case.
        **actor_options: Options of Ray's actors, such as ``num_cpus`` (1 by default), ``num_gpus``, ``resources``,
            ``scheduling_strategy`` ("SPREAD" by default) and ``runtime_env``: for each worker.

    Raises:
        ConfigurationError: for an option that cannot work; Ray refuses unknown ones when a run begins.
    """

    actor_options: dict[str, Any]

    def __init__(self, num_workers: int, *, on_mismatch: OnMismatch = "raise", **actor_options: Any) -> None:
        self.num_workers: int = at_least("RayWorkers: num_workers", num_workers, least=1)
        one_of("RayWorkers: on_mismatch", on_mismatch, OnMismatch)
        for name in sorted(actor_options.keys() & _OURS.keys()):
            raise ConfigurationError(f"RayWorkers: {name} cannot be chosen: {_OURS[name]}")
        self.on_mismatch = on_mismatch
        self.actor_options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **actor_options}

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.actor_options.items())
        return f"RayWorkers({self.num_workers}, on_mismatch={self.on_mismatch!r}{options})"

    def make_backend(self, options: Options, spec: WorkerSpec, loop: GuardedLoop) -> Backend[Any]:
        """Make the workers of a loader; see `WorkerProvider`.

        Raises:
            ConfigurationError: Ray is not installed, or the dataset holds what cannot leave this machine.
            ValueError: Ray does not know an option of actors.
            Exception: as the pickling of the dataset raises it.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError("workers on other machines need Ray: pip install 'asyncloader[ray]'") from error
        from asyncloader.ray.actor import WorkerActor
        from asyncloader.ray.pool import RayPool

        if not ray.is_initialized():
            ray.init()
        # Actors that end are replaced by the loader, which knows the place of each in its data.
        actors = ray.remote(WorkerActor).options(**self.actor_options, max_restarts=0)
        return RayPool(loop, spec, actors, self.on_mismatch, are_alike=not options.why_workers_stay)
