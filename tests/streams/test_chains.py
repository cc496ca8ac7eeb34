"""Chains of parts, without a loader: what comes after a state is what would have come, on any number of ranks."""

from __future__ import annotations

import asyncio
import json
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader.errors import StateMismatchError
from asyncloader.streams import Map, Mix, ShardedStream, Shuffle, Stream, merge
from tests.streams.chains import chain, fresh_seed, read, tokens_of


def saved(stream: Stream[Any]) -> Any:
    return json.loads(json.dumps(stream.state_dict()))


def resumed(stream: Stream[Any], state: Any) -> Stream[Any]:
    stream.load_state_dict(state)
    return stream


@pytest.mark.parametrize("run", range(40))
def test_a_run_goes_on_as_if_nothing_had_happened(run: int) -> None:
    """From a state, and from a state of the run that goes on."""
    seed = fresh_seed()
    whole, draw = [*chain(seed)], random.Random(seed)
    first, second = sorted(draw.randrange(len(whole) + 1) for _ in range(2))
    stream = chain(seed)
    assert [*islice(stream, first)] == whole[:first]
    stream = resumed(chain(seed), saved(stream))
    assert [*islice(stream, second - first)] == whole[first:second]
    assert [*resumed(chain(seed), saved(stream))] == whole[second:]


@pytest.mark.parametrize("run", range(40))
def test_other_numbers_of_ranks_give_what_is_left_once(run: int) -> None:
    """Three times in a row, each rank at another place."""
    seed = fresh_seed()
    draw, given, state = random.Random(seed), [], None
    for left in (2, 1, 0):
        count = draw.randrange(1, 4)
        ranks = [chain(seed, count, rank) for rank in range(count)]
        for rank in ranks:
            rank = rank if state is None else resumed(rank, state)
            given += [*islice(rank, draw.randrange(1, 12) if left else None)]
        if all(rank.state_dict()["ended"] for rank in ranks):
            break
        state = json.loads(json.dumps(merge([rank.state_dict() for rank in ranks])))
    assert tokens_of(given) == tokens_of(chain(seed))


def test_ranks_that_have_ended_or_not_begun_are_merged() -> None:
    """One that has ended its epoch has given its shards; one that has not begun it has given nothing."""
    shards = [[(shard, number) for number in range(3)] for shard in range(7)]

    def stream(rank: int, ranks: int) -> Stream[Any]:
        return Shuffle(ShardedStream(shards, read, num_replicas=ranks, rank=rank), 4)

    for epoch in range(2):
        ranks = [stream(rank, 3) for rank in range(3)]
        for rank in ranks:
            for _ in range(epoch):
                assert [*rank]
        given = [*islice(ranks[0], 4), *ranks[1]]
        merged = merge([saved(rank) for rank in ranks])
        other = merge([saved(resumed(stream(rank, 2), merged)) for rank in range(2)])  # nothing is given in between
        for state in (merged, other):
            rest = [sample for rank in range(2) for sample in resumed(stream(rank, 2), state)]
            assert sorted(given + rest) == sorted(each for shard in shards for each in shard)
    with pytest.raises(StateMismatchError, match="in the order of ranks"):
        resumed(stream(0, 1), merge([saved(ranks[1]), saved(ranks[0]), saved(ranks[2])]))


@pytest.mark.parametrize("run", range(10))
def test_async_for_gives_what_for_gives(run: int) -> None:
    """A state has what was given, and not what was read ahead; calls that are cancelled lose nothing."""
    seed = fresh_seed()
    whole, draw = [*chain(seed)], random.Random(seed)
    count = draw.randrange(len(whole) + 1)

    async def some(stream: Stream[Any], count: int | None) -> list[Any]:
        given: list[Any] = []
        samples = aiter(stream)
        while len(given) != count:
            if draw.random() < 0.3:
                asked = asyncio.ensure_future(anext(samples, None))
                await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait([asked])
                given += [] if asked.cancelled() or asked.result() is None else [asked.result()]
                continue
            try:
                given.append(await anext(samples))
            except StopAsyncIteration:
                break
        return given

    stream = chain(seed)
    assert asyncio.run(some(stream, count)) == whole[:count]
    assert asyncio.run(some(resumed(chain(seed), saved(stream)), None)) == whole[count:]


async def test_a_loop_goes_on_while_a_stream_reads() -> None:
    """Errors come in their places, and the stream goes on behind them."""

    def slow(shard: Any, start: int) -> Any:
        for number in range(start, 4):
            time.sleep(0.05)
            yield ValueError("bad") if number == 1 else number

    turns, given, samples = 0, list[Any](), aiter(ShardedStream([0], slow))

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(1e-3)

    turning = asyncio.ensure_future(turn())
    while True:
        try:
            given.append(await anext(samples))
        except StopAsyncIteration:
            break
        except ValueError as error:
            given.append(str(error))
    turning.cancel()
    assert given == [0, "bad", 2, 3]
    assert turns > 20


