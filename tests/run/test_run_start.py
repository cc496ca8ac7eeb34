"""How a run starts, without workers and without batches: what of the sampler is read, and which generators are set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.options import Options
from asyncloader.run.checkpoint import initial_state
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.state import LoaderState
from tests.run.giving import give
from tests.support import inside


def started(settings: Options, state: LoaderState | None = None, runs: Runs | None = None) -> RunStart:
    """Start as an iterator without workers does: the base seed is drawn before the order."""

    def iterate() -> Drawn:
        keys = iter(settings.index_sampler)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=settings.generator).item())
        return Drawn(keys, seed, None)

    return begin(settings, state, runs or Runs(), iterate)


def settings_of(seed: int = 0, **options: Any) -> Options:
    """Options of a shuffled loader of ten samples."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(range(10), 2, shuffle=True, generator=generator, **options)  # type: ignore[arg-type]
    return inside.options(loader)


def take(start: RunStart, count: int) -> list[Any]:
    """Read so many batches of keys, and be done with them."""
    taken = []
    for _ in range(count):
        taken.append(next(start.plan))
        give(start.checkpointer.progress, start.checkpointer.progress.now.position)
    return taken


@pytest.mark.parametrize("count", range(6))
def test_a_run_goes_on_from_any_batch(count: int) -> None:
    """With what the sampler would have yielded next, the same seed and the same epoch."""
    start = started(settings_of())
    take(start, count)
    state = start.checkpointer.state()
    rest = list(start.plan)
    resumed = started(settings_of(seed=1), state)
    assert list(resumed.plan) == rest
    assert resumed.checkpointer.key == start.checkpointer.key
    assert resumed.checkpointer.progress.now.position == count


def test_epochs_are_counted() -> None:
    """Each run is told to the loader's runs, and a state says which one it was."""
    runs, settings = Runs(), settings_of()
    starts = [started(settings, runs=runs) for _ in range(3)]
    assert [start.checkpointer.common.epoch for start in starts] == [0, 1, 2]
    assert {start.checkpointer.key[1] for start in starts} == {0}  # each has a base seed of its own
    assert runs.begun == 3
    assert runs.run() is starts[2].checkpointer
    other = Runs()
    assert started(settings_of(), starts[1].checkpointer.state(), other).checkpointer.common.epoch == 1
    assert other.begun == 2


def test_a_global_generator_that_the_trainer_has_restored_is_put_back() -> None:
    """What was drawn from it beside the loader is accounted for; otherwise it is where drawing the order leaves it."""
    torch.manual_seed(1)
    loader = DataLoader(range(10), 2, shuffle=True)  # type: ignore[arg-type]
    settings = inside.options(loader)
    start = started(settings)
    take(start, 2)
    drawn = torch.get_rng_state()
    torch.manual_seed(77)
    state, rest = start.checkpointer.state(), list(start.plan)
    restored = started(settings, state)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(77).get_state())
    assert list(restored.plan) == rest
    torch.manual_seed(5)
    assert list(started(settings, state).plan) == rest
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_generator_of_the_samplers_own_is_the_samplers() -> None:
    """It goes where drawing the order leaves it, also if the trainer has restored it: the sampler draws on from it."""
    settings = settings_of()
    start = started(settings)
    take(start, 2)
    assert settings.generator is not None
    drawn = settings.generator.get_state()
    state, rest = start.checkpointer.state(), list(start.plan)
    for seed in (0, 77):
        other = settings_of(seed=seed)
        assert other.generator is not None
        resumed = started(other, state)
        assert torch.equal(other.generator.get_state(), drawn)
        assert list(resumed.plan) == rest
        assert torch.equal(other.generator.get_state(), settings.generator.get_state())  # the sampler draws at its end


class CountsReadings:
    """A sampler whose epochs are counted where it is iterated over, and not where it is read."""

    def __init__(self) -> None:
        self.readings = 0

    def __iter__(self) -> Iterator[int]:
        self.readings += 1
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def test_samplers_are_iterated_over_once() -> None:
    """Anew, from a state between two runs and from one inside: as often as by torch."""
    sampler = CountsReadings()
    settings = inside.options(DataLoader(range(10), None, sampler=sampler))  # type: ignore[arg-type]
    before = initial_state(settings, 0, {})
    start = started(settings, before)
    assert sampler.readings == 1
    take(start, 2)
    started(settings, start.checkpointer.state())
    assert sampler.readings == 2
