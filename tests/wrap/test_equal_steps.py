"""equal_steps: ranks with different numbers of batches take equally many, and none waits for another for ever."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.messages.snapshot import Frozen, outlasting
from asyncloader.wrap import equal_steps
from asyncloader.wrap.rank_group import RankGroup
from asyncloader.wrap.step_iterator import EqualStepsIterator, steps_of
from asyncloader.wrap.wrapper import IteratorWrapper
from tests.support.nursery import Nursery
from tests.support.ranks import fork_ranks
from tests.wrap.equal_steps_ranks import LENGTHS, RESUMED_AFTER

PROGRAM = Path(__file__).with_name("equal_steps_ranks.py")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def expected(mode: str, lengths: Any, workers: int) -> list[list[list[int]]]:
    """What four ranks take of uneven streams, batches of 2, from their workers in turn."""
    whole = []
    for rank, length in enumerate(lengths):
        parts = [
            range(1000 * rank + worker, 1000 * rank + length, max(1, workers)) for worker in range(max(1, workers))
        ]
        batches = [[list(part[at : at + 2]) for at in range(0, len(part), 2)] for part in parts]
        whole.append([batch for row in itertools.zip_longest(*batches) for batch in row if batch is not None])
    steps = (min if mode == "drop" else max)(map(len, whole))
    return [[*own, *[own[-1]] * (steps - len(own))][:steps] for own in whole]


@pytest.fixture(scope="module")
def ranks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four gloo ranks has found; that they have come to the end at all is the point."""
    folder = tmp_path_factory.mktemp("ranks")
    return fork_ranks(nursery, PROGRAM, folder, ranks=4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["drop", "pad"])
def test_uneven_streams_are_taken_in_equal_steps(ranks: list[dict[str, Any]], mode: str, workers: int) -> None:
    """With and without workers, by `for` and `async for`, in equal streams too."""
    for case, lengths in (("", LENGTHS), (" even", (6,) * 4), (" async", LENGTHS)):
        found = [own[f"{mode} {workers}{case}"] for own in ranks]
        assert found == expected(mode, lengths, workers), case


@pytest.mark.parametrize(
    ("mode", "workers", "steps"), [(*case, steps) for case, after in RESUMED_AFTER.items() for steps in after]
)
def test_a_run_goes_on_where_it_was(ranks: list[dict[str, Any]], mode: str, workers: int, steps: int) -> None:
    """From a state of what was handed over, not of what was held; inside the last iteration nothing is left."""
    whole = expected(mode, LENGTHS, workers)
    for own, batches in zip(ranks, whole, strict=True):
        found, following = own[f"{mode} {workers} resumed after {steps}"]
        first = batches[: min(steps, len(batches))]
        assert found[: len(first)] == first
        assert following == batches
        if len(batches) >= steps:
            assert found == batches
        else:  # it was over: the next epoch follows
            assert found[len(first) :] == batches


@pytest.mark.parametrize("mode", ["drop", "pad"])
def test_persistent_workers(ranks: list[dict[str, Any]], mode: str) -> None:
    """Runs that are left, and the ones after."""
    for own, batches in zip(ranks, expected(mode, LENGTHS, 2), strict=True):
        assert own[f"{mode} persistent"] == [batches[:5], batches, batches]


def test_ends_that_are_special(ranks: list[dict[str, Any]]) -> None:
    """Streams without an end; a rank without a batch: nobody takes a step, or all are told why not."""
    assert [len(own["endless"]) for own in ranks] == [3] * 4
    assert [own["nothing"] for own in ranks] == [[]] * 4
    assert {own["nothing to repeat"] for own in ranks} == {
        'rank 1 has no batch at all that it could repeat: equal_steps with "pad" needs one on each rank'
    }


def test_a_cancelled_wait_for_ranks_is_taken_up_again(ranks: list[dict[str, Any]]) -> None:
    """Who stops waiting for the very first batch, and asks again, loses nothing, and hangs nowhere."""
    assert [own["cancelled"] for own in ranks] == expected("drop", LENGTHS, 0)


def test_loaders_that_are_mixed_up(ranks: list[dict[str, Any]]) -> None:
    """Where ranks speak of different loaders, all are told so, and no batch is lost in silence."""
    for own in ranks:
        assert len(own["mixed up"]) == 2
        assert all(told.startswith("ranks are at different loaders") for told in own["mixed up"])


def test_an_error_is_a_step_too(ranks: list[dict[str, Any]]) -> None:
    """It comes in its turn, and a rank whose last batch was one repeats it."""
    assert ranks[0]["errors"] == [[0, 1], [2, 3], *["bad: [4, 5]"] * 4]
    assert ranks[1]["errors"] == ["bad: [1000, 1001]"] * 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_counts_epochs_goes_on_counting(ranks: list[dict[str, Any]], workers: int) -> None:
    """Also on ranks whose data is left in the middle, because others have no more."""
    for own in ranks:
        same, resumed = own[f"epochs {workers}"]
        assert resumed == same
        assert len(same) == 6
        assert same[0][0] // 10_000 == 3


