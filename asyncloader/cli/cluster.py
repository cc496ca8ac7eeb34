"""Findings about Ray: whether workers on other machines can be had, and which nodes could not reach us.

The cluster is asked in a process of its own, `python -m asyncloader.cli.cluster`, which has so long: who connects to a
cluster that is gone waits for it, and Ray leaves threads behind in whoever has connected.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncloader.cli.finding import Finding
from asyncloader.errors import ConfigurationError
from asyncloader.ray import RayWorkers, private
from asyncloader.ray.rooms import find_rooms

_ANSWER_S = 30.0


def look(workers: RayWorkers | None = None) -> Iterator[Finding]:
    """Look for Ray, and for a cluster that a program on this machine would take part in.

    Args:
        workers: The `RayWorkers` of a loader, or None.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install 'asyncloader[ray]'" * (workers is not None)
        found = "not installed, and needed by none but workers on other machines"
        yield Finding("Ray", found, advice, is_bad=workers is not None)
        return
    try:
        private.check_version(version)
    except ConfigurationError as error:
        yield Finding("Ray", version, str(error), is_bad=workers is not None)
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        advice = "Run the program on a node of the cluster, or as a job of it (ray job submit): agents cannot reach a "
        advice += "client, so workers on other machines are refused."
        yield Finding("Ray", f"{version}, RAY_ADDRESS={address}", advice, is_bad=True)
    elif not address and not _has_begun():
        advice = "ray start on this machine would have it take part in a cluster; a run starts Ray on this one alone."
        yield Finding("Ray", f"{version}, no cluster", advice * (workers is not None))
    else:
        yield from _of_cluster(version, ask(), workers)


def _has_begun() -> bool:
    """Whether Ray has been started on this machine, where it notes that for programs that say no address."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary, "ray", "ray_current_cluster").exists()


def _of_cluster(version: str, told: dict[str, Any] | str, workers: RayWorkers | None) -> Iterator[Finding]:
    if isinstance(told, str):
        advice = "ray status says more; unset RAY_ADDRESS, or ray stop, if there is no cluster any more."
        yield Finding("Ray", f"{version}, a cluster that does not answer: {told}", advice, is_bad=True)
        return
    here, host, free = told["here"], told["address"], told["free"]
    cpus = sum(node.get("CPU", 0.0) for node in free.values())
    found = f"{version}, a cluster of {len(free)} nodes at {told['gcs']}, {cpus:g} of {told['cpus']:g} CPUs free"
    is_open = len(free) > 1 and not told["has_token"]
    advice = "Anybody who reaches it can run code in it: set RAY_AUTH_MODE=token on networks that you share." * is_open
    yield Finding("Ray", found, advice)
    yield _of_address(host, len(free))
    if workers is None:
        return
    rooms = find_rooms(workers.places.free(free), workers.need, workers.num_workers or workers.max_workers, here)
    count, wanted = sum(room.size for room in rooms), workers.num_workers
    of = "" if wanted is None else f" of {wanted}"
    lacks = not count if wanted is None else count < wanted
    advice = f"Each takes {dict(workers.need)}. The others are waited for; local workers go on meanwhile." * lacks
    where = f"on {len({room.place.node for room in rooms})} nodes"
    where = where if workers.placement is None else f"in {len(rooms)} bundles {where}"
    yield Finding("RayWorkers", f"room for {count}{of} workers, {where}", advice)


def _of_address(host: str, num_nodes: int) -> Finding:
    """Say where agents would dial, and whether they can."""
    what, found = "agents dial", f"{host}, any port that is free (RayWorkers(port=...) fixes it)"
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        advice = "Start Ray with --node-ip-address and an address of this machine."
        return Finding(what, f"{host}, where this machine cannot listen: {error}", advice, is_bad=True)
    if num_nodes > 1 and ipaddress.ip_address(host).is_loopback:
        advice = "Other machines cannot reach that: start Ray with --node-ip-address and the address that they know."
        return Finding(what, found, advice)
    return Finding(what, found)


def ask() -> dict[str, Any] | str:
    """Connect to the cluster; return what is to be known of it, or why that cannot be."""
    command = [sys.executable, "-m", "asyncloader.cli.cluster"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing after {_ANSWER_S:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason is told"])[-1]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    """Tell what there is, as JSON."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    context = ray.get_runtime_context()
    here = context.get_node_id()
    told = {
        "gcs": context.gcs_address,
        "here": here,
        "address": nodes[here]["NodeManagerAddress"],
        "cpus": sum(node["Resources"].get("CPU", 0.0) for node in nodes.values()),
        "free": private.free_by_node(),
        "has_token": os.environ.get("RAY_AUTH_MODE") == "token",
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
