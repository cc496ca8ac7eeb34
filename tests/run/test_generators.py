"""Who owns a random generator: at a resume the sampler draws what it had drawn, and goes on from where it is put back.

Each sampler is read to each place, ahead of the batches that are done with by each number; then a state is taken, and
the run is resumed with generators that the trainer has restored, or not, with workers or without.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader import DataLoader
from asyncloader.options import Options
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.state import LoaderState
from asyncloader.samplers import (
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    WeightedSampler,
)
from tests.run.giving import give
from tests.support import effort, generators, inside

LENGTH = 11
BATCH = 3


class Lazily(Sampler[int]):
    """Draws at each index, from one of the global generators, or from all of them in turn."""

    def __init__(self, *kinds: str, at_end: bool = False) -> None:
        self.kinds = kinds
        self.at_end = at_end

    def __len__(self) -> int:
        return LENGTH

    def draw(self, number: int) -> int:
        kind = self.kinds[number % len(self.kinds)]
        if kind == "random":
            return int(random.random() * 1000)
        return int(np.random.rand() * 1000) if kind == "numpy" else int(torch.rand(()) * 1000)

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            yield self.draw(number)
        if self.at_end:
            for number in range(len(self.kinds)):
                self.draw(number)


class LazyBatches(Lazily):
    """The same, batch by batch; an iterator that is no generator, and of which some would begin anew."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*map(self.draw, range(LENGTH // 2))] for _ in range(4))


class AtFirst(Lazily):
    """Draws all when its first index is asked for, as torch's samplers do."""

    def __iter__(self) -> Iterator[int]:
        yield from [self.draw(number) for number in range(LENGTH)]


class BatchesInPart(Lazily):
    """Draws one batch when it is iterated over, and the others when it is first read."""

    def __iter__(self) -> Iterator[Any]:
        return self._with_others([*map(self.draw, range(4))])

    def _with_others(self, first: list[int]) -> Iterator[Any]:
        yield from [first, *([*map(self.draw, range(4))] for _ in range(3))]


class EagerBatches(Lazily):
    """Draws all batches as soon as it is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[*map(self.draw, range(LENGTH // 2))] for _ in range(4)])


class Eagerly(Lazily):
    """Draws all as soon as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        return iter([self.draw(number) for number in range(LENGTH)])


