"""Chains of parts, without a loader: what comes after a state is what would have come, on any number of ranks."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader.errors import StateMismatchError
from asyncloader.streams import Bucket, Map, Mix, Pack, ShardedStream, Shuffle, Stream, merge
from tests.streams.chains import Sample, chain, cut, fresh_seed, itself, length, read, records_of, tokens_of
from tests.support.garbage import uncollected


def saved(stream: Stream[Any]) -> Any:
    """Return a state as it comes back from JSON, which has all of it: loaders keep states as JSON."""
    state = stream.state_dict()
    again = json.loads(json.dumps(state))
    assert again == state
    return again


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


@pytest.mark.parametrize("run", range(20))
def test_a_run_may_be_saved_and_resumed_behind_each_sample(run: int) -> None:
    """A state has all that earlier ones had, also of samples that were given long before their turn."""
    seed = fresh_seed()
    stream, given = chain(seed), list[Any]()
    while (sample := next(iter(stream), None)) is not None:
        given.append(sample)
        stream = resumed(chain(seed), saved(stream))
    assert given == [*chain(seed)]


@pytest.mark.parametrize("run", range(20))
def test_a_run_that_a_merged_state_began_goes_on_the_same(run: int) -> None:
    """Its samples have positions anew, which a state of it gives them again; no shard that is done is listed."""
    seed = fresh_seed()
    draw, ranks = random.Random(seed), [chain(seed, 2, rank) for rank in range(2)]
    for rank in ranks:
        list(islice(rank, draw.randrange(1, 9)))
    state = json.loads(json.dumps(merge([rank.state_dict() for rank in ranks])))
    whole = [*resumed(chain(seed), state)]
    count = draw.randrange(len(whole) + 1)
    stream = resumed(chain(seed), state)
    assert [*islice(stream, count)] == whole[:count]
    assert [*resumed(chain(seed), saved(stream))] == whole[count:]
    for record in records_of(stream) if count else []:
        assert not [number for number, *_ in record["given"] if int(record["done"], 16) >> number & 1]


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
            given += [*islice(rank, draw.randrange(12) if left else None)]
        if tokens_of(given) == tokens_of(chain(seed)):
            return
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
        merge([saved(ranks[1]), saved(ranks[0]), saved(ranks[2])])


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
    turned = threading.Event()

    def slow(shard: Any, start: int) -> Any:
        for number in range(start, 4):
            turned.clear()
            assert turned.wait(20)  # for a turn of the loop
            yield ValueError("bad") if number == 1 else number

    given, samples = list[Any](), aiter(ShardedStream([0], slow))

    async def turn() -> None:
        while True:
            turned.set()
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


def test_ranks_take_turns_at_samples_that_are_cut() -> None:
    """What one rank knows of another one's sample is older than what that one has given since."""
    shards = [[Sample("a", shard, 0, 0, 12)] for shard in range(2)]

    def stream(ranks: int, rank: int) -> Stream[Any]:
        read_by = ShardedStream(shards, read, num_replicas=ranks, rank=rank, shuffle=False)
        return Pack(read_by, {"tokens": 4}, length, too_long="cut", cut=cut)

    given, state = list[Any](), None
    for _ in range(2):
        ranks = [stream(2, rank) if state is None else resumed(stream(2, rank), state) for rank in range(2)]
        given += [next(iter(rank)) for rank in ranks]
        state = merge([saved(rank) for rank in ranks])
    given += resumed(stream(1, 0), state)
    assert tokens_of(given) == tokens_of(shards)


def test_what_is_left_of_a_shard_is_shuffled_when_it_can_be_read_again() -> None:
    """It raised in the middle, so its rest has positions that the next shard has had as well."""
    cut_short = True

    def read_some(shard: int, start: int) -> Iterator[dict[str, int]]:
        for number in range(start, 30):
            if cut_short and shard == 1 and number == 5:
                raise OSError("connection reset")
            yield {"id": 30 * shard + number}

    stream, given = Shuffle(ShardedStream(range(4), read_some, shuffle=False), 10), list[int]()
    samples = iter(stream)
    with pytest.raises(OSError, match="connection reset"):
        while True:
            given.append(next(samples)["id"])
    given += [sample["id"] for sample in islice(samples, 15)]
    state, cut_short = saved(stream), False
    again = resumed(Shuffle(ShardedStream(range(4), read_some, shuffle=False), 10), state)
    assert sorted(given + [sample["id"] for sample in again]) == [*range(120)]


