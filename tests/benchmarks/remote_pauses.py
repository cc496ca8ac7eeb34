"""remote_pauses: how long a trainer waits when an agent is killed or falls silent, and how soon one that comes helps.

Two agents with a worker each, launched on this machine as tests do it, and batches that take 100 ms. "pause" is the
longest time between two batches while one agent goes; nothing is ready ahead (max_buffered_bytes=0, and the consumer
waits for each), so whatever holds a batch up is seen. "join" is from the moment the connection of another agent is
there to the moment its worker takes tickets: proofs, the dataset, a fork.

Targets: a killed agent costs one batch and 0.5 s; a silent one 6 s; a join 1 s. Of the rounds the longest counts.

Seen on 2 cores that others used as well (--quick): 0.15 s after a killed agent, 5.5 s after one that is silent, and
0.16 s to join.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.patience import wait_until
from tests.ray.local_agents import LocalAgents

BATCH_S = 0.1


class Slow(Dataset[int]):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> int:
        time.sleep(BATCH_S)
        return index


def start(bench: Bench) -> tuple[Any, LocalAgents, Any]:
    """Return a loader whose two agents are at work, these, and its iterator."""
    agents = LocalAgents(1, 1)
    loader = bench.loaders["ours"](Slow(), None, scheduling="dynamic", max_buffered_bytes=0, worker_backend=agents)
    iterator = iter(loader)
    wait_until(lambda: loader.stats().num_workers == 2)
    for _ in range(10):
        next(iterator)
    return loader, agents, iterator


def longest_s(iterator: Any, for_s: float) -> float:
    """Take batches for so long; return the longest time that one took."""
    ends, longest = time.perf_counter() + for_s, 0.0
    while (began := time.perf_counter()) < ends:
        next(iterator)
        longest = max(longest, time.perf_counter() - began)
    return longest


def pause_s(bench: Bench, number: signal.Signals, for_s: float) -> float:
    """Return how long a trainer waits at most when an agent gets this signal."""
    loader, agents, iterator = start(bench)
    os.kill(agents.newest.pids[1], number)
    longest = longest_s(iterator, for_s)
    del iterator
    loader.close()
    return longest


def join_s(bench: Bench) -> float:
    """Return how long it takes from an agent's connection until its worker takes tickets."""
    loader, agents, iterator = start(bench)
    session, dialled = iterator._session, []
    door = session.pool.fleet._door
    prove = door._prove

    def noted(link: Any, send: Any) -> Any:
        dialled.append(time.perf_counter())
        return prove(link, send)

    door._prove = noted
    agents.newest.grow_soon(1)
    wait_until(lambda: loader.stats().num_workers == 3)
    joined = session.run.meter._began + loader.stats().workers.changes[-1].at_s
    del iterator, session, door
    loader.close()
    return joined - dialled[0]


def measure(bench: Bench) -> None:
    rounds = 2 if bench.quick else 5
    killed = max(pause_s(bench, signal.SIGKILL, 2.0) for _ in range(rounds))
    bench.check("pause after a killed agent, s", killed, Target("<=", BATCH_S + 0.5))
    bench.check("join, s", max(join_s(bench) for _ in range(rounds)), Target("<=", 1.0))
    silent = max(pause_s(bench, signal.SIGSTOP, 8.0) for _ in range(1 if bench.quick else 3))
    bench.check("pause after an agent that is silent, s", silent, Target("<=", 6.0))


if __name__ == "__main__":
    main(__doc__ or "", measure)