class Telling(Sampler[int]):
    """Its iterator draws lazily from a generator, and its state says where that is."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.at = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield int(torch.rand((), generator=self.generator) * 1000)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


def batches(sampler: Any) -> dict[str, Any]:
    return {"batch_sampler": sampler, "batch_size": 1}


# By name, options of a loader, made anew of its own generator.
SAMPLERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "in order": lambda own: {"sampler": SequentialSampler(range(LENGTH))},
    "shuffled": lambda own: {"sampler": RandomSampler(range(LENGTH))},
    "shuffled, its own generator": lambda own: {"sampler": RandomSampler(range(LENGTH), generator=own)},
    "shuffled, the loader's generator": lambda own: {"shuffle": True, "generator": own},
    "shuffled, short batch dropped": lambda own: {"shuffle": True, "generator": own, "drop_last": True},
    "two permutations": lambda own: {"sampler": RandomSampler(range(5), num_samples=LENGTH, generator=own)},
    "two permutations, the global generator": lambda own: {
        "sampler": RandomSampler(range(5), num_samples=LENGTH, generator=torch.default_generator)
    },
    "replacement": lambda own: {"sampler": RandomSampler(range(99), True, 70, own), "batch_size": 16},
    "replacement, global": lambda own: {"sampler": RandomSampler(range(99), True, 70), "batch_size": 16},
    "replacement, the global generator": lambda own: {
        "sampler": RandomSampler(range(99), True, 70, torch.default_generator),
        "batch_size": 16,
    },
    "weighted": lambda own: {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
    "weighted, its own generator": lambda own: {"sampler": WeightedRandomSampler([1.0] * 9, 8, True, own)},
    "a subset": lambda own: {"sampler": SubsetRandomSampler(range(LENGTH))},
    "a subset, its own generator": lambda own: {"sampler": SubsetRandomSampler(range(LENGTH), own)},
    "distributed": lambda own: {"sampler": DistributedSampler(range(2 * LENGTH), 2, 1)},
    "torch's batches": lambda own: batches(BatchSampler(RandomSampler(range(9), False, LENGTH, own), 2, False)),
    "elastic": lambda own: {"sampler": ElasticSampler(2 * LENGTH, 2, 1)},
    "drawn by weight": lambda own: {"sampler": WeightedSampler([1.0] * LENGTH)},
    "a mixture": lambda own: {"sampler": MixtureSampler([8, 9], [1.0, 2.0], stop="first")},
    "by length": lambda own: batches(LengthBatchSampler([*range(1, 12)], max_tokens=22)),
    "lazily from random": lambda own: {"sampler": Lazily("random")},
    "lazily from numpy": lambda own: {"sampler": Lazily("numpy")},
    "lazily from torch": lambda own: {"sampler": Lazily("torch")},
    "lazily from all": lambda own: {"sampler": Lazily("torch", "random", "numpy", at_end=True)},
    "lazily, beside a generator": lambda own: {"sampler": Lazily("torch", "random"), "generator": own},
    "lazily in batches": lambda own: batches(LazyBatches("random", "torch")),
    "at first from all": lambda own: {"sampler": AtFirst("torch", "random", "numpy")},
    "at first in batches": lambda own: batches(BatchSampler(AtFirst("numpy", "torch"), 2, False)),
    "eagerly from random": lambda own: {"sampler": Eagerly("random")},
    "eagerly in batches": lambda own: batches(EagerBatches("torch", "random")),
    "in batches, the first eagerly": lambda own: batches(BatchesInPart("numpy", "torch")),
    "its state has its generator": lambda own: {"sampler": Telling(own)},
}


AT_ITER = ["eagerly in batches", "in batches, the first eagerly"]
"""Those that draw when they are iterated over: iterators with workers do so twice, as torch's do."""
DRAW_ON = [name for name in SAMPLERS if "lazily" in name or "the global" in name]
"""Those that draw from global generators while they are read: what is drawn beside them moves what they draw."""


class Trainer:
    """A program with its generators, of which the loader's own is one; as fresh as a new process."""

    def __init__(self, sampler: str, seed: int) -> None:
        generators.seed_all(seed)
        self.own = torch.Generator().manual_seed(seed)
        self.options = {"batch_size": BATCH, **SAMPLERS[sampler](self.own)}
        self.runs = Runs()

    def settings(self, *, inline: bool = True) -> Options:
        return inside.options(DataLoader(range(100), num_workers=int(not inline), **self.options))

    def begin(self, state: Any = None, *, inline: bool) -> RunStart:
        """Begin a run as iterators do: those with workers iterate twice, and draw the base seed in between."""
        settings = self.settings(inline=inline)

        def construct() -> Drawn:
            keys = iter(settings.index_sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=settings.generator))
            return Drawn(keys, seed, None, 0)

        if inline:
            return begin(settings, state, self.runs, construct)
        made: list[Drawn] = []
        return begin(
            settings,
            state,
            self.runs,
            lambda: made[0]._replace(keys=iter(settings.index_sampler)),
            prepare=lambda: made.append(construct()),
        )

    def epoch(
        self, state: Any = None, *, inline: bool, draws: bool = False, draws_between: bool = False
    ) -> tuple[Any, list[Any]]:
        """Go through an epoch: the base seed, and the keys of batches.

        Perhaps draw before the first one, as another loader that begins does, and after each, as a model does.
        """
        start = self.begin(state, inline=inline)
        if draws_between:
            draw()
        progress, keys = start.checkpointer.progress, []
        for batch in start.plan:
            keys.append(batch)
            give(progress, progress.now.position)
            if draws:
                draw()
        progress.end_is_known = True
        return start.checkpointer.key, keys


def draw() -> None:
    random.random()
    np.random.rand()
    torch.rand(())


