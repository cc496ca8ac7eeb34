"""Batches on a GPU that is there: torch's calls do what the simulated device takes them to do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, to_device
from asyncloader.wrap.device import StreamDevice, find
from tests.support.forks import forked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
COUNT, FLOATS = 64, 1 << 20


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is full of i."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FLOATS,), float(index))


class Witness(Numbers):
    """Whether a worker has a context of CUDA."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), int(torch.cuda.is_initialized())])


def long_step(batch: torch.Tensor) -> torch.Tensor:
    """Keep the stream busy for some milliseconds, and read the batch then."""
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
    return torch.stack([batch.min(), batch.max()])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_backend": "thread"}], ids=str)
def test_slow_steps_read_their_batches(options: dict[str, Any], depth: int) -> None:
    """Copies, slabs and memory of the device are many times used again while steps are behind."""
    loader: Any = to_device(DataLoader(Numbers(), 2, pin_memory=True, **options), "cuda", depth)
    for _ in range(3):
        seen = [long_step(batch) for batch in loader]
        expected = [[float(i), float(i + 1)] for i in range(0, COUNT, 2)]
        assert torch.stack(seen).tolist() == expected


def test_slow_steps_read_their_batches_in_async_for() -> None:
    """The same, and the loop turns meanwhile."""

    async def train() -> list[list[float]]:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        loader: Any = to_device(DataLoader(Numbers(), 2, num_workers=2), "cuda")
        seen = [long_step(batch) async for batch in loader]
        ticking.cancel()
        assert turns > 10
        return torch.stack(seen).tolist()

    assert asyncio.run(train()) == [[float(i), float(i + 1)] for i in range(0, COUNT, 2)]


def test_batches_on_the_device_are_bounded() -> None:
    """Though the program asks for steps as fast as it can."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loader: Any = to_device(DataLoader(Numbers(), 2, pin_memory=True, num_workers=2), "cuda", 1)
    for batch in loader:
        long_step(batch)
    assert torch.cuda.max_memory_allocated() - before <= 4.5 * 2 * FLOATS * 4
    torch.cuda.synchronize()


def test_a_transform_runs_on_the_stream_of_the_copies_and_draws_the_same_each_time() -> None:
    """From the generator of the device too, whose draws of training it leaves alone."""

    def noise(batch: torch.Tensor) -> torch.Tensor:
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        return batch[:, :4] + torch.rand_like(batch[:, :4]) + torch.rand(())

    found, own = [], []
    for depth, num_workers in ((1, 0), (0, 2), (3, 1)):
        torch.manual_seed(3)
        loader: Any = to_device(DataLoader(Numbers(), 2, num_workers=num_workers), "cuda", depth, noise)
        found.append([batch.tolist() for batch in loader])
        own.append(torch.rand((), device="cuda").item())
    assert found[0] == found[1] == found[2]
    assert own[0] == own[1] == own[2]


def test_pinned_batches_are_copied_without_holding_up_the_program() -> None:
    """While the stream of the program is busy, the next copy ends."""
    source = torch.ones(FLOATS).pin_memory()
    device = find("cuda")
    assert isinstance(device, StreamDevice)
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    busy = device.mark()
    _, mark = device.send(source)
    mark.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()


def test_workers_have_no_context_of_cuda() -> None:
    """Forked ones and others, beside a trainer that has one."""
    torch.zeros(1, device="cuda")
    for method in ("fork", "forkserver"):
        workers: Any = DataLoader(Witness(), None, num_workers=2, multiprocessing_context=method)
        loader = to_device(workers, "cuda")
        seen = [batch.tolist() for batch in loader]
        assert os.getpid() not in {pid for pid, _ in seen}
        assert not any(touched for _, touched in seen)


def test_workers_are_forked_before_the_trainer_has_a_context() -> None:
    """If the loader is the first that wants the device."""
    script = """
import torch
from asyncloader import DataLoader, to_device
class Witness:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.cuda._is_in_bad_fork()
print([int(each) for each in to_device(DataLoader(Witness(), num_workers=1, multiprocessing_context="fork"), "cuda")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[0, 0, 0]\n"


def test_a_fork_in_the_middle_of_a_run() -> None:
    """It ends as it would without a loader."""
    batches = iter(to_device(DataLoader(Numbers(), 2, num_workers=1), "cuda"))
    next(batches)
    assert forked(lambda: None).wait() == 0
    assert len(list(batches)) == COUNT // 2 - 1


@pytest.mark.parametrize("kind", ["sparse", "jagged", "packed"])
def test_tensors_of_other_layouts(kind: str) -> None:
    """Their parts are noted with the stream of the program."""
    made: Any = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "packed": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    }[kind]()
    (there,) = to_device([made], "cuda")
    data = there.data if kind == "packed" else there
    assert data.device.type == "cuda"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    """The current one stays so."""
    loader: Any = to_device(DataLoader(Numbers(), 2, num_workers=1), "cuda:1")
    assert {batch.device.index for batch in loader} == {1}
    assert torch.cuda.current_device() == 0
