"""What each part of a chain does: shares, order, blocks, batches; and which error names what."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.errors import ConfigurationError
from asyncloader.samplers import pack_collate
from asyncloader.streams import Bucket, Filter, Map, Mix, Pack, ShardedStream, Shuffle, Stream, merge
from tests.streams.chains import records_of


def stream_of(samples: Any, **options: Any) -> ShardedStream[Any]:
    return ShardedStream([samples], lambda shard, start: shard[start:], **options)


def raised(stream: Stream[Any], count: int | None = None) -> tuple[list[Any], list[str]]:
    """Return what a stream gives, and what it raises in between, with its notes; so many at most."""
    given, errors, samples = list[Any](), list[str](), iter(stream)
    while len(given) + len(errors) != count:
        try:
            given.append(next(samples))
        except StopIteration:
            return given, errors
        except Exception as error:
            errors.append(" ".join([str(error), *error.__notes__]))
    return given, errors


def test_bad_samples_and_shards_are_named_and_passed() -> None:
    """A shard that raises is left; a bad sample costs itself. Each counts as given, but for the rest of the shard."""

    def read(shard: str, start: int) -> Iterator[Any]:
        for number in range(start, 4):
            if shard == "short" and number == 2:
                raise EOFError("cut short")
            yield ValueError("bad line") if number == 1 else (shard, number)

    def half(sample: tuple[str, int]) -> tuple[str, int]:
        if sample == ("fine", 3):
            raise StopIteration
        return sample

    def opened(shard: str, start: int) -> Iterator[Any]:
        return next(iter(())) if shard == "gone" else read(shard, start)

    stream = Map(ShardedStream(["fine", "gone", "short"], opened, shuffle=False), half)
    given, errors = raised(stream, 8)
    assert given == [("fine", 0), ("fine", 2), ("short", 0)]
    assert [error.split(" Raised ")[1] for error in errors] == [
        "in place of sample 1 of shard 0, 'fine'.",
        "for sample 3 of shard 0, 'fine'.",
        "and the rest of the shard left out, at sample 0 of shard 1, 'gone'.",
        "in place of sample 1 of shard 2, 'short'.",
        "and the rest of the shard left out, at sample 2 of shard 2, 'short'.",
    ]
    _, own, _ = stream.state_dict()["parts"][0][2][0]
    assert (own["done"], own["given"]) == ("1", [[1, 4, 0, [], []], [2, 4, 2, [], []]])  # the first shard's bit is set


def test_what_is_left_out_counts_as_given() -> None:
    """What a filter stops, what is too long, what a function fails with: a state lists none of them one by one."""

    def failing(sample: int) -> int:
        return sample // (sample % 2)

    def fail_to_cut(sample: int, start: int, stop: int) -> int:
        return failing(0)

    def stream() -> ShardedStream[int]:
        return stream_of(range(100))

    for made in [
        Filter(stream(), lambda sample: sample % 2),
        Map(stream(), failing),
        Mix([stream()], [1], by=failing),
        Pack(stream(), {"tokens": 1}, lambda sample: 1 + (sample + 1) % 2, too_long="drop", window=2),
        Pack(stream(), {"tokens": 1}, lambda sample: 1 + (sample + 1) % 2, too_long="cut", window=2, cut=fail_to_cut),
        Pack(stream(), {"tokens": 1}, lambda sample: 1 + sample % 2 * 3, too_long="cut", cut=lambda sample, *_: sample),
        Bucket(stream(), failing, max_tokens=150, window=2),
    ]:
        samples, given = iter(made), list[Any]()
        while len(given) < 20 or given[-1] == given[-2]:
            with suppress(ZeroDivisionError):
                given.append(next(samples))
        (record,) = records_of(made)
        ((_, _, low, beyond, cut),) = record["given"]
        assert low >= 8
        assert len(beyond) <= 3  # of those that were read ahead
        assert len(cut) <= 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders_leave_bad_samples_and_shards_out(num_workers: int) -> None:
    """By `on_error`, as of any dataset: a sample, the rest of a shard, what a function raises. Otherwise they raise."""

    def read(shard: int, start: int) -> Iterator[Any]:
        for number in range(start, 4):
            if (shard, number) == (1, 2):
                raise EOFError("cut short")
            yield ValueError("bad line") if (shard, number) == (0, 1) else 10 * shard + number

    stream = Map(ShardedStream([0, 1, 2], read, shuffle=False), lambda sample: sample // (sample != 21) * 1)
    options: Any = {"num_workers": num_workers, "worker_backend": "thread"}
    loader = DataLoader(stream, 2, on_error="skip", **options)
    assert sorted(sample for batch in loader for sample in batch.tolist()) == [0, 2, 3, 10, 11, 20, 22, 23]
    assert loader.stats().faults.bad_count == 3
    with pytest.raises(ValueError, match="bad line") as caught:
        [*DataLoader(stream, 2, **options)]
    assert "in place of sample 1 of shard 0" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_worker_may_do_what_takes_time(num_workers: int) -> None:
    """ParallelMap has the chain read once, and its function done by whichever worker is free; it resumes exactly."""

    def loader() -> Any:
        shards = [range(30 * number, 30 * number + 30) for number in range(3)]
        shuffled = Shuffle(ShardedStream(shards, lambda shard, start: shard[start:]), 8)
        pack = Pack(shuffled, {"tokens": 9}, lambda sample: 1 + sample % 4)
        options: Any = {"num_workers": num_workers, "worker_backend": "thread"} if num_workers else {}
        return DataLoader(ParallelMap(pack, sum), 2, **options)

    whole = [batch.tolist() for batch in loader()]
    begun = loader()
    assert [batch.tolist() for batch in islice(begun, 5)] == whole[:5]
    other = loader()
    other.load_state_dict(begun.state_dict())
    assert [batch.tolist() for batch in other] == whole[5:]
    begun.close()


@pytest.mark.parametrize("by", [None, len])
def test_shares_are_exact(by: Any) -> None:
    """At any moment but for one sample of each; where weights change, from there on."""
    texts = ["a" * 9, "b", "c" * 3]
    shares = [0.6, 0.3, 0.1]
    mix = Mix([stream_of([text] * 3000) for text in texts], [(0, shares), (2000, [0, 1, 1])], by=by)
    samples: Any = iter(mix)
    seen = [*islice(samples, 3000)]
    assert len(samples._part._turns) < 5  # those that were given are forgotten
    for count in (10, 100, 1000, 2000):
        used = [sum((by or (lambda _: 1))(each) for each in seen[:count] if each == text) for text in texts]
        for own, share, text in zip(used, shares, texts, strict=True):
            assert abs(own - share * sum(used)) <= 9 + len(text)
    late = seen[2000:]
    assert "a" * 9 not in late
    assert by or abs(late.count("b") - late.count("c" * 3)) <= 1


def test_a_stream_that_has_ended_is_left_out_or_ends_the_epoch() -> None:
    """As `stop` says; one of weight 0 gives nothing."""
    streams = [stream_of("aaaa"), stream_of("bb"), stream_of("c")]
    assert "".join(Mix(streams, [1, 1, 0])) == "ababaa"
    assert "".join(Mix(streams, [1, 1, 0], stop="first")) == "abab" + "a"
    owing = [stream_of(["a" * 9] * 2), stream_of("b" * 20), stream_of("c")]  # others catch up with the first
    assert "".join(Mix(owing, [1, 1, 1], by=len))[:20] == "a" * 9 + "bcb" + "b" * 7 + "a"


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("step", range(41, 45))
def test_weights_change_at_a_step_of_all_ranks(step: int, last: int) -> None:
    """Wherever samples were given before: on two ranks, then three, then others, some of them out of their order."""

    def stream(ranks: int, rank: int) -> Stream[Any]:
        def part(name: str) -> Stream[Any]:
            shards = [[name] * 20 for _ in range(6)]
            return ShardedStream(shards, lambda shard, start: shard[start:], num_replicas=ranks, rank=rank)

        return Shuffle(Mix([part("a"), part("b")], [(0, [1, 0]), (step, [0, 1])]), 5)

    given, state = list[str](), None
    for ranks, count in ((2, 5), (3, 3), (2, 0), (last, None)):  # once, nobody has begun
        streams = [stream(ranks, rank) for rank in range(ranks)]
        for each in streams:
            if state is not None:
                each.load_state_dict(state)
            given += islice(each, count)
        state = merge([each.state_dict() for each in streams])
    assert given.count("b") == 120
    assert given.count("a") == step + (step - 19) % last  # each rank has the same number


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_change_at_a_step_behind_one_reader(ranks: int) -> None:
    """What one rank has given counts once, however many go on."""

    def stream(rank: int, ranks: int) -> Stream[Any]:
        sources = [[[name] * 8 for _ in range(6)] for name in "ab"]
        own = {"num_replicas": ranks, "rank": rank}
        parts = [ShardedStream(shards, lambda shard, start: shard[start:], **own) for shards in sources]
        return Mix(parts, [(0, [1, 0]), (24, [0, 1])])

    first = stream(0, 1)
    given, state = [*islice(first, 12)], merge([first.state_dict()])
    for rank in range(ranks):
        other = stream(rank, ranks)
        other.load_state_dict(state)
        given += other
    assert (given.count("a"), given.count("b")) == (24, 48)


@pytest.mark.parametrize(
    ("sizes", "weights", "stop"),
    [
        ((20, 3), [(0, [1, 1]), (30, [1, 0])], "first"),  # it has ended, although other weights would hold later
        ((5, 8), [(0, [1, 0]), (6, [1, 1])], "all"),  # the only stream ends before the step
    ],
)
def test_a_stream_that_ends_before_a_step_ends_there_after_a_resume_too(sizes: Any, weights: Any, stop: Any) -> None:
    """Saved behind each sample, some of which have come before their turn."""

    def shuffled() -> Stream[Any]:
        named = zip("ab", sizes, strict=True)
        streams = [stream_of([f"{name}{number}" for number in range(size)]) for name, size in named]
        return Shuffle(Mix(streams, weights, stop=stop), 5)

    whole = [*shuffled()]
    for position in range(1, len(whole) + 1):
        begun, other = shuffled(), shuffled()
        assert [*islice(begun, position)] == whole[:position]
        other.load_state_dict(begun.state_dict())
        assert [*other] == whole[position:], position


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_weights_change_at_a_step_with_other_numbers_of_workers(ranks: int, before: int, after: int) -> None:
    """A rank's workers know what they have given; other ranks have given as much."""

    def loaders(workers: int) -> list[DataLoader[Any]]:
        made = []
        for rank in range(ranks):
            own = {"num_replicas": ranks, "rank": rank}
            parts = [
                ShardedStream([[number] * 24 for _ in range(12)], lambda shard, start: shard[start:], **own)
                for number in range(2)
            ]
            mix = Mix(parts, [(0, [1, 0]), (96, [0, 1])])
            made.append(DataLoader(mix, 4, num_workers=workers, worker_backend="thread"))
        return made

    given, states = list[int](), list[Any]()
    for loader in loaders(before):
        given += [number for batch in islice(loader, 24 // ranks // 2) for number in batch.tolist()]
        states.append(loader.state_dict())
    for loader, state in zip(loaders(after), states, strict=True):
        loader.load_state_dict(state)
        given += [number for batch in loader for number in batch.tolist()]
    assert abs(given.count(0) - 96) < after * ranks


def test_streams_may_be_added_at_a_resume() -> None:
    """Those that were there go on; all samples come once."""
    stream = Mix([stream_of(range(10)), stream_of(range(10, 20))], [1, 1])
    given = [*islice(stream, 7)]
    more = Mix([stream_of(range(10)), stream_of(range(10, 20)), stream_of(range(20, 30))], [1, 1, 1])
    more.load_state_dict(stream.state_dict())
    rest = [*more]
    assert sorted(given + rest) == [*range(30)]
    assert 20 in rest[:3]


def test_costs_are_numbers() -> None:
    """Those of torch and numpy too; states keep theirs. What has no exact size is refused, and so is a step in vain."""
    mix = Mix([stream_of("aaaa"), stream_of("bb")], [1, 1], by=lambda sample: torch.tensor(2.0))
    samples = iter(mix)
    next(samples)
    state = mix.state_dict()
    used = json.dumps(state)
    next(samples)
    assert json.dumps(state) == used
    assert "float" in raised(Pack(stream_of([0.4]), {"tokens": 1}, lambda sample: sample))[1][0]
    assert "length -1" in raised(Bucket(stream_of("a"), lambda sample: -1, max_tokens=1))[1][0]
    for cost in (-1, float("inf"), float("nan")):
        assert "cost of a sample" in raised(Mix([stream_of("a")], [1], by=lambda _, cost=cost: cost))[1][0]
    assert "".join(Mix([stream_of("aa"), stream_of("b")], [1, 1], by=lambda _: 0)) == "aab"
    budgets = {"tokens": 2, "images": 1}
    for found in (1, {"tokens": 1, "images": -1}):
        _, (error,) = raised(Pack(stream_of("a"), budgets, lambda _, own=found: own))
        assert "for each of ['tokens', 'images']" in error
    assert "".join(Mix([stream_of("aaa"), stream_of("bbb")], [(0, [1, 0]), (8, [0, 1])])) == "aaabbb"


def test_samples_are_shuffled_near_their_places() -> None:
    """None is further away than the size; the average is a third of it, as of uniform places."""
    moved = [number - place for place, number in enumerate(Shuffle(stream_of(range(5000)), 100))]
    assert max(map(abs, moved)) < 100
    assert 20 < sum(map(abs, moved)) / len(moved) < 50
    assert [*Shuffle(stream_of(range(50)), 10, seed=1)] != [*Shuffle(stream_of(range(50)), 10)]


def test_each_shuffle_has_an_order_of_its_own() -> None:
    """Other numbers in each epoch, part of a chain, worker, and in each 4,096 samples."""

    def stream() -> Stream[int]:
        return Shuffle(ShardedStream([range(50), range(50, 100)], lambda shard, start: shard[start:], shuffle=False), 9)

    def one() -> Stream[int]:
        return Shuffle(stream_of(range(50)), 9)

    same = one()
    assert [*same] != [*same]
    mixed = [*Mix([one(), one()], [1, 1])]
    assert mixed[::2] != mixed[1::2]
    own = [*DataLoader(stream(), None, num_workers=2, worker_backend="thread")]
    assert sorted(own) == [*range(100)]
    assert [number % 50 for number in own[::2]] != [number % 50 for number in own[1::2]]
    moved = [number - place for place, number in enumerate(Shuffle(stream_of(range(8500)), 100))]
    assert moved[100:4000] != moved[4196:8096]


def test_blocks_are_full() -> None:
    """Lengths as of documents: 99.5 % of a block at least; of two budgets 95 % of the tighter one."""
    draw = random.Random(0)
    lengths = [min(8192, int(draw.lognormvariate(6, 1.2)) + 1) for _ in range(6000)]
    blocks = [*Pack(stream_of(lengths), {"tokens": 8192}, lambda length: length)]
    assert sum(lengths) / (8192 * len(blocks)) > 0.995
    assert sorted(length for block in blocks for length in block) == sorted(lengths)
    names = {"tokens": 8192, "images": 16}
    pairs = [{"tokens": length, "images": min(16, int(draw.expovariate(0.5) + length / 2000))} for length in lengths]
    blocks = [*Pack(stream_of(pairs), names, lambda pair: pair)]
    fills = [sum(pair[name] for pair in pairs) / len(blocks) / most for name, most in names.items()]
    assert max(fills) > 0.95
    assert all(sum(pair[name] for pair in block) <= most for block in blocks for name, most in names.items())
    triples = [{**pair, "audio": draw.randrange(70)} for pair in pairs]
    names["audio"] = 100
    for block in Pack(stream_of(triples), names, lambda triple: triple):
        assert all(sum(triple[name] for triple in block) <= most for name, most in names.items())


def test_short_samples_do_not_wait_for_long() -> None:
    """Or a state would have all that was given meanwhile: the longest samples fill each block."""
    draw = random.Random(0)
    shards = [[min(2048, int(draw.lognormvariate(5, 1.5)) + 1) for _ in range(2000)] for _ in range(10)]
    read = ShardedStream(shards, lambda shard, start: shard[start:])
    stream = Pack(Shuffle(Mix([read], [1]), 1000), {"tokens": 2048}, lambda length: length)
    sizes = [len(json.dumps(stream.state_dict())) for number, _ in enumerate(stream) if number % 100 == 50]
    assert max(sizes) < 64 << 10


@pytest.mark.parametrize(
    ("lengths", "first"),
    [
        ([2, 2, 8, 6], [2, 2, 6]),  # not the first one alone, whose block 8 would fill
        ([2, 2, 3, 6], [2, 2, 6]),  # 3 would be beyond the half
        ([2, 3, 8, 5], [2, 3, 5]),  # exactly half
        ([7, 1, 2, 3], [7, 3]),  # the first one in any case
    ],
)
def test_a_block_begins_with_those_that_have_waited_longest(lengths: list[int], first: list[int]) -> None:
    """Up to half of it; then comes the longest one that fits."""
    assert next(iter(Pack(stream_of(lengths), {"tokens": 10}, int))) == first


def test_long_samples_are_refused_dropped_or_cut() -> None:
    """And cut ones lose no token."""
    words = ["aaaa", "bbbbbbbbbbbb", "c", "dd"]
    given, errors = raised(Pack(stream_of(words), {"letters": 5}, len))
    assert given == [["aaaa", "c"], ["dd"]]
    assert "'letters': 12" in errors[0]
    assert "sample 1 of shard 0" in errors[0]
    assert [*Pack(stream_of(words), {"letters": 5}, len, too_long="drop")] == [["aaaa", "c"], ["dd"]]
    assert [*Pack(stream_of(words), {"letters": 5}, len, too_long="cut")] == [
        ["aaaa", "c"],
        ["b" * 5],
        ["b" * 5],
        ["bb", "dd"],
    ]
    split = [*Pack(stream_of(words), {"letters": 5}, len, split=True)]
    assert split == [["aaaa", "b"], ["bbbbb"], ["bbbbb"], ["b", "c", "dd"]]
    given, errors = raised(Pack(stream_of(words), {"letters": 5}, len, too_long="cut", cut=lambda *_: 1 // 0))
    assert given == [["aaaa", "c"], ["dd"]]
    assert "sample 1 of shard 0" in errors[0]

    def cut_once(word: str, start: int, stop: int) -> str:
        return word[start:stop] if start == 0 else word[1 // 0]

    words = ["b" * 9, "aaaa", "c", "dd"]
    given, errors = raised(Pack(stream_of(words), {"letters": 7}, len, too_long="cut", cut=cut_once))
    assert given == [["b" * 7], ["aaaa", "c", "dd"]]  # what was left of the first is gone
    assert "sample 0 of shard 0" in errors[0]
    others = {"name": "x" * 7, "weight": torch.tensor(1.0)}
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7], "mask": [0, 0, 0, 0, 0, 0, 1], **others}]
    parts = [*Pack(stream_of(rows), {"tokens": 4}, lambda row: len(row["input_ids"]), too_long="cut")]
    assert parts == [
        [{"input_ids": [1, 2, 3, 4], "mask": [0, 0, 0, 0], **others}],
        [{"input_ids": [5, 6, 7], "mask": [0, 0, 1], **others}],
    ]


def test_blocks_are_laid_out_as_they_were_packed() -> None:
    """A block keeps its samples, also where the next one's first would fit into it."""
    documents = [[1] * 4, [2] * 3, [3] * 3, [4] * 2]
    stream = Pack(stream_of(documents), {"tokens": 6}, len, window=2)
    (batch,) = DataLoader(stream, 3, collate_fn=partial(pack_collate, block_size=6))
    assert batch["input_ids"].tolist() == [[1, 1, 1, 1, 0, 0], [2, 2, 2, 3, 3, 3], [4, 4, 0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 9, 12, 14, 18]
    assert torch.equal(batch["position_ids"][1], torch.tensor([0, 1, 2, 0, 1, 2]))


def test_batches_are_of_like_lengths() -> None:
    """Under the bound on tokens, padding included; those of bounds have one of them."""
    draw = random.Random(1)
    words = ["x" * draw.randrange(1, 100) for _ in range(2000)]
    batches = [*Bucket(stream_of(words), len, max_tokens=800, window=500)]
    assert sorted(word for batch in batches for word in batch) == sorted(words)
    laid_out = [len(batch) * max(map(len, batch)) for batch in batches]
    assert max(laid_out) <= 800
    assert sum(map(len, words)) / sum(laid_out) > 0.9
    assert [*Bucket(stream_of(["aaa", "bb", "ccc", "d"]), len, max_tokens=9)] == [["aaa", "bb", "ccc"], ["d"]]
    bounded = [*Bucket(stream_of(words), len, max_tokens=800, bounds=[50, 25, 100])]
    assert all(len({(len(word) > 25) + (len(word) > 50) for word in batch}) == 1 for batch in bounded)
    for bounds in ([], [8], [10]):
        assert "length 9" in raised(Bucket(stream_of(["x" * 9]), len, max_tokens=9 - (not bounds), bounds=bounds))[1][0]


def test_what_cannot_work_is_refused_at_once() -> None:
    """With what to do."""
    stream = stream_of("abc")
    packed = Pack(stream, {"tokens": 3}, len)
    for make, words in [
        (lambda: ShardedStream("path", len), "a list"),  # type: ignore[arg-type]
        (lambda: ShardedStream(["path"], 3), "read should be a function"),  # type: ignore[arg-type]
        (lambda: Shuffle(range(3), 3), "a part of asyncloader.streams"),  # type: ignore[arg-type]
        (lambda: Shuffle(stream, 0), "size"),
        (lambda: Shuffle(packed, 3), "have it within that part"),
        (lambda: Pack(Filter(packed, bool), {"tokens": 3}, len), "have it within that part"),
        (lambda: Map(stream, 3), "fn should be a function"),  # type: ignore[arg-type]
        (lambda: Mix([stream, stream_of("abc", num_replicas=2, rank=0)], [1, 1]), "one rank"),
        (lambda: Mix([], []), "streams should be"),
        (lambda: Mix([stream], [1, 1]), "1 sources"),
        (lambda: Mix([stream], [(5, [1])]), "from sample 0"),
        (lambda: Mix([stream], [0]), "not all 0"),
        (lambda: Mix([stream], [1], stop="last"), "stop"),  # type: ignore[arg-type]
        (lambda: Pack(stream, 8192, len), "budgets"),  # type: ignore[arg-type]
        (lambda: Pack(stream, {"a": 1, "b": 2}, len, split=True), "one budget"),
        (lambda: Pack(stream, {"a": 1}, 3), "lengths should be"),  # type: ignore[arg-type]
        (lambda: Bucket(stream, len, max_tokens=8, bounds=[4, 0]), "a bound"),
        (lambda: Bucket(stream, 3, max_tokens=8), "length should be"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ConfigurationError, match=words):
            make()