def test_folders_may_be_moved(tmp_path: Path) -> None:
    """Names count from the folder on that all shards lie in."""

    def stream(folder: str, names: list[str]) -> ShardedStream[str]:
        return ShardedStream([f"{folder}/{name}" for name in names], lambda shard, start: shard[start:], shuffle=False)

    here = stream("/a/b", ["x/1", "y/2"])
    samples = iter(here)
    next(samples)
    for folder in ("/other/place", "s3://bucket", "."):
        assert "".join(resumed(stream(folder, ["x/1", "y/2"]), saved(here))).endswith("y/2")
    for names in (["y/1", "x/2"], ["x/1", "y/3"]):
        with pytest.raises(StateMismatchError, match="number of shards"):
            [*resumed(stream("/a/b", names), saved(here))]


def test_states_of_many_shards_are_small() -> None:
    """A bit for each shard, and numbers for those that are underway."""
    stream = Shuffle(ShardedStream([range(3)] * 20_000, lambda shard, start: shard[start:]), 1000)
    for _ in islice(stream, 50_000):
        pass
    assert len(json.dumps(stream.state_dict())) < 32 << 10
    assert len([*resumed(stream, saved(stream))]) == 10_000


@pytest.mark.parametrize("run", range(10))
def test_each_epoch_gives_all_in_another_order(run: int) -> None:
    """Also where nobody tells the epoch; and one that is told is the same one each time."""
    seed = fresh_seed()
    stream = chain(seed)
    first, second = [*stream], [*stream]
    assert tokens_of(first) == tokens_of(second)
    stream.set_epoch(1)
    assert [*stream] == second
    shuffled = ShardedStream([[each] for each in range(50)], lambda shard, start: shard[start:])
    assert [*shuffled] != [*shuffled]


def test_what_was_dropped_is_made_once_more_by_nobody() -> None:
    """Behind the end of an epoch comes the next one, also by a state; an epoch that is set drops a state of another."""
    stream = ShardedStream(["ab", "cd"], lambda shard, start: shard[start:], shuffle=False)
    assert [*stream] == ["a", "b", "c", "d"]
    behind = resumed(ShardedStream(["ab", "cd"], lambda shard, start: shard[start:]), saved(stream))
    assert (behind.epoch, sorted(behind)) == (1, ["a", "b", "c", "d"])
    next(iter(stream))
    state = saved(stream)
    stream.set_epoch(5)
    assert sorted(stream) == ["a", "b", "c", "d"]
    other = resumed(ShardedStream(["ab", "cd"], lambda shard, start: shard[start:], shuffle=False), state)
    other.set_epoch(state["epoch"])
    assert [*other] == ["b", "c", "d"]


def test_an_older_iterator_says_that_it_was_ended() -> None:
    """A stream has one place."""
    stream = ShardedStream(["abc"], lambda shard, start: shard[start:])
    older = iter(stream)
    assert next(older) == "a"
    assert next(iter(stream)) == "a"
    with pytest.raises(RuntimeError, match="another one over the same stream"):
        next(older)


def test_each_chain_reads_its_parts_by_itself() -> None:
    """Whoever reads a part of a chain leaves the chain alone; a part may be in a chain twice, and in several."""
    inner = ShardedStream([range(9)], lambda shard, start: shard[start:])
    samples = iter(Map[int](inner, int))
    assert next(samples) == 0
    assert [*islice(inner, 5)] == [*range(5)]
    both: Mix[Any] = Mix([Map(inner, int), Map(inner, str)], [1, 1])
    given = [*islice(both, 7)]
    assert [*samples] == [*range(1, 9)]
    rest = [*resumed(Mix([Map(inner, int), Map(inner, str)], [1, 1]), saved(both))]
    assert sorted(map(str, given + rest)) == sorted([*map(str, range(9))] * 2)


def test_states_that_do_not_fit_are_refused() -> None:
    """Another rank alone, ranks that are missing, other shards, another chain, another epoch."""
    shards = [*"abcdef"]
    ranks = [ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=3, rank=rank) for rank in range(3)]
    for rank in ranks:
        next(iter(rank))
    states = [saved(rank) for rank in ranks]
    for state in (states[1], merge(states[:2])):
        with pytest.raises(StateMismatchError, match="of ranks"):
            [*resumed(ShardedStream(shards, lambda shard, start: shard[start:]), state)]
    other_ranks = saved(ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=2, rank=1))
    with pytest.raises(StateMismatchError):
        [*resumed(ShardedStream(shards, lambda shard, start: shard[start:]), merge([states[0], other_ranks]))]
    for other in (ShardedStream([*"abcdeg"], lambda shard, start: shard), chain(0)):
        with pytest.raises(StateMismatchError):
            [*resumed(other, merge(states))]
    with pytest.raises(StateMismatchError, match="epoch"):
        ranks[0].merge_state_dicts([{**states[0], "epoch": 1}, *states[1:]])
    with pytest.raises(StateMismatchError, match="version"):
        ranks[0].load_state_dict({**states[0], "version": 99})
