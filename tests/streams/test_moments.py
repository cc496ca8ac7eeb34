"""States of moments between epochs: of ranks at different ones, merged; and after an epoch was set."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.errors import StateMismatchError
from asyncloader.samplers import ElasticSampler
from asyncloader.streams import ShardedStream, merge
from tests.streams.chains import chain, fresh_seed, itself, read, tokens_of
from tests.streams.test_loaders import resumed, saved
from tests.support import effort

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_of(dataset: Any, num_workers: int, *, is_persistent: bool = False, **options: Any) -> DataLoader[Any]:
    if num_workers:
        options |= {"worker_backend": "thread", "persistent_workers": is_persistent}
    return DataLoader(dataset, num_workers=num_workers, collate_fn=itself, **options)


def knows_end(loader: Any) -> bool:
    """Whether the epoch is over, or would be without another batch, as far as its workers have said."""
    state = loader.state_dict()
    starts = json.loads(state["workers"] or "[[0, null]]")
    return state["finished"] or all(snapshot and snapshot["ended"] for _, snapshot, *_ in starts)


def brought_to(
    seed: int, draw: random.Random, place: tuple[int, int], epoch: int, batch_size: Any
) -> tuple[Any, list[Any], int, bool]:
    """Return a loader at some moment of an epoch, what it has given of it, the epoch it is in, and if it is within it.

    Args:
        seed: Of the chain.
        draw: Chooses the moment.
        place: Its rank, and how many there are.
        epoch: The epoch.
        batch_size: Of the loader.
    """
    rank, ranks = place
    stream = chain(seed, ranks, rank)
    loader = loader_of(stream, draw.randrange(4), is_persistent=draw.random() < 0.5, batch_size=batch_size)
    if draw.random() < 0.5:
        loader.set_epoch(epoch)
    else:
        for _ in range(epoch):
            list(loader)
    match draw.choice(["before", "loaded", "within", "last", "after", "told"]):
        case "loaded":
            loader.load_state_dict(loader.state_dict())
        case "within":
            given = [*islice(loader, draw.randrange(1, 4))]
            return loader, given, epoch + knows_end(loader), not knows_end(loader)
        case "last":
            count = len([*loader])
            loader.set_epoch(epoch)
            given = [*islice(loader, count)]
            return loader, given, epoch + knows_end(loader), count > 0 and not knows_end(loader)
        case "after":
            return loader, [*loader], epoch + 1, False
        case "told":
            given = [*loader]
            loader.set_epoch(epoch + 1)
            return loader, given, epoch + 1, False
    return loader, [], epoch, False


@pytest.mark.parametrize("run", range(effort.examples(40)))
def test_ranks_at_any_moments_are_merged_or_refused(run: int) -> None:
    """All that is left of the earliest epoch comes once, and then the next one; no rank may be within that already."""
    seed = fresh_seed()
    draw, ranks = random.Random(seed), random.Random(seed + 1).randrange(1, 4)
    whole, epoch = tokens_of(chain(seed)), draw.randrange(3)
    epochs = [epoch + (draw.random() < 0.2) for _ in range(ranks)]
    batch_size = draw.choice([None, 1, 3])
    moments = [brought_to(seed, draw, (rank, ranks), each, batch_size) for rank, each in enumerate(epochs)]
    state_of_each = [saved(loader) for loader, *_ in moments]
    for loader, *_ in moments:
        loader.close()
    earliest = min(at for *_, at, _ in moments)
    count = draw.randrange(1, 4)
    others = [loader_of(chain(seed, count, rank), draw.randrange(4), batch_size=batch_size) for rank in range(count)]
    try:
        state = merge(state_of_each)
        for other in others:
            other.load_state_dict(state)
        if draw.random() < 0.3:  # nothing is given in between
            state = merge([saved(other) for other in others])
            others = [resumed(other, state) for other in others]
        rest = [batch for other in others for batch in other]
    except StateMismatchError as error:
        assert "epoch" in str(error)
        assert any(at > earliest for *_, at, _ in moments)
        return
    given: list[Any] = []
    for rank, (began, (_, own, at, is_within)) in enumerate(zip(epochs, moments, strict=True)):
        if at == earliest:
            given += own if is_within else []
        else:  # this rank has given its shards of the epoch, or was told to leave them
            one = chain(seed, ranks, rank)
            one.set_epoch(earliest)
            given += own if began == earliest else [*one]
    if rest or given:  # otherwise all had come to their last batch, and knew it
        assert sorted(tokens_of(given) + tokens_of(rest)) == whole
    assert tokens_of([batch for other in others for batch in other]) == whole
    for other in others:
        other.close()


def shuffled_stream() -> ShardedStream[int]:
    return ShardedStream([[each] for each in range(40)], read)


MADE = {
    "stream": shuffled_stream,
    "parallel map": lambda: ParallelMap(shuffled_stream(), int),
    "sampler": lambda: range(40),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("num_workers", range(4))
@pytest.mark.parametrize("kind", MADE)
def test_an_epoch_that_was_set_is_in_states_between_epochs(kind: str, num_workers: int, is_persistent: bool) -> None:
    """Before the first one, after one or two, after another load: the resumed loader begins it, and then the next."""

    def made() -> DataLoader[Any]:
        dataset = MADE[kind]()
        options = {"sampler": ElasticSampler(40, num_replicas=1, rank=0)} if kind == "sampler" else {}
        return loader_of(
            dataset, num_workers, is_persistent=is_persistent and num_workers > 0, batch_size=None, **options
        )

    def epoch_of(loader: Any) -> int:
        return numbers[tuple(loader)]

    numbers, loader = dict[Any, int](), made()
    for epoch in range(9):
        loader.set_epoch(epoch)
        numbers[tuple(loader)] = epoch
    loader.close()
    moments = [(before, epoch) for before in range(3) for epoch in (None, 0, before, 7)]
    for before, epoch in effort.share(moments, num_workers, 3):  # with 0, 1 and 2 workers, each of these
        loader = made()
        for _ in range(before):
            list(loader)
        if epoch is not None:
            loader.set_epoch(epoch)
        state = saved(loader)
        expected = before if epoch is None else epoch
        other = resumed(made(), state)
        assert [epoch_of(loader), epoch_of(other), epoch_of(other)] == [expected, expected, expected + 1]
        other.load_state_dict(state)
        other.set_epoch(3)
        again = resumed(made(), saved(other))
        assert [epoch_of(other), epoch_of(again), epoch_of(again)] == [3, 3, 4]
        for each in (loader, other, again):
            each.close()


def test_an_epoch_that_is_set_after_a_load_is_in_the_next_state() -> None:
    """Also if what was loaded is of the middle of another one."""
    loader: Any = DataLoader(shuffled_stream(), None)
    first = [*islice(loader, 9)]
    other = resumed(DataLoader(shuffled_stream(), None), saved(loader))
    other.set_epoch(5)
    again = resumed(DataLoader(shuffled_stream(), None), saved(other))
    merged = resumed(DataLoader(shuffled_stream(), None), merge([saved(other)]))
    assert [*again] == [*merged] == [*other] != first
    assert len([*other]) == 40


def test_ranks_that_are_at_the_ends_of_two_epochs_are_refused() -> None:
    """One knows that its epoch is over, and the other has given the next one: nobody is in an epoch to go on with."""

    def loader(rank: int) -> DataLoader[Any]:
        return DataLoader(ShardedStream([[1], [2]], read, num_replicas=2, rank=rank), 2, collate_fn=itself)

    ranks = [loader(0), loader(1)]
    assert next(iter(ranks[0]))
    ranks[1].set_epoch(1)
    assert next(iter(ranks[1]))
    assert all(map(knows_end, ranks))
    with pytest.raises(StateMismatchError, match="epoch was"):
        merge([saved(rank) for rank in ranks])


def test_a_rank_that_was_told_the_next_epoch_has_given_its_shards() -> None:
    """Also one that was loaded in the middle of its own."""
    shards = [[number] for number in range(8)]

    def loader(ranks: int, rank: int) -> DataLoader[Any]:
        return DataLoader(ShardedStream(shards, read, num_replicas=ranks, rank=rank), None)

    ranks = [loader(2, 0), loader(2, 1)]
    first, _ = [next(iter(rank)) for rank in ranks]
    ranks[1] = resumed(loader(2, 1), saved(ranks[1]))
    ranks[1].set_epoch(1)
    other = resumed(loader(1, 0), merge([saved(rank) for rank in ranks]))
    assert sorted([first, *other]) == sorted(ShardedStream(shards, read, num_replicas=2, rank=0))
