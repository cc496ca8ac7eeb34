"""Agents launched by Ray: actors, one where there is room for workers of ours.

    loop thread ── begin, want, kill, close ──> queue ──> thread of Ray's calls ──> ray.put, actors, ray.kill
                <── admit, on_gone ─────────────────────────┘  └ looks for room now and then

Calls of Ray block, so a thread makes them. Nobody tells a program that a cluster has grown, or that a node is drained:
the thread looks every few seconds. Where there is room is decided in `rooms`.

An actor is never started again by Ray (``max_restarts=0``): an agent of the same number would not be let in.
"""

from __future__ import annotations

import logging
import math
import queue
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from asyncloader.errors import ConfigurationError
from asyncloader.ray.host import AgentHost
from asyncloader.ray.launcher import Order, Yard
from asyncloader.ray.rooms import Place, Places, Room, Shortage, find_rooms
from asyncloader.worker import threads
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_LOOK_EVERY_S = 2.0
_SHUNNED_S = 10.0
"""A place whose agent has ended gets no other one for so long."""

_PROBE_S = 2.0
"""A raylet that takes no connection in this time is dead. Seconds."""

_WARN_AFTER_S = 15.0
_ANSWER_S = 10.0
_KEPT_S = 600


class _Host(AgentHost):
    def where(self) -> str:
        """Return Ray's id of the node that this is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class _Actor(NamedTuple):
    handle: Any
    room: Room


def packed(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Have Ray pack and store what a runtime_env names of this machine's files, which it does for whole jobs only.

    Raises:
        ConfigurationError: they are not there, or are too large for it.
    """
    if not runtime_env.get("working_dir") and not runtime_env.get("py_modules"):
        return runtime_env
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    made = dict(runtime_env)
    try:
        for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
            made = upload(made, include_gitignore=True, logger=log)
    except Exception as error:
        raise ConfigurationError(
            f"Ray cannot pack what RayWorkers(runtime_env=...) names for the nodes: {error} (leave out what they have "
            'or do not need by "excludes", or install it there)'
        ) from error
    made.pop("excludes", None)
    return made


