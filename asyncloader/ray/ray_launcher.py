"""Agents launched by Ray: actors, one where there is room for workers of ours.

    loop thread ── begin, want, kill, close ──> queue ──> thread of Ray's calls ──> ray.put, actors, ray.kill
                <── admit, on_gone ─────────────────────────┘  └ looks for room now and then

Calls of Ray block, so a thread makes them. Ray tells no program that a cluster has grown, or that a node is drained:
the thread looks every few seconds. Where there is room is decided in `rooms`.

An actor is never started again by Ray (``max_restarts=0``): an agent of the same number would not be let in.
"""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from asyncloader import threads
from asyncloader.errors import ConfigurationError
from asyncloader.ray import private
from asyncloader.ray.host import AgentHost
from asyncloader.ray.launcher import Order, Yard
from asyncloader.ray.rooms import Lasting, Nodes, Place, Room, find_rooms
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_LOOK_EVERY_S = 2.0
_SHUNNED_S = 10.0
"""A place whose agent has ended gets no other one for so long. Seconds."""

_PROBE_S = 2.0
"""A raylet that takes no connection in this time is dead. Seconds."""

_WARN_AFTER_S = 15.0
"""If no worker at all has found room for so long, the log says so. Seconds."""

_SHORT_AFTER_S = 4.0
"""If some have found room, and others have not for so long, the log says so. Nodes tell late what is taken. Seconds."""


class _Actor(NamedTuple):
    handle: Any
    place: Place
    size: int


