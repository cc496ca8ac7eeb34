"""Programs that draw random numbers anywhere, also between `iter` and the first batch, and are resumed anywhere.

Each program is drawn by a seed of its own, a fresh one each time, which a failure names.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler
from tests.support import generators

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

LENGTH = 22
BATCH = 4


def numbers(kind: str, count: int = LENGTH) -> list[int]:
    """Shuffle so many numbers with a global generator."""
    found = list(range(count))
    if kind == "random":
        random.shuffle(found)
    elif kind == "numpy":
        np.random.shuffle(found)  # type: ignore[arg-type]
    else:
        found = torch.randperm(count).tolist()
    return found


class Shuffled(Sampler[int]):
    """Draws an order in its ``__iter__``, when it is first read, or index by index."""

    def __init__(self, kind: str, when: str) -> None:
        self.kind, self.when = kind, when

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(numbers(self.kind)) if self.when == "at iter" else self._read()

    def _read(self) -> Iterator[int]:
        if self.when == "at first":
            yield from numbers(self.kind)
        else:
            yield from (numbers(self.kind)[number] for number in range(LENGTH))


class Batches(Shuffled):
    """The same in batches, which no sampler of torch's reads."""

    def __iter__(self) -> Iterator[Any]:
        return map(_twice, super().__iter__())


def _twice(index: int) -> list[int]:
    return [index, index]


class Stream(IterableDataset[int]):
    """Shuffles with a global generator in ``__iter__``, when it is first read, or through a buffer."""

    def __init__(self, kind: str, when: str) -> None:
        self.kind, self.when = kind, when

    def __iter__(self) -> Iterator[int]:
        return iter(numbers(self.kind)) if self.when == "at iter" else self._read()

    def _read(self) -> Iterator[int]:
        if self.when == "at first":
            yield from numbers(self.kind)
            return
        buffer = list(range(8))
        for number in range(8, LENGTH):
            at = numbers(self.kind, len(buffer))[0]
            yield buffer[at]
            buffer[at] = number
        yield from buffer


OTHER: list[Callable[[], object]] = [
    lambda: next(iter(DataLoader(range(9), 3, shuffle=True))),  # type: ignore[arg-type]
    lambda: iter(DataLoader(range(9), 3, shuffle=True)),  # type: ignore[arg-type]
    lambda: torch.nn.Linear(3, 3),
    lambda: torch.manual_seed(5),
    lambda: random.shuffle([*range(5)]),
    lambda: np.random.rand(),
    lambda: random.seed(3),
]


class Program(NamedTuple):
    """What a program is made of, and does.

    Attributes:
        make: Makes the loader's options.
        draws_on: The sampler or the stream draws while it is read.
        was: The options of the run that is stopped.
        now: Those of the one that goes on.
        between: Done after `iter` and before the first batch.
        beside: Done after each batch.
        done: Batches before the state.
        is_restored: The trainer restores its generators before it loads the state.
    """

    make: Callable[[], dict[str, Any]]
    draws_on: bool
    was: dict[str, Any]
    now: dict[str, Any]
    between: list[Callable[[], object]]
    beside: list[Callable[[], object]]
    done: int
    is_restored: bool


