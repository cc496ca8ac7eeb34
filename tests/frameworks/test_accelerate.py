"""Accelerate builds another loader out of ours. One line makes that loader ours too; without it there is a warning."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.data_loader
import pytest
import torch
import torch.utils.data
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from asyncloader import ConfigurationError, DataLoader
from asyncloader.accelerate import use_asyncloader
from tests.frameworks.witness import (
    Line,
    Stream,
    assert_made_by_torch,
    assert_made_by_us,
    indices,
)
from tests.support.ranks import run_ranks

PROGRAM = Path(__file__).with_name("accelerate_ranks.py")


@pytest.fixture(autouse=True)
def accelerate_as_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test begin with Accelerate as it is after its import, and with nothing of it in this process."""
    monkeypatch.setattr(accelerate.data_loader, "DataLoader", torch.utils.data.DataLoader)
    adapter = accelerate.data_loader.DataLoaderAdapter
    monkeypatch.setattr(adapter, "__aiter__", None, raising=False)
    monkeypatch.setattr(adapter, "__init__", getattr(adapter.__init__, "__wrapped__", adapter.__init__))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_loader(length: int = 40, **options: Any) -> DataLoader[Any]:
    return DataLoader(Line(length), batch_size=4, num_workers=2, **options)


def test_without_the_line_torch_loads_and_a_warning_says_so() -> None:
    """Prepare builds a torch DataLoader; we notice it being asked about, and name the line that helps."""
    with pytest.warns(UserWarning, match=r"asyncloader.accelerate.use_asyncloader\(\)"):
        prepared = Accelerator().prepare(make_loader())
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    assert_made_by_torch(list(prepared))


def test_with_the_line_our_loader_trains() -> None:
    """One line, and what prepare builds is ours: batches, gradients, gathered metrics, without a warning."""
    use_asyncloader()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layer = nn.Linear(1, 1)
    model, optimizer, prepared = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), 0.1), make_loader(42, shuffle=True)
    )
    epochs = []
    for _ in range(2):
        batches, gathered = [], []
        for batch in prepared:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))
                optimizer.step()
                optimizer.zero_grad()
            batches.append(batch)
            gathered += accelerator.gather_for_metrics(batch["index"]).tolist()
        assert sorted(gathered) == sorted(indices(batches)) == list(range(42))
        assert_made_by_us(batches, num_workers=2)
        epochs.append(gathered)
    assert type(prepared.base_dataloader) is DataLoader
    assert epochs[0] != epochs[1]


def test_the_line_makes_ours_of_torchs_loaders_too() -> None:
    """What others make, as the Trainer of Hugging Face does, becomes ours at prepare."""
    use_asyncloader()
    batches = list(Accelerator().prepare(torch.utils.data.DataLoader(Line(16), batch_size=4, num_workers=2)))
    assert indices(batches) == list(range(16))
    assert_made_by_us(batches, num_workers=2)


def test_skip_first_batches_keeps_our_loader() -> None:
    """Skipping gives the rest of the batches, from our workers: of a prepared loader and of one that is not."""
    use_asyncloader()
    for loader in (Accelerator().prepare(make_loader()), make_loader()):
        batches = list(skip_first_batches(loader, 3))
        assert indices(batches) == list(range(12, 40))
        assert_made_by_us(batches, num_workers=2)


def test_iterable_dataset_is_dispatched_by_our_loader() -> None:
    """A stream goes through Accelerate's dispatcher, and is skipped there; our workers make it."""
    use_asyncloader()
    loader = DataLoader(Stream(32), batch_size=4, num_workers=2)
    prepared = Accelerator().prepare(loader)
    assert type(prepared).__name__ == "DataLoaderDispatcher"
    batches = list(prepared)
    assert sorted(indices(batches)) == list(range(32))
    assert_made_by_us(batches, num_workers=2)
    assert indices(skip_first_batches(prepared, 5)) == indices(batches[5:])


def test_options_that_would_be_lost_are_warned_of() -> None:
    """Accelerate hands on torch's arguments only; the warning says which of ours are lost, and how to keep them."""
    use_asyncloader()
    remedy = r"use_asyncloader\(scheduling='dynamic', on_crash='raise'\)"
    with pytest.warns(UserWarning, match=remedy):
        prepared = Accelerator().prepare(make_loader(scheduling="dynamic", on_crash="raise"))
    assert prepared.base_dataloader.scheduling == "static"


def test_options_are_kept_by_a_partial() -> None:
    """With the options in the line they are kept, without a warning, by prepare and by skip_first_batches."""
    use_asyncloader(scheduling="dynamic", max_retries=5)
    prepared = Accelerator().prepare(make_loader(scheduling="dynamic", max_retries=5))
    for loader in (prepared, skip_first_batches(prepared, 2)):
        assert (loader.base_dataloader.scheduling, loader.base_dataloader.max_retries) == ("dynamic", 5)
        assert_made_by_us(list(loader), num_workers=2)


