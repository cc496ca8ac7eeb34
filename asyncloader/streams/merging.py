"""merge: one state of those of all ranks, which any number of ranks and workers can load."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncloader.errors import ConfigurationError
from asyncloader.messages.snapshot import WorkerStart, as_plain
from asyncloader.run.state import LoaderState
from asyncloader.streams.stream import VERSION, apart


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of those of all ranks: of loaders around a stream, or of streams without a loader.

    Any number of ranks can load it, each with any number of workers: all samples of the epoch that no rank had given
    are given once. What else is in the state of a loader, such as its random generators, is that of the first rank.

    Args:
        states: One state of each rank, of the same moment, in the middle of an epoch: each has given a batch, and none
            was told of the end.

    Raises:
        ConfigurationError: if these are no states of streams, or some are of the time between two epochs and others are
            not.
        StateMismatchError: while it is loaded, if the state of a rank is missing, or they are of several epochs.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> def stream_of(rank: int, num_replicas: int) -> ShardedStream[str]:
        ...     shards = ["ab", "cd", "ef"]
        ...     return ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=num_replicas, rank=rank)
        >>> ranks = [stream_of(rank, 2) for rank in range(2)]
        >>> first, second = next(iter(ranks[0])), next(iter(ranks[1]))
        >>> stream = stream_of(0, 1)
        >>> stream.load_state_dict(merge([rank.state_dict() for rank in ranks]))
        >>> sorted([first, second, *stream])
        ['a', 'b', 'c', 'd', 'e', 'f']
    """
    if not states:
        raise ConfigurationError("states of all ranks should be given, and there are none")
    if all("place" in state or "all" in state for state in states):
        return {"version": VERSION, "all": copy.deepcopy(apart(states))}
    loaders = [LoaderState.from_dict(state) for state in states]
    if len({loader.is_between_runs for loader in loaders}) > 1:
        raise ConfigurationError("some states are of the time between two epochs, and others are of the middle of one")
    if loaders[0].is_between_runs:
        return loaders[0].as_dict()
    starts = [start for loader in loaders for start in (loader.starts or {}).values()]
    if any(start.batches or start.ahead for start in starts):
        raise ConfigurationError(
            "a worker has made batches since it gave the state of its stream: nobody knows which samples were in them. "
            "Give the loader snapshot_every_n_steps=1"
        )
    taken = [start.snapshot["dataset"] for start in starts if start.snapshot is not None]
    if not all(isinstance(each, dict) and ("place" in each or "all" in each) for each in taken) or not taken:
        raise ConfigurationError("these states are of loaders whose datasets are no streams of asyncloader.streams")
    snapshot = {"dataset": {"version": VERSION, "all": apart(taken)}, "iterator": None, "ended": False}
    workers = as_plain({0: WorkerStart(0, snapshot)})
    return replace(loaders[0], workers=workers, next_worker=0).as_dict()
