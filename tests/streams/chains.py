"""Random chains of streams over random shards, and what they have to give: each token of each sample once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from asyncloader.streams import Bucket, Filter, Map, Mix, Pack, ShardedStream, Shuffle, Stream


class Sample(NamedTuple):
    """A sample of some tokens, or a part of one. It has no order, as dictionaries and tensors have none."""

    stream: str
    shard: int
    number: int
    start: int
    stop: int

    def __lt__(self, other: object) -> bool:
        raise TypeError("samples have no order")


def fresh_seed() -> int:
    """Return a seed, and print it: of a test that fails, pytest shows what was printed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return seed


def length(sample: Sample) -> int:
    return sample.stop - sample.start


def both(sample: Sample) -> dict[str, int]:
    return {"tokens": length(sample), "samples": 1}


def cut(sample: Sample, start: int, stop: int) -> Sample:
    return sample._replace(start=start, stop=stop)


def read(shard: list[Sample], start: int) -> Iterator[Sample]:
    yield from shard[start:]


def is_wanted(sample: Sample) -> bool:
    return sample.number % 5 != 3


def itself(sample: Sample) -> Sample:
    return sample


def chain(seed: int, num_replicas: int = 1, rank: int = 0) -> Stream[Any]:
    """Return the chain of a seed, for one rank."""
    draw = random.Random(seed)

    def sharded(name: str) -> Stream[Any]:
        shards = [
            [Sample(name, shard, number, 0, draw.choice([1, 1, 2, 3, 5, 9])) for number in range(draw.randrange(12))]
            for shard in range(draw.randrange(1, 14))
        ]
        ranks = {"num_replicas": num_replicas, "rank": rank}
        return ShardedStream(shards, read, **ranks, shuffle=draw.random() < 0.7, seed=draw.randrange(99))

    stream = sharded("a")
    if draw.random() < 0.7:
        streams = [stream, *map(sharded, "bc"[: draw.randrange(3)])]
        streams = [Shuffle(each, draw.randrange(1, 9)) if draw.random() < 0.5 else each for each in streams]
        weights: list[Any] = [draw.choice([0.5, 1, 2]) for _ in streams]
        if draw.random() < 0.5:
            first = [weights[0] * draw.randrange(2), *weights[1:]] if len(streams) > 1 else weights
            weights = [(0, first), (draw.randrange(1, 30), weights[::-1])]
        stream = Mix(streams, weights, by=draw.choice([None, length]))
    if draw.random() < 0.4:
        stream = Map(stream, itself)
    if draw.random() < 0.3:
        stream = Filter(stream, is_wanted)
    for _ in range(draw.choice([0, 1, 1, 2])):
        stream = Shuffle(stream, draw.randrange(1, 12), draw.randrange(9))
    return _together(stream, draw)


def _together(stream: Stream[Any], draw: random.Random) -> Stream[Any]:
    window, tokens = draw.randrange(1, 12), draw.randrange(9, 20)
    match draw.randrange(6):
        case 0:
            return Bucket(stream, length, max_tokens=tokens, window=window)
        case 1:
            return Bucket(stream, length, max_tokens=tokens, window=window, bounds=[2, 9])
        case 2:
            return Pack(stream, {"tokens": tokens}, length, window=window)
        case 3:
            return Pack(stream, {"tokens": tokens, "samples": 3}, both, window=window)
        case 4:
            few = {"tokens": draw.randrange(4, 7)}
            return Pack(stream, few, length, window=window, too_long="cut", cut=cut, split=draw.random() < 0.5)
    return stream


def records_of(stream: Stream[Any]) -> list[dict[str, Any]]:
    """Return what the state of a stream has for each of its streams of shards, in each reading."""
    records, parts = list[dict[str, Any]](), list[Any](stream.state_dict()["parts"])
    while parts:
        kind, own, within = parts.pop()
        records += [own] if kind == "ShardedStream" else []
        parts += within
    return records


def samples_of(given: Iterable[Any]) -> list[Sample]:
    """Return the samples of what a stream, or a loader, has given."""
    return [sample for each in given for sample in ([each] if isinstance(each, Sample) else samples_of(each))]


def tokens_of(given: Iterable[Any]) -> list[Any]:
    """Return what tells the tokens apart that were given, in order of their places."""
    samples = samples_of(given)
    return sorted((*each[:3], token) for each in samples for token in range(each.start, each.stop))