def test_a_loader_marked_as_prepared_is_left_as_it_is() -> None:
    """What Accelerate offers for loaders that shard by themselves works, and nothing is warned of."""
    loader = make_loader()
    loader._is_accelerate_prepared = True
    assert Accelerator().prepare(loader) is loader
    assert loader._is_accelerate_prepared is True
    assert make_loader()._iterator is None


def test_no_warning_where_accelerate_is_not_asked() -> None:
    """That Accelerate was imported, as transformers does, is no reason to warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(make_loader())
    assert_made_by_us(batches, num_workers=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_is_ours_and_goes_on(num_workers: int, tmp_path: Path) -> None:
    """`use_stateful_dataloader=True` asks for torchdata's: `save_state` and `load_state` have the state of ours."""
    use_asyncloader()
    config = DataLoaderConfiguration(use_stateful_dataloader=True)

    def prepare() -> tuple[Accelerator, Any]:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        torch.manual_seed(5)
        accelerator = Accelerator(dataloader_config=config)
        loader = DataLoader(Line(40), batch_size=4, shuffle=True, num_workers=num_workers)
        return accelerator, accelerator.prepare(loader)

    accelerator, prepared = prepare()
    assert type(prepared.base_dataloader) is DataLoader
    iterator = iter(prepared)
    for _ in range(3):
        next(iterator)
    accelerator.save_state(str(tmp_path))
    rest = indices(list(iterator))
    accelerator, prepared = prepare()
    accelerator.load_state(str(tmp_path))
    assert indices(list(prepared)) == rest
    assert len(rest) == 28


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    """Two processes share an epoch, gather all of it, and skip; each asserts that its own workers made its batches."""
    first, second = run_ranks(PROGRAM, tmp_path, kind)
    assert sorted(first["seen"] + second["seen"]) == list(range(48))
    assert sorted(first["gathered"]) == sorted(second["gathered"]) == list(range(48))
    assert first["weight"] == second["weight"]
    assert first["skipped"] == first["seen"][8:]
    assert second["skipped"] == second["seen"][8:]


def test_a_checkpoint_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """A prepared loader that is registered is saved with the rest, and goes on where training was, in a new process."""
    use_asyncloader()
    batches, states = [], []
    prepared = Accelerator().prepare(make_loader(40, shuffle=True))
    for number, batch in enumerate(prepared, 1):
        batches.append(batch)
        states.append(prepared.state_dict())
        if number == 4:
            accelerator = Accelerator()
            accelerator.register_for_checkpointing(prepared)
            accelerator.save_state(tmp_path)
    second = indices(prepared)

    torch.manual_seed(123)
    accelerator = Accelerator()
    resumed = accelerator.prepare(make_loader(40, shuffle=True))
    accelerator.register_for_checkpointing(resumed)
    accelerator.load_state(tmp_path)
    rest = list(resumed)
    assert indices(rest) == indices(batches[4:])
    assert_made_by_us(rest, num_workers=2)
    assert states[-1]["_iterator_finished"]
    last = accelerator.prepare(make_loader(40, shuffle=True))
    last.load_state_dict(states[-1])
    assert indices(last) == second


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["shard", "dispatcher", "skipped"])
async def test_prepared_loaders_take_async_for(kind: str, num_workers: int) -> None:
    """The batches that `for` gives, while the caller's loop turns; they used to have no `__aiter__`."""
    use_asyncloader()
    loader = DataLoader(Stream(32) if kind == "dispatcher" else Line(32), batch_size=4, num_workers=num_workers)
    prepared = Accelerator().prepare(loader)
    if kind == "skipped":
        prepared = skip_first_batches(prepared, 3)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    found, seen = [], [turns]
    with torch.no_grad():
        async for batch in prepared:
            found.append(batch)
            seen.append(turns)
    turning.cancel()
    assert indices(found) == indices(list(prepared))
    assert all(after > before for before, after in itertools.pairwise(seen))
    if num_workers:
        assert_made_by_us(found, num_workers=2)
    assert prepared.end_of_dataloader


async def test_a_prepared_loader_is_left_and_begun_again() -> None:
    """By `break`, and by a task that is cancelled while it waits: the next epoch is whole, no thread is left."""
    use_asyncloader()
    prepared = Accelerator().prepare(make_loader(16))
    async for _ in prepared:
        break
    waiting = asyncio.ensure_future(anext(aiter(prepared)))
    await asyncio.sleep(0)
    waiting.cancel()
    assert indices([batch async for batch in prepared]) == list(range(16))


def test_options_that_are_none_are_refused() -> None:
    """Those of torch's loader are not for this call, nor is what nobody knows."""
    with pytest.raises(ConfigurationError, match="batch_size, schedulin: no option beyond torch's"):
        use_asyncloader(schedulin="dynamic", batch_size=4)