def keep(runtime_env: Mapping[str, Any]) -> None:
    """Have Ray keep for `_KEPT_S` seconds more what it has stored for a runtime_env.

    It drops what was uploaded for no job when nobody has used it for ten minutes, and an agent may come later.
    """
    from ray._private.runtime_env.packaging import pin_runtime_env_uri

    for uri in (runtime_env.get("working_dir"), *(runtime_env.get("py_modules") or ())):
        if isinstance(uri, str) and uri.startswith("gcs://"):
            pin_runtime_env_uri(uri, expiration_s=_KEPT_S)


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
        need: What each worker takes of a place.
        runtime_env: For the actors.
        places: Where they may be.
        at_least: For so many workers there has to be room, some day.
    """

    def __init__(
        self, need: Mapping[str, float], runtime_env: dict[str, Any], places: Places, at_least: int = 1
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
        self._actors: dict[int, _Actor] = {}  # of the thread's
        self._draining: set[int] = set()  # of these, whose node is
        self._shunned: dict[Place, float] = {}
        self._keeps_at = 0.0
        self._warns_at = math.nan  # if there is still no room; nan while there is
        self._shortage = Shortage(places.what.lower(), need, at_least)
        self._loop: GuardedLoop
        self._yard: Yard
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None

    # ------------------------------------------------------------------------------- the thread that makes the pool

    def open(self, parts: list[Any]) -> None:
        """Connect to Ray, and leave there what workers work with: from there it goes once to each node.

        Raises:
            ConfigurationError: Ray is not installed, or is connected to as a client, or what is to be packed for nodes
                is too large for it, or there can never be room for workers.
        """
        try:
            import ray
            from ray.util.client import ray as client
        except ImportError as error:
            raise ConfigurationError("workers on other machines need Ray: pip install 'asyncloader[ray]'") from error
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
        self._runtime_env = packed(self._runtime_env)
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
        from ray._private.state import state

        if not ray.is_initialized():  # after ray.shutdown(): to ask would begin another Ray
            return
        if (now := time.monotonic()) >= self._keeps_at:
            self._keeps_at = now + _KEPT_S / 3
            keep(self._runtime_env)
        drained = set(state.get_draining_nodes())
        for number, actor in self._actors.items():
            if actor.room.place.node in drained and number not in self._draining:
                self._draining.add(number)
                self._loop.call_soon_threadsafe(self._yard.on_draining, number)
        self._draining &= self._actors.keys()
        there = sum(actor.room.size for number, actor in self._actors.items() if number not in self._draining)
        lacking = None if self._wanted is None else max(0, self._wanted - there)
        is_full = is_waiting = any(not actor.room.place.node for actor in self._actors.values())
        if lacking != 0:
            rooms = find_rooms(self._find_free(drained), self._need, lacking, self._here)
            if not rooms and not is_waiting and (self._asks or not there):
                is_full = True
                try:
                    rooms = self._places.when_full()
                except ConfigurationError as error:
                    self._tell_none(str(error))
            for room in rooms:
                self._launch(room)
        placed = sum(actor.room.size for actor in self._actors.values() if actor.room.place.node)
        if words := self._shortage.look(placed, self._wanted, now):
            log.warning("%s", words)
        self._maybe_warn(is_full)

    def _find_free(self, drained: set[str]) -> dict[Place, Mapping[str, float]]:
        """Return what is free where agents may be launched now."""
        import ray
        from ray._private.state import available_resources_per_node

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - drained
        nodes = {node: has for node, has in available_resources_per_node().items() if node in alive}
        now = time.monotonic()
        return {place: has for place, has in self._places.free(nodes).items() if self._shunned.get(place, 0.0) < now}

    def _admit(self, num_workers: int) -> Order | None:
        answer: Future[Order | None] = Future()
        self._loop.call_soon_threadsafe(_answer, answer, self._yard.admit, num_workers)
        try:
            return answer.result(_ANSWER_S)
        except TimeoutError:
            if answer.cancel():  # otherwise the loop would still admit an agent, which nobody launches
                raise
            return answer.result()

    def _tell_none(self, why: str) -> None:
        """Say of an agent that it will not come: there is to be none any more."""
        if (order := self._admit(1)) is not None:
            self._tell_gone(order.number, why)

    def _launch(self, room: Room) -> None:
        import ray

        if (order := self._admit(room.size)) is None:
            return
        amounts = {name: amount * room.size for name, amount in self._need.items()}
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU"),
            "num_gpus": amounts.pop("GPU", 0),
            "resources": amounts,
            "max_restarts": 0,
            "runtime_env": self._runtime_env or None,
            "scheduling_strategy": self._places.strategy(room.place),
        }
        try:
            handle = ray.remote(_Host).options(**options).remote()
        except Exception as error:  # Ray does not take the runtime_env, say: it would not next time either
            self._tell_gone(order.number, f"Ray refuses it: {error}")
            return
        self._actors[order.number] = _Actor(handle, room)
        handle.load.remote(self._spec)
        if not room.place.node:
            placed: Future[str] = handle.where.remote().future()
            placed.add_done_callback(partial(self._on_placed, order.number))
        ended: Future[str] = handle.run.remote(order).future()
        ended.add_done_callback(partial(self._on_ended, order.number, room.place.node, handle._actor_id.hex()))

    def _on_placed(self, number: int, placed: Future[str]) -> None:
        """There is room now for an actor that waited for it. In a thread of Ray's."""
        if placed.exception() is None:
            self._steps.put(partial(self._note_node, number, placed.result()))

    def _note_node(self, number: int, node: str) -> None:
        if (actor := self._actors.get(number)) is not None:
            self._actors[number] = _Actor(actor.handle, Room(Place(node), actor.room.size))

    def _on_ended(self, number: int, node: str, actor: str, ended: Future[str]) -> None:
        """An actor has ended, or cannot be had. In a thread of Ray's."""
        try:
            why = ended.result()
        except BaseException as error:  # of Ray: the actor died, its environment could not be made, ...
            why = str(error).strip() or type(error).__name__
        self._steps.put(partial(self._gone, number, node, actor, why))

    def _gone(self, number: int, node: str, actor: str, why: str) -> None:
        import ray
        from ray._private.state import state

        self._shun(self._actors.pop(number, None))
        with_node = False
        try:
            if ray.is_initialized():
                # Ray knows the node of an actor that waited for room, also when the actor died before it told us.
                node = node or state.actor_table(actor)["Address"]["NodeID"]
                with_node = has_died(node, ray.nodes())
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
        if actor is not None and actor.room.place.node:
            self._shunned[actor.room.place] = time.monotonic() + _SHUNNED_S

    def _maybe_warn(self, is_full: bool) -> None:
        """Say once that workers have been waited for for long."""
        now = time.monotonic()
        if not is_full:
            self._warns_at = math.nan
        elif math.isnan(self._warns_at):
            self._warns_at = now + _WARN_AFTER_S
        elif now > self._warns_at:
            self._warns_at = math.inf
            words = "%s has no room for workers of this loader, each of which takes %s: they are waited for."
            log.warning(words, self._places.what, dict(self._need))


def _answer(future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
