"""Datasets with generators of their own, drawn at random: those that are alike agree, a seed fixes what they draw."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader import DataLoader
from tests.seeding.test_own_generators import KINDS, draw
from tests.support import effort

COUNT = 11

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Nested:
    """Holds a generator in a transform, in a list, in a dictionary or in a partial."""

    def __init__(self, generator: Any, how: str) -> None:
        self.how = how
        self.held: Any = {"transform": generator, "list": [generator], "dictionary": {"rng": generator}}.get(how)
        if how == "partial":
            self.held = partial(draw, generator)

    def __call__(self) -> float:
        if self.how == "partial":
            return float(self.held())
        return draw(
            {"list": lambda: self.held[0], "dictionary": lambda: self.held["rng"]}.get(self.how, lambda: self.held)()
        )


class Drawn(Dataset[Any]):
    def __init__(self, kind: str, seeds: tuple[int, ...], hows: tuple[str, ...], of: int) -> None:
        self.transforms = [Nested(KINDS[kind](seed), how) for seed, how in zip(seeds, hows, strict=False)]
        self.of = of

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.of + index, [transform() for transform in self.transforms]


@dataclasses.dataclass(frozen=True)
class Program:
    kind: str
    seeds: tuple[int, ...]
    hows: tuple[str, ...]
    wrapping: str
    seeding: str
    batch_size: int

    def dataset(self) -> Any:
        one, other = (Drawn(self.kind, self.seeds, self.hows, of) for of in (0, 100))
        if self.wrapping == "both":
            return ConcatDataset([one, Subset(other, range(4))])
        return Subset(one, range(1, COUNT)) if self.wrapping == "subset" else one

    def loader(self, **how: Any) -> Any:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2)
        return DataLoader(
            self.dataset(), self.batch_size, shuffle=True, generator=generator, seeding=self.seeding,  # type: ignore[arg-type]
            collate_fn=list, **how,
        )  # fmt: skip

    def check(self, epochs: list[list[Any]]) -> None:
        """See whether generators that are alike agree, and others do not; and no two draws of one are the same."""
        for _, drawn in (sample for batches in epochs for batch in batches for sample in batch):
            by_seed = dict(zip(self.seeds, drawn, strict=True))
            assert drawn == [by_seed[seed] for seed in self.seeds]
            assert len(set(drawn)) == len(by_seed)
        if self.wrapping != "both":  # where two datasets hold generators that are alike
            first = [drawn[0] for batches in epochs for batch in batches for _, drawn in batch]
            assert len(set(first)) == len(first)


PROGRAMS = some.builds(
    Program,
    kind=some.sampled_from(sorted(KINDS)),
    seeds=some.lists(some.integers(1, 2), min_size=1, max_size=4).map(tuple),
    hows=some.tuples(*[some.sampled_from(["transform", "list", "dictionary", "partial"])] * 4),
    wrapping=some.sampled_from(["none", "subset", "both"]),
    seeding=some.sampled_from(["batch", "sample"]),
    batch_size=some.integers(1, 5),
)


def drawn_in(batches: list[Any]) -> list[Any]:
    return [drawn for batch in batches for _, drawn in batch]


@settings(max_examples=effort.examples(6), deadline=None)
@given(PROGRAMS, some.integers(0, 3), some.booleans(), some.integers(0, 2), some.integers(0, 12))
def test_draws_follow_from_the_seeds(
    program: Program, num_workers: int, persistent: bool, epoch: int, done: int
) -> None:
    """With any workers, where the trainer draws in the middle, after a resume anywhere, and by a batch's number."""
    reference = program.loader(num_workers=1)
    expected = [list(reference) for _ in range(3)]
    program.check(expected)
    how: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        how |= {"multiprocessing_context": "fork", "persistent_workers": persistent}
    elif program.seeding == "batch":  # which seeds nothing without workers
        how["num_workers"] = 2
    loader = program.loader(**how)
    is_same_order = not how.get("persistent_workers")  # these draw another base seed, and the order after it
    for number in range(epoch):
        seen = list(loader)
        assert not is_same_order or seen == expected[number]
        assert program.wrapping == "both" or drawn_in(seen) == drawn_in(expected[number])
    iterator, seen = iter(loader), list[Any]()
    for batch in iterator:
        seen.append(batch)
        if len(seen) > done:
            break
    loader.dataset[0]
    state = json.loads(json.dumps(loader.state_dict()))
    again = loader.batch(epoch, len(seen) - 1)
    assert again == seen[-1]
    rest = list(iterator)
    assert not is_same_order or seen + rest == expected[epoch]
    loader.close()
    resumed = program.loader(**{**how, "num_workers": max(how["num_workers"], 1)})
    resumed.load_state_dict(state)
    if rest:
        assert list(resumed) == rest
    resumed.close()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_draws_do_not_depend_on_how_workers_are_started(method: str, seeding: str) -> None:
    program = Program("Philox", (1, 2, 1), ("list", "partial", "transform", "list"), "subset", seeding, 4)
    expected = list(program.loader(num_workers=1, multiprocessing_context="fork"))
    program.check([expected])
    assert list(program.loader(num_workers=2, multiprocessing_context=method)) == expected
