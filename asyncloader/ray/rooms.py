"""Where there is room for workers: on the nodes of a Ray cluster, or in the bundles of a placement group there.

    what nodes have free ── Nodes.free, Bundles.free ──> {Place: amounts} ── find_rooms ──> [Room(place, size)]

`Shortage` says when there is room for some of the workers, and not for all.

A bundle's room is told by its node, as resources of other names: "CPU_group_0_<group>" are the CPUs of its bundle 0. So
what has been taken of a bundle is known, and one that is not yet placed has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from asyncloader.errors import ConfigurationError

SHORT_AFTER_S = 4.0
"""What has been taken is told by nodes a little later. Seconds."""


class Place(NamedTuple):
    """Where an agent may be."""

    node: str  # Ray's id; "" for wherever there will be room
    bundle: int = -1  # of the placement group, if it is to be in one


class Room(NamedTuple):
    """Where there is room for workers."""

    place: Place
    size: int


class Places(Protocol):
    """Where in a cluster agents may be.

    Attributes:
        what: In words, for who reads the log.
        most: How many workers there will ever be room for, once `check` has been called; None for any number.
    """

    what: str
    most: int | None

    def check(self, need: Mapping[str, float], num_workers: int) -> None:
        """Ask Ray whether there can ever be room for so many workers.

        Raises:
            ConfigurationError: there cannot.
        """

    def free(self, nodes: Mapping[str, Mapping[str, float]]) -> dict[Place, Mapping[str, float]]:
        """Return what is free where, of what is free on these nodes. Asks nobody."""

    def when_full(self) -> list[Room]:
        """Return what to launch although there is no room, so that somebody sees to it."""

    def strategy(self, place: Place) -> Any:
        """Return what puts an actor of Ray there."""


class Nodes:
    """All nodes of the cluster."""

    what = "The cluster"
    most: int | None = None

    def check(self, need: Mapping[str, float], num_workers: int) -> None:
        """Nothing: a cluster may grow."""

    def free(self, nodes: Mapping[str, Mapping[str, float]]) -> dict[Place, Mapping[str, float]]:
        """Return what the nodes have free."""
        return {Place(node): has for node, has in nodes.items()}

    def when_full(self) -> list[Room]:
        """Return one worker's, anywhere: an actor that waits is what Ray's autoscaler grows a cluster for."""
        return [Room(Place(""), 1)]

    def strategy(self, place: Place) -> Any:
        """Return the node's own. It is never Ray's default one.

        That would put an actor into the placement group of whoever calls, if it takes in what is started there, as that
        of Ray Train's workers may.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(place.node, soft=False) if place.node else "SPREAD"


class Bundles:
    """The bundles of a placement group, which is the user's.

    Args:
        group: As ``ray.util.placement_group`` returns it.
    """

    what = "The placement group"

    def __init__(self, group: Any) -> None:
        self.most: int | None = None
        self._group = group

    def check(self, need: Mapping[str, float], num_workers: int) -> None:
        """Look whether the group is there, and large enough. It need not have been placed yet."""
        bundles = self._look_up()
        self.most = sum(count_workers(bundle, need) for bundle in bundles)
        if self.most < num_workers:
            what = f"{num_workers} workers" if self.most else "a worker in any of its bundles"
            raise ConfigurationError(
                f"the placement group of RayWorkers(placement=...) has no room for {what}: each takes {dict(need)}, "
                f"and the bundles are {bundles}"
            )

    def _look_up(self) -> list[dict[str, float]]:
        """Ask Ray what the bundles are."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self._group)
        if table.get("state", "REMOVED") == "REMOVED":
            raise ConfigurationError("the placement group of RayWorkers(placement=...) is not there, or was removed")
        return list(table["bundles"].values())

    def free(self, nodes: Mapping[str, Mapping[str, float]]) -> dict[Place, Mapping[str, float]]:
        """Return what is free of each bundle that has been placed."""
        return free_in_bundles(nodes, self._group.id.hex())

    def when_full(self) -> list[Room]:
        """Return nothing: what waits for nodes is the group. If that has been removed there will be no room.

        Raises:
            ConfigurationError: it has been removed.
        """
        self._look_up()
        return []

    def strategy(self, place: Place) -> Any:
        """Return the bundle's own."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, place.bundle)


def free_in_bundles(nodes: Mapping[str, Mapping[str, float]], group: str) -> dict[Place, Mapping[str, float]]:
    """Return what is free of each bundle of a placement group, as the nodes tell that have them.

    Args:
        nodes: By node, what nobody has of what there is, by Ray's names.
        group: Ray's id, in hexadecimal digits.
    """
    name_of = re.compile(rf"(.+)_group_(\d+)_{group}")
    found: dict[Place, dict[str, float]] = {}
    for node, has in nodes.items():
        for name, amount in has.items():
            if (match := name_of.fullmatch(name)) is not None:
                found.setdefault(Place(node, int(match[2])), {})[match[1]] = amount
    return dict(found)


def count_workers(has: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Return how many workers there is room for, each of which takes what it needs."""
    return int(min(has.get(name, 0.0) / amount for name, amount in need.items()))


def find_rooms(
    free: Mapping[Place, Mapping[str, float]], need: Mapping[str, float], wanted: int | None, here: str
) -> list[Room]:
    """Decide where workers go: where there is most room first, to the trainer's own node last.

    Args:
        free: By place, what nobody has of what there is.
        need: What a worker takes.
        wanted: How many are wanting; None for as many as there is room for, but not on this node if there are others.
        here: The trainer's node. What is reserved on it for workers, as bundles, is not left out.
    """
    fitting = {place: count_workers(has, need) for place, has in free.items()}
    if wanted is None and len(fitting) > 1:
        fitting.pop(Place(here), None)
    rooms: list[Room] = []
    for place, count in sorted(fitting.items(), key=lambda item: (item[0].node == here, -item[1], item[0])):
        count = count if wanted is None else min(count, wanted)
        if count > 0:
            rooms.append(Room(place, count))
            wanted = None if wanted is None else wanted - count
    return rooms


class Shortage:
    """Fewer workers than were asked for, though some are there: says so once for each time that it lasts.

    Args:
        what: In which there is no room, in words.
        need: What a worker takes.
        expected: So many were asked for.
    """

    def __init__(self, what: str, need: Mapping[str, float], expected: int) -> None:
        self._what = what
        self._need = dict(need)
        self._expected = expected
        self._told_at = math.nan  # nan while there is none, inf when it was told

    def look(self, there: int, wanted: int | None, now: float) -> str:
        """Return what the user is to be told now; mostly "".

        Args:
            there: Workers for which there was room.
            wanted: So many are wanted at the moment; None for as many as there is room for.
            now: In seconds.
        """
        expected = self._expected if wanted is None else min(self._expected, wanted)
        if not 0 < there < expected:
            self._told_at = math.nan
        elif math.isnan(self._told_at):
            self._told_at = now + SHORT_AFTER_S
        elif now >= self._told_at:
            self._told_at = math.inf
            return (
                f"{there} of {expected} workers on other machines are there: {self._what} has no room for the others, "
                f"each of which takes {self._need}. They are started as soon as there is."
            )
        return ""