def test_one_rank_has_begun_and_others_have_not() -> None:
    """Its shards are dealt anew, and their samples, which have no order, are shuffled among others."""
    shards = [[{"id": 10 * shard + number} for number in range(10)] for shard in range(8)]
    ranks = [Shuffle(ShardedStream(shards, read, num_replicas=2, rank=rank, shuffle=False), 30) for rank in range(2)]
    given = [sample["id"] for sample in islice(ranks[0], 12)]
    again = resumed(Shuffle(ShardedStream(shards, read, shuffle=False), 30), merge([saved(rank) for rank in ranks]))
    assert sorted(given + [sample["id"] for sample in again]) == [*range(80)]


@pytest.mark.parametrize("run", range(10))
def test_positions_rise_behind_several_readers(run: int) -> None:
    """Each reader had positions of its own, also if it was the only one that had begun; they are counted anew."""
    draw = random.Random(fresh_seed())
    shards = [[*range(draw.randrange(12))] for _ in range(9)]
    ranks = [Shuffle(ShardedStream(shards, read, num_replicas=3, rank=rank), 9) for rank in range(3)]
    for rank in ranks:
        list(islice(rank, draw.choice([0, draw.randrange(1, 15)])))
    stream = resumed(Shuffle(ShardedStream(shards, read), 9), merge([saved(rank) for rank in ranks]))
    (reader,) = stream._start().streams
    positions = list[float]()
    with suppress(StopIteration):
        while True:
            positions.append(reader.take()[1])
    assert positions == sorted({*positions})


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
    next(iter(bare := ShardedStream(["a1", "b1"], read)))
    with pytest.raises(StateMismatchError, match="number of shards"):
        [*resumed(ShardedStream(["c1", "d1"], read), saved(bare))]


def test_states_of_many_shards_are_small() -> None:
    """A bit for each shard, and numbers for those that are underway."""
    stream = Shuffle(ShardedStream([range(3)] * 10_000, lambda shard, start: shard[start:]), 1000)
    for _ in islice(stream, 25_000):
        pass
    assert len(json.dumps(stream.state_dict())) < 32 << 10
    assert len([*resumed(stream, saved(stream))]) == 5_000


def test_a_state_does_not_keep_what_others_have_read() -> None:
    """A shard that one rank had begun, and another one has ended since, is no longer listed by any."""
    shards = [range(number, number + 9) for number in range(4)]

    def stream(rank: int) -> Stream[Any]:
        return ShardedStream(shards, read, num_replicas=2, rank=rank, shuffle=False)

    ranks, state = [stream(0), stream(1)], None
    for count in (4, 9):
        ranks = [stream(rank) if state is None else resumed(stream(rank), state) for rank in range(2)]
        for rank in ranks:
            assert len([*islice(rank, count)]) == count
        state = merge([saved(rank) for rank in ranks])
    last = resumed(ShardedStream(shards, read, shuffle=False), state)
    assert next(iter(last)) == 6  # the fifth of shard 2
    (record,) = records_of(last)
    assert (record["done"], [number for number, *_ in record["given"]]) == ("3", [2, 3])


@pytest.mark.parametrize("run", range(10))
def test_each_epoch_gives_all_in_another_order(run: int) -> None:
    """Also where nobody tells the epoch; and one that is told is the same one each time."""
    seed = fresh_seed()
    stream = chain(seed)
    first, second = [*stream], [*stream]
    assert tokens_of(first) == tokens_of(second)
    stream.set_epoch(1)
    assert [*stream] == second

    def order(seed: int, epoch: int) -> list[int]:
        shuffled = ShardedStream([[each] for each in range(50)], read, seed=seed)
        shuffled.set_epoch(epoch)
        return [*shuffled]

    assert order(0, 0) != order(0, 1) != order(1, 1)