def stopped(
    sampler: str, done: int, ahead: int, *, inline: bool, draws: bool = False, draws_between: bool = False
) -> tuple[Trainer, LoaderState]:
    """Go through an epoch, then begin the next one and stop there: with the sampler read so far ahead of batches."""
    trainer = Trainer(sampler, 1)
    trainer.epoch(inline=inline, draws=draws)
    start = trainer.begin(inline=inline)
    progress = start.checkpointer.progress
    if draws_between:
        draw()
    for _ in range(done + ahead):
        next(start.plan, None)
    for batch in range(done):
        give(progress, batch)
        if draws:
            draw()
    return trainer, LoaderState.from_dict(json.loads(json.dumps(start.checkpointer.state().as_dict())))


WAYS = [(True, False), (False, True), (True, True), (False, False)]
"""Without workers, or with some: the run that is saved, and the one that is resumed."""


CASES = [
    *[(how, sampler) for how in ("restored", "not restored", "in place") for sampler in SAMPLERS],
    *[("in part", sampler) for sampler in SAMPLERS if "lazily" in sampler],
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("how", "sampler"), CASES)
def test_what_is_drawn_after_a_resume_is_what_would_have_been_drawn(sampler: str, how: str) -> None:
    """The rest of the epoch, and the one after it: from each batch, with the sampler read ahead by whatever number."""
    place = [*SAMPLERS].index(sampler)
    ways = WAYS[2:] if how == "in place" else WAYS[: 4 if how == "restored" else 2]
    for turn, (was_inline, is_inline) in enumerate(effort.share(ways, place), place):
        whole = Trainer(sampler, 1)
        whole.epoch(inline=was_inline)
        seeds, keys = whole.epoch(inline=was_inline)
        following = whole.epoch(inline=was_inline)
        for done in effort.share(range(len(keys) + 1), turn):
            # The end of the sampler is one more answer.
            is_alone = how == "not restored" or sampler not in DRAW_ON
            for ahead in {done % 2, len(keys) - done + 1} if is_alone else {0}:
                trainer, state = stopped(sampler, done, ahead, inline=was_inline)
                saved = generators.save(trainer.own)
                if how != "in place":
                    trainer = Trainer(sampler, 2)
                if how == "restored":
                    generators.restore(saved, trainer.own)
                elif how == "in part":
                    torch.set_rng_state(saved[2])
                where = f"{done} done, {ahead} ahead, inline {was_inline} -> {is_inline}"
                assert trainer.epoch(state, inline=is_inline) == (seeds, keys[done:]), where
                if sampler not in AT_ITER or was_inline == is_inline:
                    assert trainer.epoch(inline=is_inline) == following, where


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in DRAW_ON])
def test_what_the_trainer_draws_beside_the_loader_is_accounted_for(sampler: str) -> None:
    """Where the sampler draws at the beginning, and the generators are restored: then the next epoch is the same."""
    for was_inline, is_inline in WAYS:
        whole = Trainer(sampler, 1)
        whole.epoch(inline=was_inline, draws=True)
        seeds, keys = whole.epoch(inline=was_inline, draws=True)
        following = whole.epoch(inline=was_inline, draws=True)
        for done in range(1, len(keys) + 1):
            for ahead in {0, len(keys) - done + 1}:
                trainer, state = stopped(sampler, done, ahead, inline=was_inline, draws=True)
                saved = generators.save(trainer.own)
                trainer = Trainer(sampler, 2)
                generators.restore(saved, trainer.own)
                where = f"{done} done, {ahead} ahead, inline {was_inline} -> {is_inline}"
                assert trainer.epoch(state, inline=is_inline, draws=True) == (seeds, keys[done:]), where
                if sampler not in AT_ITER or was_inline == is_inline:
                    assert trainer.epoch(inline=is_inline, draws=True) == following, where


