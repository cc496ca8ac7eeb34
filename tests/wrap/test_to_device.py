"""`to_device` on a simulated device, whose copies do not end by themselves: whatever relies on that is found out."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import ConfigurationError, DataLoader, to_device
from asyncloader.errors import LoaderClosedError
from tests.support import inside
from tests.support.forks import forked
from tests.support.patience import wait_until
from tests.wrap.simulated import SimulatedDevice

COUNT = 24
LARGE = 1 << 14  # floats: two samples are in shared memory


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is full of i."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LARGE,), float(index))


class Later(Numbers):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        await asyncio.sleep(0)
        return torch.full((LARGE,), float(index))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same, without keys."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((LARGE,), float(index)) for index in range(COUNT))


class Broken(Numbers):
    """One sample raises."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            raise OSError("a bad sector")
        return super().__getitem__(index)


class Dying(Numbers):
    """One sample kills its worker, once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os._exit(3)
        return super().__getitem__(index)


class Witness(Numbers):
    """What a worker is."""

    def __getitem__(self, index: int) -> torch.Tensor:
        touched = torch.cuda.is_initialized() or (
            "asyncloader.wrap.device_iterator" in sys.modules and not os.getppid()
        )
        return torch.tensor([os.getpid(), int(touched)])


def make(device: Any, prefetch: int = 1, transform: Any = None, dataset: Any = None, **options: Any) -> Any:
    """Make a loader of batches of two samples on a device."""
    return to_device(DataLoader(dataset or Numbers(), **{"batch_size": 2, **options}), device, prefetch, transform)


def collect(batches: Any, device: SimulatedDevice) -> list[list[float]]:
    """Take all batches, with a step on each, and have all of that be done at the very end."""
    seen: list[list[float]] = []
    for batch in batches:
        device.step(batch, lambda tensors: seen.append(values(tensors[0])))
        del batch
    device.run()
    return seen


def values(batch: torch.Tensor) -> list[float]:
    """Return the number of each sample of a batch; nan for one that is not full of it."""
    return [float(row[0]) if bool((row == row[0]).all()) else float("nan") for row in batch]


ALL = [[float(i), float(i + 1)] for i in range(0, COUNT, 2)]

WAYS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "worker processes": {"num_workers": 2},
    "worker threads": {"num_workers": 2, "worker_backend": "thread"},
    "async samples": {"dataset": Later()},
    "async samples in workers": {"dataset": Later(), "num_workers": 1},
    "a stream": {"dataset": Stream(), "num_workers": 1},
}


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A device that copies right out of the slabs."""
    device = SimulatedDevice()
    yield device
    device.run()
    assert device.faults == []
    assert device.pids == {os.getpid()}, "a worker has used the device"
    device.sweep()


@pytest.mark.parametrize(
    ("way", "depth"), [*((way, 1) for way in WAYS), *(("worker processes", depth) for depth in (0, 3))]
)
def test_batches_arrive_on_the_device(device: SimulatedDevice, way: str, depth: int) -> None:
    """In order, each step with its batch, and no more of them on the device than were to be."""
    loader = make(device, depth, **WAYS[way])
    assert collect(loader, device) == ALL
    assert device.most <= 2 + 2 * depth
    assert collect(loader, device) == ALL


@pytest.mark.parametrize("way", WAYS)
async def test_batches_arrive_in_async_for(device: SimulatedDevice, way: str) -> None:
    """The same."""
    seen: list[list[float]] = []
    async for batch in make(device, **WAYS[way]):
        device.step(batch, lambda tensors: seen.append(values(tensors[0])))
        del batch
    device.run()
    assert seen == ALL
    assert device.most <= 4


def test_what_is_ready_is_sent_ahead_and_nothing_is_waited_for(device: SimulatedDevice) -> None:
    """A batch is given when it is there, whatever the next one takes."""
    let_go = threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= 4:
                let_go.wait(30)
            return super().__getitem__(index)

    batches: Any = iter(make(device, dataset=Slow(), num_workers=1, worker_backend="thread"))
    wait_until(lambda: len(inside.run(batches).handoff.ready) == 2)
    next(batches)
    assert len(batches.held) == 1
    next(batches)
    assert not batches.held
    let_go.set()
    for batch in batches:
        del batch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [0, 3])