def drawn_program(dice: random.Random) -> Program:
    """Return a program of this seed."""
    kind, when = dice.choice(["random", "numpy", "torch"]), dice.choice(["at iter", "at first", "while it is read"])
    is_stream, draws_on = dice.random() < 0.3, when == "while it is read"
    none, some = {"num_workers": 0}, {"num_workers": dice.choice([1, 2]), "worker_backend": "thread"}
    if is_stream:
        return Program(
            lambda: {"dataset": Stream(kind, when), "batch_size": BATCH},
            draws_on,
            none,
            none,
            dice.sample(OTHER, dice.randrange(3)),
            [] if draws_on else dice.sample(OTHER, dice.randrange(3)),
            dice.randrange(1, 6),
            dice.random() < 0.5,
        )
    makers: list[tuple[Callable[[], dict[str, Any]], bool]] = [
        (lambda: {"shuffle": True, "batch_size": BATCH}, False),
        (lambda: {"shuffle": True, "batch_size": BATCH, "generator": torch.Generator().manual_seed(4)}, False),
        (lambda: {"sampler": Shuffled(kind, when), "batch_size": BATCH}, draws_on),
        (lambda: {"sampler": Shuffled(kind, when), "batch_size": None}, draws_on),
        (lambda: {"batch_sampler": Batches(kind, when)}, draws_on),
        (lambda: {"sampler": ElasticSampler(LENGTH, 1, 0), "batch_size": BATCH}, False),
    ]
    make, draws_on = dice.choice(makers)
    return Program(
        lambda: {"dataset": range(LENGTH), **make()},
        draws_on,
        dice.choice([none, none, some]),
        dice.choice([none, none, some]),
        dice.sample(OTHER, dice.randrange(3)),
        dice.sample(OTHER, dice.randrange(3)),
        dice.randrange(1, 6),
        dice.random() < 0.5,
    )


def do(each: list[Callable[[], object]]) -> None:
    for one in each:
        one()


def played(program: Program, iterator: Any, count: int | None) -> list[Any]:
    """Take so many batches, or all that are left, and do what the program does beside; save a state after each."""
    found = []
    while count is None or len(found) < count:
        batch = next(iterator, None)
        if batch is None:
            break
        found.append(torch.as_tensor(batch).tolist())
        do(program.beside)
        iterator.state_dict()
    return found


@pytest.mark.parametrize("number", [*range(30), *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 120))])
def test_a_program_that_draws_anywhere_is_resumed_exactly_or_the_sampler_is_named(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of the epoch is what the interrupted program would have had, whatever it has drawn, and when."""
    caplog.set_level(logging.WARNING, "asyncloader")
    seed = time.time_ns() % (1 << 32)
    program = drawn_program(random.Random(seed))
    generators.seed_all(seed)
    loader: DataLoader[Any] = DataLoader(**program.make(), **program.was)
    iterator = iter(loader)
    do(program.between)
    played(program, iterator, program.done)
    state, saved = loader.state_dict(), generators.save(None)
    expected = played(program, iterator, None)
    loader.close()

    generators.seed_all(seed + 1)
    resumed: DataLoader[Any] = DataLoader(**program.make(), **program.now)
    resumed.load_state_dict(state)
    if program.is_restored:
        generators.restore(saved, None)
    iterator = iter(resumed)
    if not program.is_restored:
        do(program.between)
    rest = played(program, iterator, None)
    is_named = "draws from global random generators while it is read, and not only when it begins" in caplog.text
    is_stream = "is read depends on what else draws from them" in caplog.text
    assert rest == expected or (program.draws_on and (is_named or is_stream)), f"seed {seed}: {program}"
    assert program.draws_on or not is_named, f"seed {seed}: {program}"
    resumed.close()


def test_two_loaders_that_are_read_in_turns() -> None:
    """The second one's `iter` draws its base seed between the first one's `iter` and its order."""

    def make() -> list[DataLoader[int]]:
        return [DataLoader(range(24), 4, shuffle=True) for _ in range(2)]  # type: ignore[arg-type]

    def listed(pairs: Iterator[Any]) -> list[Any]:
        return [[batch.tolist() for batch in pair] for pair in pairs]

    torch.manual_seed(1)
    loaders = make()
    pairs = zip(*loaders, strict=True)
    next(pairs)
    for _ in range(5):
        states = [loader.state_dict() for loader in loaders]
        torch.manual_seed(2)
        resumed = make()
        for loader, state in zip(resumed, states, strict=True):
            loader.load_state_dict(state)
        found = listed(zip(*resumed, strict=True))
        seen = [{index for pair in found for index in pair[at]} for at in range(2)]
        pair = [batch.tolist() for batch in next(pairs)]
        assert found[0] == pair
        assert [len(each) for each in seen] == [4 * len(found)] * 2