@pytest.mark.covering(1)
@pytest.mark.parametrize(("how", "sampler"), [case for case in CASES if case[1] not in DRAW_ON])
def test_what_is_drawn_between_the_beginning_and_the_first_batch(sampler: str, how: str) -> None:
    """The order is drawn at the sampler's first `next`: whatever has moved the generators before is in the state."""
    place = [*SAMPLERS].index(sampler)
    ways = WAYS[2:] if how == "in place" else WAYS
    for turn, (was_inline, is_inline) in enumerate(effort.share(ways, place), place):
        whole = Trainer(sampler, 1)
        whole.epoch(inline=was_inline)
        seeds, keys = whole.epoch(inline=was_inline, draws_between=True)
        following = whole.epoch(inline=was_inline)
        for done in effort.share(range(len(keys) + 1), turn):
            trainer, state = stopped(sampler, done, done % 3, inline=was_inline, draws_between=True)
            saved = generators.save(trainer.own)
            if how != "in place":
                trainer = Trainer(sampler, 2)
            if how == "restored":
                generators.restore(saved, trainer.own)
            where = f"{done} done, inline {was_inline} -> {is_inline}"
            draws = done > 0 and how != "restored"  # otherwise it moves what is yet to be drawn
            assert trainer.epoch(state, inline=is_inline, draws_between=draws) == (seeds, keys[done:]), where
            if not draws and (sampler not in AT_ITER or was_inline == is_inline):
                assert trainer.epoch(inline=is_inline) == following, where


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_that_draws_on_is_named(sampler: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once a loader, and when it is resumed: such a sampler alone."""
    for seed in (1, 2):
        trainer = Trainer(sampler, seed)
        if seed == 1:
            for _ in range(2):
                start = trainer.begin(inline=True)
                for batch in range(3):
                    next(start.plan, None)
                    give(start.checkpointer.progress, batch)
                    state = start.checkpointer.state()
        else:
            trainer.epoch(state, inline=True)
        assert ("draws from global random generators" in caplog.text) == (sampler in DRAW_ON)
        assert len(caplog.records) == (sampler in DRAW_ON)
        caplog.clear()


def test_a_state_that_is_taken_while_the_order_is_drawn() -> None:
    """In a handler of a signal: the order is the one that is being drawn then."""
    sampler = "at first from all"
    whole = Trainer(sampler, 1)
    seeds, keys = whole.epoch(inline=False)
    for number in range(LENGTH):
        trainer = Trainer(sampler, 1)
        taken: list[Any] = []
        at_first = trainer.options["sampler"]
        drawing = at_first.draw

        def interrupted(index: int) -> int:
            drawn = drawing(index)  # noqa: B023
            if index == number:  # noqa: B023
                taken.append((start.checkpointer.state(), generators.save(trainer.own)))  # noqa: B023
            return drawn

        at_first.draw = interrupted
        start = trainer.begin(inline=False)
        list(start.plan)
        ((state, saved),) = taken
        resumed = Trainer(sampler, 2)
        generators.restore(saved, resumed.own)
        assert resumed.epoch(state, inline=False) == (seeds, keys)


class Interrupted(Sampler[int]):
    """Its iterator draws an order when it is first read, and is no generator; a Ctrl-C hits before that, or after."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.order: list[int] | None = None
        return iter(self._next, None)

    def _next(self) -> int | None:
        if self.when == "before":
            self.when = ""
            raise KeyboardInterrupt
        if self.order is None:
            self.order = torch.randperm(LENGTH).tolist()
        if self.when == "after":
            self.when = ""
            raise KeyboardInterrupt
        return self.order.pop() if self.order else None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sampler_that_was_interrupted_when_it_was_first_read(when: str) -> None:
    """The order is drawn before the Ctrl-C, or anew after it, from generators that have moved meanwhile."""
    generators.seed_all(1)
    settings = inside.options(DataLoader(range(LENGTH), 2, sampler=Interrupted(when)))
    runs = Runs()

    def construct() -> Drawn:
        return Drawn(iter(settings.index_sampler), 7, None, 0)

    start = begin(settings, None, runs, construct)
    with pytest.raises(KeyboardInterrupt):
        next(start.plan)
    draw()
    keys = list(start.plan)
    state = replace(start.checkpointer.state(), position=1, drawn=1)
    generators.seed_all(2)
    settings.index_sampler.sampler.when = ""
    assert list(begin(settings, state, runs, construct).plan) == keys[1:]
