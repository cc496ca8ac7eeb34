"""merge: one state of those of all ranks, which any number of ranks and workers can load."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncloader.errors import ConfigurationError
from asyncloader.messages.snapshot import WorkerStart, as_plain
from asyncloader.run.state import LoaderState
from asyncloader.streams.stream import NOTHING, VERSION, State


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of those of all ranks: of loaders around a stream, or of streams without a loader.

    Any number of ranks can load it, each with any number of workers: all samples of the epoch that no rank had given
    are given once. What else is in the state of a loader, such as its random generators, is that of the first rank.

    Args:
        states: One state of each rank, in the order of ranks, of the same moment. A rank that has ended the epoch has
            given all of its shards; one that has not begun it has given nothing.

    Raises:
        ConfigurationError: if these are no states of streams; or if some ranks have ended an epoch that no other one
            has begun.
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
    if all("parts" in state or "all" in state for state in states):
        return {"version": VERSION, "all": copy.deepcopy([[state] for state in states])}
    loaders = [LoaderState.from_dict(state) for state in states]
    running = next((loader for loader in loaders if not loader.is_between_runs), None)
    ranks = [*map(_states_within, loaders)]
    if running is None:
        if len({loader.finished for loader in loaders}) > 1:
            raise ConfigurationError(
                "some ranks have ended their epoch, and the others have not begun theirs: merge states of a moment in "
                "which a rank is in the middle of it"
            )
        return loaders[0].as_dict()
    snapshot = {"dataset": {"version": VERSION, "all": ranks}, "iterator": None, "ended": False}
    return replace(running, workers=as_plain({0: WorkerStart(0, snapshot)}), next_worker=0).as_dict()


def _states_within(loader: LoaderState) -> list[State]:
    """Return the states of the stream in all workers of a rank."""
    epoch = loader.dataset_epochs[0] if loader.dataset_epochs else None
    untold: State = {"version": VERSION, "epoch": epoch, "ended": loader.finished, **NOTHING}
    if loader.is_between_runs:
        return [untold]
    starts = (loader.starts or {}).values()
    if any(start.batches or start.ahead for start in starts):
        raise ConfigurationError(
            "a worker has made batches since it gave the state of its stream: nobody knows which samples were in them. "
            "Give the loader snapshot_every_n_steps=1"
        )
    taken = [start.snapshot["dataset"] for start in starts if start.snapshot is not None]
    if (
        not all(isinstance(each, dict) and ("parts" in each or "all" in each) for each in taken)
        or loader.starts is None
    ):
        raise ConfigurationError("these states are of loaders whose datasets are no streams of asyncloader.streams")
    return taken or [untold]