def test_what_ranks_agree_on() -> None:
    """From counts up to one beyond the chunk follow its steps, and whether it is the last one."""
    for counts, size, mode, steps, is_last in (
        ([3, 3, 3], 2, "drop", 2, False), ([3, 2, 3], 2, "drop", 2, True), ([3, 0, 3], 2, "drop", 0, True),
        ([0, 3, 1], 2, "pad", 2, False), ([0, 2, 1], 2, "pad", 2, True), ([1, 1, 0], 2, "pad", 1, True),
        ([0, 0, 0], 2, "pad", 0, True),
    ):  # fmt: skip
        assert steps_of(counts, size, mode) == (steps, is_last)  # type: ignore[arg-type]


def test_where_it_is_of_no_use() -> None:
    """A map-style dataset is refused, and so is another word; without other ranks nothing changes."""
    with pytest.raises(ConfigurationError, match=r"equal_steps is for iterable datasets.*ElasticSampler"):
        equal_steps(DataLoader(range(3)))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"should be one of 'drop', 'pad', but got 'padd'"):
        equal_steps(DataLoader(Stream()), "padd")  # type: ignore[arg-type]
    loader = equal_steps(DataLoader(Stream(), 2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    assert loader.batch_size == 2
    assert list(equal_steps([3, 4])) == [3, 4]


class Own(Stream):
    """Its own iterator, with a state."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("name", ["dataset", "iterator"])
def test_what_outlasts_a_run_that_is_left_in_the_middle(name: str) -> None:
    """The dataset's state, which is that of its iterator if it is its own; none of another iterator."""
    snapshot = Frozen({"dataset": None, "iterator": None, "ended": False, name: {"at": 3}})
    assert outlasting(snapshot, Own()).thaw() == {"dataset": {"at": 3}, "iterator": None, "ended": False}
    if name == "iterator":
        assert outlasting(snapshot, Stream()).thaw()["dataset"] is None


class Told(RankGroup):
    """A group of this rank and one that is not there; what that one would answer is worked out.

    Args:
        others: Batches of the other rank; 0 for as many as this one says.
    """

    def __init__(self, others: int) -> None:
        super().__init__()
        self.others = others
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _gather(self, said: list[int]) -> list[list[int]]:
        assert self.may_answer.wait(10)
        if not self.others:
            return [said]
        sizes, (*place, chunk, _) = [1, 2, 4, 8], said
        left = self.others - sum(sizes[:chunk])
        return [said, [*place, chunk, max(0, min(left, sizes[chunk] + 1))]]


def test_questions_are_answered_in_their_order() -> None:
    """By one thread, which goes when there are none, and another one comes."""
    group = Told(0)
    group.may_answer.clear()
    asked = [group.ask([number]) for number in range(3)]
    group.may_answer.set()
    assert [each.result(10) for each in asked] == [[[0]], [[1]], [[2]]]
    assert group.ask([3]).result(10) == [[3]]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("face", "moment_of"), [("for", "_take"), ("async for", "_take"), ("for", "pull")])
@pytest.mark.parametrize(("mode", "others"), [("drop", 3), ("drop", 9), ("pad", 3), ("pad", 9)])
def test_an_interrupt_in_any_step_loses_no_batch(
    mode: Any, others: int, face: str, moment_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a batch is made, just after it is held, and while ranks are waited for; states go on with the rest."""
    group = Told(others)
    monkeypatch.setattr("asyncloader.wrap.step_iterator.own_group", lambda: group)

    def of(loader: Any, taken: int) -> EqualStepsIterator:
        group.others = others - taken
        return EqualStepsIterator(iter(loader), mode, 0, iter(range(9)))

    def take(iterator: Any) -> int:
        return int(next(iterator) if face == "for" else runner.run(anext_of(iterator)))

    async def anext_of(iterator: Any) -> Any:
        return await anext(iterator)

    as_it_was = getattr(IteratorWrapper, moment_of)
    steps = (min if mode == "drop" else max)(6, others)
    whole = [min(step, 5) for step in range(steps)]
    with asyncio.Runner() as runner:
        for moment in range(2 * steps):
            left = [moment]

            def hit(left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == -1:
                    raise KeyboardInterrupt

            interrupted, seen = of(DataLoader(Six(), None), 0), []

            async def taken(wrapper: Any, hit: Any = hit) -> Any:
                if moment_of == "_take":
                    hit()
                try:
                    return await as_it_was(wrapper)
                finally:
                    if moment_of == "pull":
                        hit()

            monkeypatch.setattr(IteratorWrapper, moment_of, taken)
            while True:
                state = json.loads(json.dumps(interrupted.state_dict()))
                try:
                    seen.append(take(interrupted))
                except KeyboardInterrupt:
                    assert interrupted.state_dict() == state
                except (StopIteration, StopAsyncIteration):
                    break
            assert seen == whole
            assert interrupted.state_dict()["finished"]


class Six(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))
