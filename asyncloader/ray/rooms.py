"""Where there is room for workers: on the nodes of a Ray cluster, or in the bundles of a placement group there.

    what nodes have free ── Nodes.free, Bundles.free ──> {Place: amounts} ── find_rooms ──> [Room(place, size)]

A node tells the room of its bundles as resources of other names: "CPU_group_0_<group>" are the CPUs of bundle 0. So
what has been taken of a bundle is known, and a bundle that is not yet placed has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncloader.errors import ConfigurationError


class Place(NamedTuple):
    """Where an agent may be."""

    node: str  # Ray's id; "" for wherever there will be room
    bundle: int = -1  # of the placement group, if it is to be in one


class Room(NamedTuple):
    """Where there is room for workers."""

    place: Place
    size: int


class Nodes:
    """All nodes of the cluster.

    Attributes:
        name: In words, for the log.
        most: How many workers there will ever be room for, once `check` has been called; None for any number.
    """

    name = "the cluster"
    most: int | None = None

    def check(self, need: Mapping[str, float], num_workers: int) -> None:
        """Ask Ray whether there can ever be room for so many workers. A cluster may grow.

        Raises:
            ConfigurationError: there cannot.
        """

    def free(self, nodes: Mapping[str, Mapping[str, float]]) -> dict[Place, Mapping[str, float]]:
        """Return what is free where, of what these nodes have free."""
        return {Place(node): has for node, has in nodes.items()}

    def when_full(self) -> list[Room]:
        """Return what to launch although there is no room: an actor that waits makes Ray's autoscaler grow a cluster.

        Raises:
            ConfigurationError: there will never be room.
        """
        return [Room(Place(""), 1)]

    def strategy(self, place: Place) -> Any:
        """Return what puts an actor of Ray there.

        Ray's default strategy is never used: it puts an actor into the placement group of the caller if the group takes
        in what is started there, as the group of Ray Train's workers may.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(place.node, soft=False) if place.node else "SPREAD"


class Bundles(Nodes):
    """The bundles of a placement group, which is the user's.

    Args:
        group: As ``ray.util.placement_group`` returns it.
    """

    name = "the placement group"

    def __init__(self, group: Any) -> None:
        self._group = group

    def check(self, need: Mapping[str, float], num_workers: int) -> None:
        """Check that the group exists and is large enough; it need not have been placed yet."""
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
        """Return nothing: the group itself waits for nodes. If it has been removed there will never be room."""
        self._look_up()
        return []

    def strategy(self, place: Place) -> Any:
        """Return what puts an actor into the bundle."""
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
        need: The resources that a worker takes.
        wanted: How many are wanting; None for as many as there is room for, but not on this node if there are others.
        here: The trainer's node. Bundles that are reserved on it for workers count as well.
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


class Lasting:
    """Finds out when something has been so for long, once each time.

    Args:
        after_s: How long. Seconds.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._told_at: float | None = None  # None while it is not so, inf when it was told

    def look(self, is_so: bool, now: float) -> bool:
        """Return whether the user is to be told now."""
        if not is_so:
            self._told_at = None
        elif self._told_at is None:
            self._told_at = now + self._after_s
        elif now >= self._told_at:
            self._told_at = math.inf
            return True
        return False
