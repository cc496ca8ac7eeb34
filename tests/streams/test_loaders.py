"""Streams in our loader: any workers, any ranks, kills; each sample of an epoch once, and the same order as before."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from asyncloader import DataLoader
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.streams import Map, ShardedStream, Shuffle, merge
from tests.streams.chains import chain, fresh_seed, itself, read, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_of(seed: int, num_workers: int, ranks: int = 1, rank: int = 0, **options: Any) -> Any:
    draw = random.Random(seed)
    size, is_persistent = draw.choice([None, 1, 3]), draw.random() < 0.5
    if num_workers:
        options = {"worker_backend": "thread", "persistent_workers": is_persistent, **options}
    return DataLoader(chain(seed, ranks, rank), size, num_workers=num_workers, collate_fn=itself, **options)


def saved(loader: Any) -> Any:
    """Return a state, as it comes back from a file that is data alone."""
    torch.save(loader.state_dict(), file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("run", range(12))
def test_a_run_goes_on_as_if_nothing_had_happened(run: int) -> None:
    """On as many workers; and the epoch after that has all samples again."""
    seed = fresh_seed()
    draw = random.Random(seed)
    num_workers = draw.randrange(4)
    whole = [*loader_of(seed, num_workers)]
    count = draw.randrange(len(whole) + 1)
    loader = loader_of(seed, num_workers)
    assert [*islice(loader, count)] == whole[:count]
    other = resumed(loader_of(seed, num_workers), saved(loader))
    assert [*other] == whole[count:]
    assert tokens_of(other) == tokens_of(chain(seed))
    loader.close()


@pytest.mark.parametrize("run", range(12))
def test_other_ranks_and_workers_give_what_is_left_once(run: int) -> None:
    """Twice in a row."""
    seed = fresh_seed()
    draw, given = random.Random(seed), []
    state: Any = None
    for left in (2, 1, 0):
        ranks = draw.choice([1, 1, 2, 3])
        loaders = [loader_of(seed, draw.randrange(4), ranks, rank) for rank in range(ranks)]
        for loader in loaders if state is not None else []:
            loader.load_state_dict(state)
        for loader in loaders:  # some end their epoch while others are in the middle of it, or have given nothing
            given += islice(loader, draw.choice([0, 1, 2, 5, 9]) if left else None)
        states = [saved(loader) for loader in loaders]
        for loader in loaders:
            loader.close()
        state = merge(states)
        if tokens_of(given) == tokens_of(chain(seed)):  # the next epoch may follow
            break
    assert tokens_of(given) == tokens_of(chain(seed))


@pytest.mark.parametrize("run", range(6))
def test_ranks_that_change_their_workers_keep_their_shards(run: int) -> None:
    """Each goes on from a state of its own, on other numbers of workers, without a merge."""
    draw, seed = random.Random(fresh_seed()), fresh_seed()
    ranks, given, states = draw.choice([2, 3]), [], None
    for left in (2, 1, 0):
        loaders = [loader_of(seed, draw.randrange(4), ranks, rank) for rank in range(ranks)]
        for loader, state in zip(loaders, states or [], strict=False):
            loader.load_state_dict(state)
        given += [batch for loader in loaders for batch in islice(loader, draw.randrange(1, 5) if left else None)]
        states = [saved(loader) for loader in loaders]
        for loader in loaders:
            loader.close()
        if any(state["finished"] for state in states):
            assert len({*tokens_of(given)}) == len(tokens_of(given))
            return
    assert tokens_of(given) == tokens_of(chain(seed))


@pytest.mark.parametrize("asked", [(2, 2), (3, 2), (2, 3)])  # there are two batches of each
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_merged_state_of_the_last_batch_has_nothing_left(num_workers: int, asked: tuple[int, int]) -> None:
    """The epoch after that is the next one; also if a rank has seen the end of this one."""
    shards = [[each] for each in range(10)]

    def loader(ranks: int, rank: int, workers: int) -> Any:
        stream = ShardedStream(shards, read, num_replicas=ranks, rank=rank)
        options: Any = {"num_workers": workers, "worker_backend": "thread"} if workers else {}
        return DataLoader(stream, 4, **options)

    ranks = [loader(2, rank, num_workers) for rank in range(2)]
    given = [batch for rank, count in zip(ranks, asked, strict=True) for batch in islice(rank, count)]
    assert sorted(torch.cat(given).tolist()) == [*range(10)]
    other = loader(1, 0, 1 - min(num_workers, 1))
    other.load_state_dict(merge([saved(rank) for rank in ranks]))
    assert [[*other], sorted(torch.cat([*other]).tolist())] == [[], [*range(10)]]


def test_loops_that_are_left_after_a_load_go_on_to_other_epochs() -> None:
    """Without workers as with them."""
    seen = []
    for options in ({}, {"num_workers": 1, "worker_backend": "thread"}):
        loader: Any = DataLoader(ShardedStream([[each] for each in range(40)], read), None, **options)
        next(iter(loader))
        loader.load_state_dict(saved(loader))
        seen.append([next(iter(loader)) for _ in range(4)])
    assert seen[0] == seen[1]
    assert len({*seen[0]}) == 4


def test_the_loader_counts_epochs_for_streams() -> None:
    """Each epoch of workers that begin anew has another order; one that is set is that epoch, also after a state."""

    def loader(**options: Any) -> Any:
        stream = ShardedStream([[each] for each in range(40)], lambda shard, start: shard[start:])
        return DataLoader(stream, None, **options)

    threads: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread"}
    for options in ({}, threads, {**threads, "persistent_workers": True}):
        made = loader(**options)
        first, second, third = [*made], [*made], [*made]
        assert len({tuple(each) for each in (first, second, third)}) == 3
        made.set_epoch(1)
        assert [*made] == second
        other = resumed(loader(**options), saved(made))
        assert [*other] == third
        other = resumed(loader(**options), saved(made))
        other.set_epoch(0)
        assert [*other] == first


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_worker_that_is_killed_loses_nothing(num_workers: int) -> None:
    """Nor does a state that is taken after it, which another number of processes loads: that alone needs no merge."""
    stream = Shuffle(
        ShardedStream([range(30 * n, 30 * n + 30) for n in range(7)], lambda shard, start: shard[start:]), 9
    )
    loader = DataLoader(Map(stream, itself), 4, num_workers=num_workers, max_retries=3)
    iterator, given = iter(loader), []
    for step in range(20):
        if step in (3, 9):
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        given.append(next(iterator))
    state = saved(loader)
    rest = [*iterator]
    other = [*resumed(DataLoader(Map(stream, itself), 4, num_workers=2), state)]
    for each in (rest, other):
        assert sorted(sample for batch in given + each for sample in batch.tolist()) == [*range(210)]


def test_what_nobody_can_know_is_refused() -> None:
    """Batches since the last state, other datasets, moments that differ."""
    shards = [range(20) for _ in range(4)]
    stream = ShardedStream(shards, lambda shard, start: shard[start:])
    options: Any = {"num_workers": 2, "worker_backend": "thread", "snapshot_every_n_steps": 5}
    loader = DataLoader(stream, 2, **options)
    given = [*islice(loader, 5)]
    state = saved(loader)
    with pytest.raises(StateMismatchError, match="num_workers"):
        resumed(DataLoader(stream, 2), state)
    with pytest.raises(ConfigurationError, match="snapshot_every_n_steps"):
        merge([state, state])
    assert len(given) + len([*resumed(DataLoader(stream, 2, **options), state)]) == 40
    with pytest.raises(ConfigurationError, match="no streams"):
        merge([_state_of(DataLoader(range(5)))])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="none"):
        merge([])


def _state_of(loader: Any) -> Any:
    next(iter(loader))
    return loader.state_dict()


def test_torchs_loader_reads_streams_too() -> None:
    """Each worker its own shards."""
    stream = ShardedStream([range(20 * n, 20 * n + 20) for n in range(5)], lambda shard, start: shard[start:])
    batches = [*TorchLoader(Shuffle(stream, 8), 4, num_workers=2, multiprocessing_context="fork")]
    assert sorted(torch.cat(batches).tolist()) == [*range(100)]