def test_what_was_dropped_is_made_once_more_by_nobody() -> None:
    """Behind the end of an epoch comes the next one, also by a state; an epoch that is set drops a state of another."""
    stream = ShardedStream(["ab", "cd"], lambda shard, start: shard[start:], shuffle=False)
    samples = iter(stream)
    assert [[*samples], [*samples], stream.epoch] == [["a", "b", "c", "d"], [], 1]
    behind = resumed(ShardedStream(["ab", "cd"], lambda shard, start: shard[start:]), saved(stream))
    assert (behind.epoch, sorted(behind)) == (1, ["a", "b", "c", "d"])
    next(iter(stream))
    state = saved(stream)
    stream.set_epoch(5)
    assert sorted(stream) == ["a", "b", "c", "d"]
    other = resumed(ShardedStream(["ab", "cd"], lambda shard, start: shard[start:], shuffle=False), state)
    other.set_epoch(state["epoch"])
    assert [*other] == ["b", "c", "d"]
    samples = iter(other)
    next(samples)
    other.set_epoch(7)  # inside a run it is for the next one
    assert [len([*samples]), other.epoch] == [3, 7]


def test_iterators_do_not_disturb_each_other() -> None:
    """A state is that of the one that was asked last."""
    stream = ShardedStream(["abc"], lambda shard, start: shard[start:])
    older = iter(stream)
    assert next(older) == "a"
    state, newer = saved(stream), iter(stream)
    assert saved(stream) == state
    assert [next(newer), next(newer), next(older), next(newer)] == [*"abbc"]
    assert [*resumed(ShardedStream(["abc"], lambda shard, start: shard[start:]), saved(stream))] == []
    assert [*older, saved(stream)["epoch"]] == ["c", 1]
    older, newer = iter(stream), iter(stream)
    assert [next(older), next(older), next(newer), next(older)] == [*"abac"]
    assert [*resumed(ShardedStream(["abc"], lambda shard, start: shard[start:]), saved(stream))] == []


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
    with pytest.raises(StateMismatchError, match=r"of ranks.*streams\.merge"):
        [*resumed(ShardedStream(shards, lambda shard, start: shard[start:]), states[1])]
    other_ranks = saved(ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=2, rank=1))
    for some in (states[:2], [states[0], other_ranks]):
        with pytest.raises(StateMismatchError, match="in the order of ranks"):
            merge(some)
    for other in (ShardedStream([*"abcdeg"], lambda shard, start: shard), chain(0)):
        with pytest.raises(StateMismatchError):
            [*resumed(other, merge(states))]
    one = ShardedStream(shards, read)
    next(iter(mixed := Mix([one, one], [1, 1])))
    with pytest.raises(StateMismatchError, match="weight 0"):
        [*resumed(Mix([one], [1]), saved(mixed))]
    for another in ({**states[0], "epoch": 1}, states[1]):
        with pytest.raises(StateMismatchError, match="epoch, or rank"):
            ranks[0].merge_state_dicts([states[0], another])
    with pytest.raises(StateMismatchError, match="version"):
        ranks[0].load_state_dict({**states[0], "version": 99})


def test_states_and_copies_are_by_themselves() -> None:
    """Whoever changes a state changes no stream; a stream that is read can be pickled, and the copy begins anew."""
    stream = Bucket(Shuffle(ShardedStream([[*range(9)]], read), 3), itself, max_tokens=20)
    whole = [*stream]
    stream.set_epoch(0)
    next(iter(stream))
    assert [*pickle.loads(pickle.dumps(stream))] == whole
    state = saved(stream)
    stream.load_state_dict(state)
    state["parts"].append("another")
    stream.state_dict()["parts"].append("another")
    assert stream.state_dict()["parts"] == state["parts"][:-1]


class Interrupted(BaseException):
    """As KeyboardInterrupt is, at some line."""


@pytest.mark.parametrize("run", range(20))
def test_an_interrupt_at_any_line_loses_nothing(run: int) -> None:
    """The same iterator goes on, or another one from a state; in the same order."""
    seed = fresh_seed()
    draw, stream, given = random.Random(seed), chain(seed), []
    samples, left, interrupts = iter(stream), draw.randrange(5, 400), 6

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if "streams" not in frame.f_code.co_filename or left > 0:
            return trace
        raise Interrupted

    while True:
        before = sys.gettrace()
        with uncollected():
            sys.settrace(trace if interrupts else before)
            try:
                given.append(next(samples))
            except Interrupted:
                interrupts, left = interrupts - 1, draw.randrange(5, 400)
            except StopIteration:
                break
            finally:
                sys.settrace(before)
        if left > 300:
            samples = iter(stream := resumed(chain(seed), saved(stream)))
    assert given == [*chain(seed)]
