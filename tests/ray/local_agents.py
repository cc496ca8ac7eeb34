"""Agents launched as processes of this machine: the other implementation of the launcher, for tests and benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import DupFd
from typing import Any, Literal

from asyncloader.messages.mapped_pickle import write_pickle
from asyncloader.ray import RayWorkers
from asyncloader.ray.agent import open_for_each, run
from asyncloader.ray.host import AgentHost
from asyncloader.ray.launcher import Launcher, Order, Yard
from asyncloader.worker.bootstrap import die_with_parent
from asyncloader.worker.guarded_loop import GuardedLoop


class LocalAgents(RayWorkers):
    """Options of a loader: agents on this machine.

    Args:
        sizes: Workers of each agent that is there from the beginning.
        grows: There are none at the beginning, but nodes of these sizes: agents are launched there as they are wanted.
        num_workers: As of `RayWorkers`.
        max_workers: As of `RayWorkers`.
        by_host: Run them as Ray's actor does; otherwise they are made by the fork server, which is quick.
        corrupt: Changes the order of an agent before it gets it.
        nodes_die: An agent that ends has ended with its node.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(
        self,
        *sizes: int,
        grows: bool = False,
        num_workers: int | None = None,
        max_workers: int | None = None,
        by_host: bool = False,
        corrupt: Callable[[Order], Order] | None = None,
        on_mismatch: Literal["raise", "warn"] = "raise",
        make_context: Any = None,
        nodes_die: bool = False,
    ) -> None:
        super().__init__(
            num_workers=num_workers, max_workers=max_workers, on_mismatch=on_mismatch, make_context=make_context
        )
        self.sizes: tuple[int, ...]
        self.launchers: list[LocalLauncher]
        more = {"sizes": sizes, "grows": grows, "by_host": by_host, "corrupt": corrupt, "nodes_die": nodes_die}
        vars(self).update(more, launchers=[])

    def launcher(self) -> Launcher:
        self.launchers.append(LocalLauncher(self))
        return self.launchers[-1]

    @property
    def newest(self) -> LocalLauncher:
        """That of the newest pool."""
        return self.launchers[-1]


class _Host(AgentHost):
    def where(self) -> str:
        return ""


class LocalLauncher:
    address = "127.0.0.1"

    def __init__(self, options: LocalAgents) -> None:
        self._options = options
        self.orders: list[Order] = []
        self.pids: dict[int, int] = {}
        self._processes: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []
        self._yard: Yard
        self._lock = threading.Lock()
        self._users = 1  # of the descriptors
        self._is_closed = False
        self.asks = False  # whoever gives machines out is to know of those that there is no room for
        self._wanted = 0
        self._nodes: dict[int, tuple[int, int]] = {}  # by agent: which, and how many workers there

    def open(self, parts: list[Any]) -> None:
        self._parts = parts
        self._fd, self._sizes = write_pickle(parts)
        self._liveness, self._writing = os.pipe()

    def begin(self, yard: Yard, loop: GuardedLoop) -> None:
        self._yard, self._loop = yard, loop
        if not self._options.grows:
            for size in self._options.sizes:
                self.grow(size)

    def want(self, num_workers: int | None, *, ask: bool) -> None:
        self.asks = ask
        if num_workers is not None and self._options.grows:
            self._wanted = num_workers
            self._fill()

    def drain_soon(self, number: int) -> None:
        """Say that the machine of this agent is about to be taken away. In any thread."""
        self._loop.call_soon_threadsafe(self._yard.on_draining, number)

    def _fill(self) -> None:
        """Launch agents on nodes that have none, as far as workers are wanting. On the loop."""
        used = {node for node, _ in self._nodes.values()}
        for node, size in enumerate(self._options.sizes):
            lacking = self._wanted - sum(taken for _, taken in self._nodes.values())
            if self._is_closed or node in used or lacking <= 0:
                continue
            if number := self.grow(min(size, lacking)):
                self._nodes[number] = node, min(size, lacking)
            else:  # nobody has noticed yet whose place that was
                self._loop.call_later(0.05, self._fill)
                return

    def _free(self, number: int) -> None:
        if self._nodes.pop(number, None) is not None:
            self._fill()

    def grow(self, num_workers: int) -> int:
        """Launch one more; return its number, or 0. On the loop."""
        order = self._yard.admit(num_workers)
        if order is None:
            return 0
        if self._options.corrupt is not None:
            order = self._options.corrupt(order)
        self.orders.append(order)
        number, run_it = order.number, self._run_host if self._options.by_host else self._run_process
        thread = threading.Thread(target=run_it, args=(order,), name=f"agent {number}")
        self._threads.append(thread)
        with self._lock:
            self._users += 1
        thread.start()
        return number

    def grow_soon(self, num_workers: int) -> None:
        """The same, in any thread."""
        self._loop.call_soon_threadsafe(self.grow, num_workers)

    def _run_host(self, order: Order) -> None:
        host = self._processes[order.number] = _Host()
        host.load(self._parts)
        self._tell(order.number, host.run(order))

    def _run_process(self, order: Order) -> None:
        args = (order, DupFdLater(self._fd), self._sizes, DupFdLater(self._liveness))
        process = multiprocessing.get_context("forkserver").Process(target=_be_agent, args=args)
        process.start()
        self._processes[order.number], self.pids[order.number] = process, process.pid or 0
        if self._is_closed:
            process.kill()
        process.join()
        self._tell(order.number, f"its process ended with exit code {process.exitcode}")

    def _tell(self, number: int, why: str) -> None:
        self._release()
        if not self._is_closed:
            self._loop.call_soon_threadsafe(partial(self._yard.on_gone, number, why, with_node=self._options.nodes_die))
            self._loop.call_soon_threadsafe(self._free, number)

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for fd in (self._fd, self._liveness, self._writing):
                    os.close(fd)

    def kill(self, number: int) -> None:
        process = self._processes.get(number)
        if isinstance(process, AgentHost):
            process = process.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for number in tuple(self._processes):
            self.kill(number)
        self._release()

    def wait_closed(self, timeout_s: float) -> bool:
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)


class DupFdLater:
    """A descriptor, passed on while a process is launched."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _identity, (DupFd(self._fd),)


def _identity(fd: Any) -> Any:
    return fd


def _be_agent(order: Order, fd: Any, sizes: list[int], liveness: Any) -> None:
    os.setpgid(0, 0)
    die_with_parent(liveness.detach())
    failure = run(order, open_for_each(fd.detach(), sizes))
    if failure:
        os.write(2, f"{failure}\n".encode())