def test_states_are_those_of_the_batches_that_were_given(device: SimulatedDevice, num_workers: int, depth: int) -> None:
    """What was sent ahead counts as not given: a run goes on from a state with the batch that follows."""
    loader = make(device, depth, num_workers=num_workers, shuffle=True)
    order: list[list[float]] = []
    states = [loader.state_dict()]
    batches = iter(loader)
    if num_workers:
        wait_until(lambda: len(inside.run(batches).handoff.ready) >= 3)
    for batch in batches:
        device.step(batch, lambda tensors: order.append(values(tensors[0])))
        states.append(loader.state_dict())
    device.run()
    assert [state["position"] for state in states[:-1]] == list(range(len(ALL)))
    for taken in (1, 5):
        other = make(device, depth, num_workers=num_workers, shuffle=True)
        other.load_state_dict(states[taken])
        assert collect(other, device) == order[taken:]


def noisy(device: SimulatedDevice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a transform that draws from all generators, those of the host now and the device's in its turn."""

    def change(batch: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        drawn += float(torch.rand((), generator=device.generator))
        return device.asked_for(batch, lambda pixels: pixels + drawn)

    return change


def test_what_a_transform_draws_depends_on_the_batch_alone(device: SimulatedDevice) -> None:
    """On the number of workers, on how far ahead it is and on what training draws it does not; training's stay."""
    found: list[Any] = []
    for prefetch, num_workers in ((1, 0), (1, 2), (3, 1), (0, 0)):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        device.generator.manual_seed(3)
        loader = make(device, prefetch, noisy(device), num_workers=num_workers)
        seen: list[Any] = []
        own: list[Any] = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                device.step(batch, lambda tensors, seen=seen: seen.append(values(tensors[0])))  # type: ignore[misc]
                own += [float(torch.rand(1, generator=device.generator)) for _ in range(number % 3)]
                own += [random.random(), float(np.random.rand())]
        device.run()
        found.append((seen, own))
    assert len(set(map(str, (seen for seen, _ in found)))) == 1
    assert len(set(map(str, (own for _, own in found)))) == 1
    seen = found[0][0]
    drawn = [round(batch[0] % 1, 4) for batch in seen]
    assert len(set(drawn)) == 2 * len(ALL)


def test_a_transform_that_raises_does_so_in_the_place_of_its_batch(device: SimulatedDevice) -> None:
    """With the user's traceback; the batches around it arrive."""

    def change(batch: torch.Tensor) -> torch.Tensor:
        if inside_count.append(0) is None and len(inside_count) == 4:
            raise ZeroDivisionError("no")
        return batch

    inside_count: list[int] = []
    batches = iter(make(device, transform=change, num_workers=1))
    seen = []
    for number in range(len(ALL)):
        if number == 3:
            with pytest.raises(ZeroDivisionError, match="no") as caught:
                next(batches)
            assert caught.traceback[-1].name == "change"
        else:
            batch = next(batches)
            device.step(batch, lambda tensors: seen.append(values(tensors[0])))
    with pytest.raises(StopIteration):
        next(batches)
    device.run()
    assert seen == ALL[:3] + ALL[4:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_raise_do_so_in_their_turn(device: SimulatedDevice, num_workers: int) -> None:
    """After the batches before, which are on their way."""
    batches = iter(make(device, 3, dataset=Broken(), num_workers=num_workers))
    for _ in range(3):
        next(batches)
    with pytest.raises(OSError, match="a bad sector"):
        next(batches)
    assert collect(batches, device) == ALL[4:]


def test_a_worker_that_dies_costs_nothing(device: SimulatedDevice, tmp_path: Any) -> None:
    """Its batch is made again, and what was sent stays."""
    dataset = Dying(str(tmp_path / "died"))
    loader = make(device, dataset=dataset, num_workers=2, multiprocessing_context="fork")
    assert collect(loader, device) == ALL
    assert loader.stats().faults.retries == 1


def test_epochs_of_persistent_workers(device: SimulatedDevice) -> None:
    """Also after one that was left, whose batches on the device are nobody's."""
    loader = make(device, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert collect(loader, device) == ALL
    first = iter(loader)
    next(first)
    assert collect(loader, device) == ALL
    second = iter(loader)
    next(second)
    assert second is first  # as torch's: two would take each other's batches
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(second)
    device.run()


def test_a_loader_whose_epoch_is_over_reaches_its_persistent_workers(device: SimulatedDevice) -> None:
    """Their number changes, and `close` ends them, though the iterator over batches on the device is gone."""
    loader = make(device, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    processes = list(inside.workers(batches))
    assert collect(batches, device) == ALL
    del batches
    loader.set_num_workers(1)
    assert collect(loader, device) == ALL
    assert loader.stats().num_workers == 1
    loader.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_that_is_dropped_ends_by_that_alone(device: SimulatedDevice, num_workers: int) -> None:
    """Its workers go, and copies that are under way keep what they read: see `device`, which looks for that."""
    batches: Any = iter(make(device, 2, num_workers=num_workers))
    next(batches)
    processes = inside.workers(batches) if num_workers else []
    del batches
    wait_until(lambda: not any(process.is_alive() for process in processes))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_do_not_touch_the_device(device: SimulatedDevice, method: str) -> None:
    """Neither forked ones nor others; `device` looks for it as well."""
    options: Any = {"num_workers": 2, "multiprocessing_context": method, "batch_size": None}
    batches = make(device, dataset=Witness(), **options)
    seen: list[Any] = []
    for batch in batches:
        device.step(batch, lambda tensors: seen.append(tensors[0].tolist()))
    device.run()
    assert os.getpid() not in {pid for pid, _ in seen}
    assert not any(touched for _, touched in seen)


def test_a_fork_of_the_trainer_leaves_the_device_alone(device: SimulatedDevice) -> None:
    """Its copy of the iterator says whose it is."""
    batches = iter(make(device, num_workers=1))
    next(batches)

    def child() -> None:
        before = len(device.pids)
        with pytest.raises(LoaderClosedError, match="belongs to the process that made it"):
            next(batches)
        batches.close()
        assert len(device.pids) == before

    assert forked(child).wait() == 0
    assert len(collect(batches, device)) == len(ALL) - 1


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_script_runs_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Batches stay as they are, whatever they are made of; a transform is called with them."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert [values(batch) for batch in make(name, num_workers=1)] == ALL
    assert [values(batch - 1) for batch in make(name, transform=lambda batch: batch + 1)] == ALL
    things = [object(), torch.ones(1)]
    assert list(to_device(things, name)) == things


def test_what_cannot_be_is_refused() -> None:
    """Before anything is iterated over."""
    with pytest.raises(ConfigurationError, match="prefetch should be an integer of at least 0"):
        to_device([], "cpu", prefetch=-1)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="torch sees no device 'cuda' here"):
            to_device([], "cuda")
    with pytest.raises(RuntimeError, match="device string: gpu"):
        to_device([], "gpu")


async def test_several_tasks_take_from_one_iterator(device: SimulatedDevice) -> None:
    """Each batch goes to exactly one of them."""
    loader = make(device, 2, num_workers=2)
    batches: AsyncIterator[Any] = aiter(loader)
    seen: list[float] = []

    async def take() -> None:
        async for batch in batches:
            device.step(batch, lambda tensors: seen.extend(values(tensors[0])))
            await asyncio.sleep(0)

    await asyncio.gather(take(), take(), take())
    device.run()
    assert sorted(seen) == [float(number) for number in range(COUNT)]


def test_transforms_in_several_threads_draw_by_batch() -> None:
    """Each has the global generators for itself, which are then as they were."""

    def numbers(threads: int) -> list[tuple[int, float]]:
        torch.manual_seed(1)
        loader: Any = DataLoader(range(400), 2, num_workers=1, worker_backend="thread")  # type: ignore[arg-type]
        drawn = to_device(loader, "cpu", transform=lambda batch: (int(batch[0]), float(torch.rand(1))))
        batches, before = iter(drawn), torch.get_rng_state()
        with ThreadPoolExecutor(threads) as pool:
            taken = [each.result() for each in [pool.submit(list, batches) for _ in range(threads)]]
        assert torch.equal(torch.get_rng_state(), before)
        return sorted(each for part in taken for each in part)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        alone = numbers(1)
        assert len({number for _, number in alone}) == 200
        for _ in range(3):
            assert numbers(3) == alone
    finally:
        sys.setswitchinterval(interval)
