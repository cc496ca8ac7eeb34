"""Ignite's engines: they iterate over our loader; what they make anew out of it is ours, with our options."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.utils.data
from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_evaluator
from ignite.metrics import MeanSquaredError
from torch import nn

import asyncloader
from asyncloader import DataLoader
from tests.frameworks.witness import Line, Sample, Stream, assert_made_by_us, indices


def make_step(seen: list[Sample]) -> Any:
    """Make the function that an engine calls with each batch: it fits the line, and notes the batch."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(engine: Engine, batch: Sample) -> float:
        seen.append(batch)
        loss = nn.functional.mse_loss(layer(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def test_engine_runs_over_our_loader() -> None:
    """Three epochs run over every sample once each, shuffled anew, and an evaluator in between."""
    seen: list[Sample] = []
    evaluated: list[float] = []
    trainer = Engine(make_step(seen))

    def pairs(batch: Sample, device: Any, non_blocking: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return batch["x"], batch["y"]

    evaluator = create_supervised_evaluator(nn.Linear(1, 1), {"mse": MeanSquaredError()}, prepare_batch=pairs)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        evaluated.append(evaluator.run(DataLoader(Line(12), batch_size=4, num_workers=2)).metrics["mse"])

    state = trainer.run(DataLoader(Line(24), batch_size=4, shuffle=True, num_workers=2), max_epochs=3)
    assert state.iteration == 18
    epochs = [indices(seen[first : first + 6]) for first in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len(set(evaluated)) == 1
    assert_made_by_us(seen, num_workers=2)


def test_engine_begins_the_loader_again_in_the_middle_of_an_epoch() -> None:
    """An epoch that is longer than the loader begins it again, and goes on from there."""
    seen: list[Sample] = []
    Engine(make_step(seen)).run(DataLoader(Line(20), batch_size=4, num_workers=2), max_epochs=2, epoch_length=7)
    assert indices(seen) == (list(range(20)) * 3)[: 14 * 4]
    assert_made_by_us(seen, num_workers=2)


def test_stream_of_unknown_length() -> None:
    """An engine finds the length of a stream by its end."""
    seen: list[Sample] = []
    state = Engine(make_step(seen)).run(DataLoader(Stream(16), batch_size=4, num_workers=2), max_epochs=2)
    assert state.epoch_length == 4
    assert sorted(indices(seen)) == sorted([*range(16), *range(16)])
    assert_made_by_us(seen, num_workers=2)


def test_deterministic_engine_makes_our_loader_anew() -> None:
    """It replaces the batch sampler by one that depends on the epoch, in a new loader of our class with our options."""
    taken = []
    for _ in range(2):
        seen: list[Sample] = []
        engine = DeterministicEngine(make_step(seen))
        given = DataLoader(Line(24), batch_size=4, shuffle=True, num_workers=2, scheduling="dynamic", max_retries=5)
        torch.manual_seed(4)
        state = engine.run(given, max_epochs=2)
        used = state.dataloader
        assert used is not given
        assert type(used) is DataLoader
        assert (used.scheduling, used.max_retries) == ("dynamic", 5)
        assert_made_by_us(seen, num_workers=2)
        taken.append(indices(seen))
    assert taken[0] == taken[1]
    assert sorted(taken[0][:24]) == list(range(24))


def test_auto_dataloader_with_one_line_makes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """`idist.auto_dataloader` makes the loader itself: with one line it makes ours, and takes our options."""
    monkeypatch.setattr(idist.auto, "DataLoader", asyncloader.DataLoader)
    loader = idist.auto_dataloader(Line(16), batch_size=4, num_workers=2, scheduling="dynamic")
    assert type(loader) is DataLoader
    assert loader.scheduling == "dynamic"
    assert_made_by_us(list(loader), num_workers=2)