def has_died(node: str, nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a node has died. Ray itself notices only after some 15 s; its raylet stops listening at once.

    Args:
        node: Ray's id of the node. False for a node that Ray does not know.
        nodes: As ``ray.nodes()`` returns them.
    """
    for found in nodes:
        if found["NodeID"] == node:
            try:
                socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), _PROBE_S).close()
            except OSError:
                return True
            return not found["Alive"]
    return False


class RayLauncher:
    """Launches agents as Ray's actors; see :class:`asyncloader.ray.launcher.Launcher`.

    Args:
        need: The resources that each worker takes.
        runtime_env: For the actors.
        places: Where they may be.
        at_least: For so many workers there has to be room, some day.
    """

    def __init__(
        self, need: Mapping[str, float], runtime_env: dict[str, Any], places: Nodes, at_least: int = 1
    ) -> None:
        self.address = ""
        self._need = need
        self._places = places
        self._at_least = at_least
        self._wanted: int | None = 0
        self._asks = False
        self._runtime_env = runtime_env
        self._here = ""
        self._spec: Any = None
        self._asked: list[Room] = []  # for which the loop is asked who the agent is
        self._actors: dict[int, _Actor] = {}
        self._draining: set[int] = set()  # of these, on nodes that are drained
        self._shunned: dict[Place, float] = {}
        self._keeps_at = 0.0
        self._is_full, self._is_short = Lasting(_WARN_AFTER_S), Lasting(_SHORT_AFTER_S)
        self._loop: GuardedLoop
        self._yard: Yard
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None

    # ------------------------------------------------------------------------------- the thread that makes the pool

    def open(self, parts: list[Any]) -> None:
        """Connect to Ray, and leave there what workers work with: from there it goes once to each node.

        Raises:
            ConfigurationError: Ray is not installed, or in an unknown version, or is connected to as a client, or what
                is to be packed for nodes is too large for it, or there can never be room for workers.
        """
        try:
            import ray
            from ray.util.client import ray as client
        except ImportError as error:
            raise ConfigurationError("workers on other machines need Ray: pip install 'asyncloader[ray]'") from error
        private.check_version(ray.__version__)
        if client.is_connected():
            raise ConfigurationError(
                "this process is a client of Ray (ray://...), by which agents cannot reach it: run the program on a "
                "node of the cluster, or as a job of it (ray job submit)"
            )
        if not ray.is_initialized():
            ray.init()
        self._here = ray.get_runtime_context().get_node_id()
        self.address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == self._here)
        self._places.check(self._need, self._at_least)
        self._runtime_env = private.pack(self._runtime_env)
        self._spec = ray.put([np.frombuffer(part, np.uint8) for part in parts])

    # ---------------------------------------------------------------------------------------------- the loop thread

    def begin(self, yard: Yard, loop: GuardedLoop) -> None:
        """Begin to look for room, as soon as workers are wanted."""
        self._yard, self._loop = yard, loop
        self._thread = threads.start(self._run, "asyncloader ray")

    def want(self, num_workers: int | None, *, ask: bool) -> None:
        """Look for room for so many workers, and go on looking; None for all the room there is."""
        self._steps.put(partial(self._want, num_workers, ask))

    def kill(self, number: int) -> None:
        """See that this agent is gone."""
        self._steps.put(partial(self._kill, number))

    def close(self) -> None:
        """Launch nothing more, and let go of everything."""
        self._steps.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until that is so. In any thread but the loop's."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _admit(self, room: Room) -> None:
        self._steps.put(partial(self._launch, room, self._yard.admit(room.size)))

    # ----------------------------------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        while True:
            try:
                step = self._steps.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                step = self._look
            if step is None:
                break
            try:
                step()
            except Exception as error:  # Ray's, about which it has more to say
                log.warning("Ray could not be asked: %s", error)
        for number in tuple(self._actors):
            self._kill(number)
        self._spec = None

    def _want(self, num_workers: int | None, ask: bool) -> None:
        most = self._places.most
        self._wanted = num_workers if num_workers is None or most is None else min(num_workers, most)
        self._asks = ask
        self._look()

    def _look(self) -> None:
        """See whether nodes are drained, and whether there is room for workers that are wanting."""
        import ray

        if not ray.is_initialized():  # after ray.shutdown(): to ask would begin another Ray
            return
        if (now := time.monotonic()) >= self._keeps_at:
            self._keeps_at = now + private.KEPT_S / 3
            private.keep(self._runtime_env)
        drained = private.draining_nodes()
        for number, actor in self._actors.items():
            if actor.place.node in drained and number not in self._draining:
                self._draining.add(number)
                self._loop.call_soon_threadsafe(self._yard.on_draining, number)
        self._draining &= self._actors.keys()
        staying = [self._actors[number] for number in self._actors.keys() - self._draining]
        rooms = [Room(actor.place, actor.size) for actor in staying] + self._asked
        wanting = None if self._wanted is None else max(0, self._wanted - sum(room.size for room in rooms))
        is_waiting = any(not room.place.node for room in rooms)
        if wanting != 0:
            found = find_rooms(self._find_free(drained), self._need, wanting, self._here)
            if not found and not is_waiting and (self._asks or not rooms):
                is_waiting = True
                try:
                    found = self._places.when_full()
                except ConfigurationError as error:
                    self._loop.call_soon_threadsafe(self._yard.not_started, str(error))
            for room in found:
                self._asked.append(room)
                self._loop.call_soon_threadsafe(self._admit, room)
        self._warn(is_waiting, now)

    def _find_free(self, drained: set[str]) -> dict[Place, Mapping[str, float]]:
        """Return what is free where agents may be launched now."""
        now, asked = time.monotonic(), {room.place for room in self._asked}
        nodes = {node: has for node, has in private.free_by_node().items() if node not in drained}
        free = self._places.free(nodes)
        return {place: has for place, has in free.items() if place not in asked and self._shunned.get(place, 0.0) < now}

    def _warn(self, is_waiting: bool, now: float) -> None:
        """Say once that workers have waited for room for long: all of them, or some."""
        name, need, expected = self._places.name, dict(self._need), self._at_least
        if self._is_full.look(is_waiting, now):
            words = "%s has no room for workers of this loader, each of which takes %s: they are waited for."
            log.warning(words, name[0].upper() + name[1:], need)
        there = sum(actor.size for actor in self._actors.values() if actor.place.node)
        expected = expected if self._wanted is None else min(expected, self._wanted)
        if self._is_short.look(0 < there < expected, now):
            words = (
                "%d of %d workers on other machines are there: %s has no room for the others, each of which takes %s."
            )
            log.warning(words + " They are started as soon as there is.", there, expected, name, need)

    def _launch(self, room: Room, order: Order | None) -> None:
        self._asked.remove(room)
        if order is None:
            return
        import ray

        place, amounts = room.place, {name: amount * room.size for name, amount in self._need.items()}
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU"),
            "num_gpus": amounts.pop("GPU", 0),
            "resources": amounts,
            "max_restarts": 0,
            "runtime_env": self._runtime_env or None,
            "scheduling_strategy": self._places.strategy(place),
        }
        try:
            handle = ray.remote(AgentHost).options(**options).remote()
        except Exception as error:  # Ray does not take the runtime_env, say: it would not next time either
            self._tell_gone(order.number, f"Ray refuses it: {error}")
            return
        self._actors[order.number] = _Actor(handle, place, room.size)
        handle.load.remote(self._spec)
        if not place.node:
            handle.where.remote().future().add_done_callback(partial(self._on_placed, order.number))
        handle.run.remote(order).future().add_done_callback(partial(self._on_ended, order.number, place.node, handle))

    def _on_placed(self, number: int, placed: Future[str]) -> None:
        """Note where an actor that waited for room has found it. In a thread of Ray's."""
        if placed.exception() is None:
            self._steps.put(partial(self._note_node, number, placed.result()))

    def _note_node(self, number: int, node: str) -> None:
        if (actor := self._actors.get(number)) is not None:
            self._actors[number] = actor._replace(place=Place(node))

    def _on_ended(self, number: int, node: str, handle: Any, ended: Future[str]) -> None:
        """An actor has ended, or cannot be had. In a thread of Ray's."""
        try:
            why = ended.result()
        except BaseException as error:  # of Ray: the actor died, its environment could not be made, ...
            why = str(error).strip() or type(error).__name__
        self._steps.put(partial(self._gone, number, node, handle, why))

    def _gone(self, number: int, node: str, handle: Any, why: str) -> None:
        import ray

        self._shun(self._actors.pop(number, None))
        with_node = False
        try:
            with_node = ray.is_initialized() and has_died(node or private.node_of(handle), ray.nodes())
        finally:
            self._tell_gone(number, why, with_node=with_node)

    def _tell_gone(self, number: int, why: str, *, with_node: bool = False) -> None:
        self._loop.call_soon_threadsafe(partial(self._yard.on_gone, number, why, with_node=with_node))

    def _kill(self, number: int) -> None:
        import ray

        actor = self._actors.pop(number, None)
        if actor is not None and ray.is_initialized():
            self._shun(actor)
            ray.kill(actor.handle)

    def _shun(self, actor: _Actor | None) -> None:
        if actor is not None and actor.place.node:
            self._shunned[actor.place] = time.monotonic() + _SHUNNED_S
