"""States of a stream in other workers than there are now: the dataset makes one of them, if it can.

A dataset that divides itself among workers has a state in each. A state of the loader has them all, and fits as many
workers as it was taken with; for any other number the dataset has to say what all of them have given, in one state:
``merge_state_dicts(states)``. Each worker begins in that, and divides what is left.
"""

from __future__ import annotations

from dataclasses import replace

from asyncloader.errors import StateMismatchError
from asyncloader.messages.snapshot import WorkerStart, as_plain
from asyncloader.options import Options
from asyncloader.protocols import merges_states
from asyncloader.run.state import LoaderState


def for_workers_of(options: Options, state: LoaderState) -> LoaderState:
    """Return a state for as many workers as the loader begins with.

    Raises:
        StateMismatchError: if a worker has made batches since it gave the state of its dataset: then nobody knows which
            samples were in them.
    """
    starts, now = state.starts, options.num_at_start
    if starts is None or len(starts) == now or not options.is_iterable:
        return state
    if not merges_states(options.dataset):
        return state
    if any(start.batches or start.ahead for start in starts.values()):
        advice = (
            "Only with a state of the dataset at each batch (snapshot_every_n_steps=1) can there be another number."
        )
        raise StateMismatchError("num_workers", len(starts), now, advice)
    taken = [start.snapshot for start in starts.values() if start.snapshot is not None]
    begin = WorkerStart()
    if taken:
        merged = options.dataset.merge_state_dicts([snapshot["dataset"] for snapshot in taken])
        is_over = len(taken) == len(starts) and all(snapshot["ended"] for snapshot in taken) and not state.finished
        begin = WorkerStart(0, {"dataset": merged, "iterator": None, "ended": is_over})
    return replace(state, workers=as_plain(dict.fromkeys(range(now), begin)), next_worker=0)
