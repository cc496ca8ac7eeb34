"""merge: one state of those of all ranks, which any number of ranks and workers can load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.messages.snapshot import WorkerStart, as_plain
from asyncloader.run.state import LoaderState
from asyncloader.streams.stream import State, nothing_of, side_by_side


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of those of all ranks: of loaders around a stream, or of streams without a loader.

    Any number of ranks can load it, each with any number of workers: all samples of the epoch that no rank had given
    are given once. What else is in the state of a loader, such as its random generators, is that of the first rank in
    the middle of the epoch.

    Args:
        states: One state of each rank, in the order of ranks, of the same moment. A rank that has ended the epoch, or
            is to begin the next one, has given all of its shards; one that has not begun it has given nothing.

    Raises:
        ConfigurationError: if these are no states of streams.
        StateMismatchError: here, or while it is loaded, if a rank's state is missing, or they are of several epochs.

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
    if all("parts" in state for state in states):
        return _of_ranks(states)
    loaders = [LoaderState.from_dict(state) for state in states]
    ranks = [*map(_state_within, loaders)]
    # A loader in the middle of the epoch, if there is one; then one at the last batch of that before, whose run is to
    # end first; otherwise one that has not begun it.
    order = [
        (state["epoch"], each.is_between_runs, is_over) for (state, is_over), each in zip(ranks, loaders, strict=True)
    ]
    first = min(order)
    *_, is_over = first
    epochs = [epoch for epoch, *_ in order]
    if is_over and len({*epochs}) > 1:  # a state of its run cannot be one of the next epoch
        advice = (
            "A rank is at the last batch of an epoch, and another one has ended the next: merge states of one epoch."
        )
        raise StateMismatchError("epoch", epochs, first[0], advice)
    snapshot = {"dataset": _of_ranks([state for state, _ in ranks]), "iterator": None, "ended": is_over}
    workers = as_plain({0: WorkerStart(0, snapshot)})
    return replace(loaders[order.index(first)], workers=workers, next_worker=0).as_dict()


def _of_ranks(states: Sequence[State]) -> State:
    """Return one state of those of all ranks, in the earliest epoch that one of them is in.

    A rank that is at the beginning of the next one has given all of its shards.
    """
    epochs = [state["epoch"] for state in states]
    merged = side_by_side([state for state in states if state["epoch"] == min(epochs)], 0)
    over = [*merged["over"]]
    for rank, state in enumerate(states):
        if state["place"][:1] not in ([], here := [[rank, len(states)]]):
            advice = "merge is to be given one state of each rank, in the order of ranks."
            raise StateMismatchError("[number, count] of ranks", state["place"], here, advice)
        if state["epoch"] > merged["epoch"]:
            if state["parts"] or state["epoch"] > merged["epoch"] + 1:
                advice = "States of one epoch can be merged: some ranks may have ended it, and none begun the next."
                raise StateMismatchError("epoch", epochs, merged["epoch"], advice)
            over.append([rank, len(states)])
    return {**merged, "over": over}


def _state_within(loader: LoaderState) -> tuple[State, bool]:
    """Return one state of those of all workers of a rank; and whether its run is at the end, which is over by that."""
    epochs, starts = loader.next_epochs or loader.dataset_epochs, (loader.starts or {}).values()
    if any(start.batches or start.ahead for start in starts):
        raise ConfigurationError(
            "a worker has made batches since it gave the state of its stream: nobody knows which samples were in them. "
            "Give the loader snapshot_every_n_steps=1"
        )
    taken = [start.snapshot["dataset"] for start in starts if start.snapshot is not None]
    is_stream = all(isinstance(each, dict) and "parts" in each for each in taken)
    if not is_stream or not epochs or epochs[-1] is None:
        raise ConfigurationError("these states are of loaders whose datasets are no streams of asyncloader.streams")
    epoch = epochs[-1]
    if not loader.next_epochs and taken and all(start.snapshot and start.snapshot["ended"] for start in starts):
        return nothing_of(epoch + 1), True
    of_epoch = [each for each in taken if each["epoch"] == epoch]  # another may have been set since
    return side_by_side(of_epoch or [nothing_of(epoch)], 1), False
