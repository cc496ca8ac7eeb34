"""Chains of parts, without a loader: what comes after a state is what would have come, on any number of ranks."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import pytest

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.streams import Map, Mix, ShardedStream, Stream, merge
from tests.streams.chains import chain, fresh_seed, tokens_of


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


def test_a_part_has_one_reader() -> None:
    """Whoever reads a part of a chain ends the chain's iterator; a chain has each part once."""
    inner = ShardedStream([range(9)], lambda shard, start: shard[start:])
    outer = Map(inner, int)
    samples = iter(outer)
    assert next(samples) == 0
    assert next(iter(inner)) == 0
    with pytest.raises(RuntimeError, match="ended"):
        next(samples)
    with pytest.raises(ConfigurationError, match="twice"):
        next(iter(Mix([Map(inner, int), Map(inner, str)], [1, 1])))


def test_states_that_do_not_fit_are_refused() -> None:
    """Another rank alone, ranks that are missing, other shards, another chain, another epoch."""
    shards = [*"abcdef"]
    ranks = [ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=3, rank=rank) for rank in range(3)]
    for rank in ranks:
        next(iter(rank))
    states = [saved(rank) for rank in ranks]
    for state in (states[1], merge(states[:2])):
        with pytest.raises(StateMismatchError, match="rank, num_replicas"):
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
