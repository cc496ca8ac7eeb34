"""Workers on other machines, placed by Ray: the same loader, the same dataset, the same batches.

    from asyncloader import DataLoader
    from asyncloader.ray import RayWorkers

    loader = DataLoader(dataset, 64, num_workers=8, worker_backend=RayWorkers(num_workers=32))

Ray finds room, starts one process a node and ends it. The process runs an agent, which forks workers of ours. Batches
come by a connection of our own, because objects of Ray travel at a fraction of the network's rate. Ray is imported when
a run begins. See docs/guides/many-machines.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from asyncloader.errors import ConfigurationError
from asyncloader.protocols import makes_processes
from asyncloader.ray.launcher import Access, MakeContext, OnMismatch

if TYPE_CHECKING:
    from asyncloader.backends.backend import Backend
    from asyncloader.messages.messages import WorkerSpec
    from asyncloader.observe.traffic import Traffic
    from asyncloader.options import Options
    from asyncloader.ray.launcher import Launcher
    from asyncloader.ray.rooms import Nodes
    from asyncloader.worker.guarded_loop import GuardedLoop

__all__ = ["RayWorkers"]


@dataclass(frozen=True, kw_only=True)
class RayWorkers:
    """Have workers on the nodes of a Ray cluster too: the ``worker_backend`` of a loader.

    Nodes may come and go during a run: what a lost node had in hand is made by others. Iterable datasets, datasets with
    a state of their own in each worker, and ``seeding="worker"`` need ``num_workers``, which is then fixed for the run.
    Ray is the one that ``ray.init`` has connected to; if none has, a local one is started with Ray's defaults.

    Args:
        num_workers: How many there are to be on other machines, as far as there is room; more come as that does. None
            for as many as there is room for, on all nodes but this one if there are others; with
            ``DataLoader(num_workers="auto")`` for as many of these as are worth it.
        max_workers: The most there may be, where ``num_workers`` is None; None for any number.
        cpus_per_worker: How many of a node's CPUs, as Ray counts them, each worker takes.
        resources: How much each worker takes of other resources, by name. So workers can be kept to certain nodes.
        runtime_env: The packages, files and environment variables that Ray sets up on nodes before workers start.
        placement: A placement group, as ``ray.util.placement_group`` returns it, to whose bundles workers are kept:
            each bundle, also one on this node, has as many workers as its free part has room for. The group may wait to
            be placed. The loader neither makes nor removes it. None for the nodes' free room.
        on_mismatch: "raise" ends the run, "warn" says so in the log, if the versions or the processor of a node would
            make batches that differ in a bit.
        port: Where this process listens for agents; 0 for any port that is free.
        make_context: Makes contexts for TLS: called here with ``ssl.Purpose.CLIENT_AUTH``, and in each agent with
            ``SERVER_AUTH``. None for connections that are proven on both sides, but not encrypted.

    Raises:
        ConfigurationError: for an option that cannot work.
    """

    num_workers: int | None = None
    max_workers: int | None = None
    cpus_per_worker: float = 1.0
    resources: Mapping[str, float] | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement: Any = None
    on_mismatch: OnMismatch = "raise"
    port: int = 0
    make_context: MakeContext | None = None

    def __post_init__(self) -> None:
        for name, count in (("num_workers", self.num_workers), ("max_workers", self.max_workers)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigurationError(f"RayWorkers: {name} should be at least 1, or None, but got {count!r}")
        if self.num_workers is not None and self.max_workers is not None:
            raise ConfigurationError("RayWorkers: max_workers bounds what num_workers does not say: give one of them")
        for name, amount in self.need.items():
            if not amount > 0:
                raise ConfigurationError(f"RayWorkers: a worker should take more than 0 of {name}, but got {amount!r}")
        if self.placement is not None and not _is_group(self.placement):
            raise ConfigurationError(
                "RayWorkers: placement should be a placement group, as ray.util.placement_group(...) returns it, "
                f"or None, but got {self.placement!r}"
            )
        if self.on_mismatch not in get_args(OnMismatch):
            raise ConfigurationError(f'RayWorkers: on_mismatch is "raise" or "warn", but got {self.on_mismatch!r}')
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"RayWorkers: port should be 0, or that of a socket, but got {self.port!r}")

    @property
    def need(self) -> dict[str, float]:
        """The resources of a node that one worker takes, by Ray's names."""
        return {"CPU": self.cpus_per_worker, **(self.resources or {})}

    @property
    def places(self) -> Nodes:
        """Where workers may be."""
        from asyncloader.ray.rooms import Bundles, Nodes

        return Nodes() if self.placement is None else Bundles(self.placement)

    def check(self, options: Options) -> None:
        """Raise a ConfigurationError if workers on other machines cannot do what a loader's options ask for."""
        if not makes_processes(options.multiprocessing_context) and options.num_workers:
            raise ConfigurationError("workers on other machines go together with local processes, not with threads")
        if (factor := options.prefetch_factor) is not None and factor < 1:
            raise ConfigurationError(f"prefetch_factor should be an integer of at least 1, but got {factor!r}")
        if options.is_auto and self.num_workers is not None:
            raise ConfigurationError(
                'with num_workers="auto" the number of workers on other machines looks after itself too: give '
                "RayWorkers(max_workers=...) for the most, or how many there are to be on this machine (0 for none)"
            )
        if (why := options.why_workers_stay) and self.num_workers is None:
            raise ConfigurationError(
                f"say how many workers there are to be on other machines, RayWorkers(num_workers=...): they cannot "
                f"come and go as there is room for them, since {why}"
            )

    def num_fixed(self, options: Options) -> int:
        """Return how many workers a run begins with here, because they cannot come and go; otherwise 0."""
        return (self.num_workers or 0) if options.why_workers_stay else 0

    def check_num_workers(self, options: Options, num_workers: int) -> None:
        """Raise a ConfigurationError if there are not as many ids for local workers."""
        if num_workers > (most := self._first_id(options)):
            raise ConfigurationError(
                f"while there are some on other machines too there can be at most {most} workers here, not "
                f"{num_workers}"
            )

    def _first_id(self, options: Options) -> int:
        """Return the least id of a worker on another machine. Ids below it are for local workers that may yet come."""
        may_come = options.num_workers and not self.num_fixed(options)
        return max(options.num_workers, options.most_waiting, 16) if may_come else options.num_workers

    def make_backend(
        self,
        options: Options,
        spec: WorkerSpec,
        loop: GuardedLoop,
        traffic: Traffic,
        num_wanted: int | None,
        make_local: Callable[[], Backend],
    ) -> Backend:
        """Make the backend of a loader's workers, local ones included; see `WorkerProvider`."""
        from asyncloader.messages.pickled_spec import pickle_by_value
        from asyncloader.ray.mixed_pool import MixedPool
        from asyncloader.ray.pool import RemotePool

        launcher = self.launcher()
        launcher.open(pickle_by_value(replace(spec, thread=None)))
        first, fixed = self._first_id(options), self.num_fixed(options)
        local = make_local() if spec.num_workers else None
        access, most = Access(self.port, self.make_context, self.on_mismatch), self.num_workers or self.max_workers
        numbers: Any = {"most": most, "num_wanted": num_wanted, "num_fixed": fixed}
        remote = RemotePool(loop, spec, access, launcher, first, traffic, **numbers)
        return remote if local is None else MixedPool(local, remote, first, fixed)

    def launcher(self) -> Launcher:
        """Return what launches agents, for one pool of workers."""
        from asyncloader.ray.ray_launcher import RayLauncher

        return RayLauncher(self.need, dict(self.runtime_env or {}), self.places, self.num_workers or 1)


def _is_group(value: Any) -> bool:
    """Return whether it is a placement group. A program that has one has imported their module."""
    module = sys.modules.get("ray.util.placement_group")
    return module is not None and isinstance(value, module.PlacementGroup)
