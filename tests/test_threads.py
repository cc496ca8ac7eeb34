"""Plain datasets on threads: workers that are threads of this process, and several samples at once in each worker."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Subset, default_collate, get_worker_info

from asyncloader import DataLoader, sample_rng, threads
from tests.support.patience import hung, patiently

THREADS: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread"}
PLACES = [
    pytest.param(THREADS, id="threads"),
    pytest.param({**THREADS, "concurrency": 4}, id="threads in threads"),
    pytest.param({"num_workers": 2, "concurrency": 4}, id="threads in processes"),
    pytest.param({"num_workers": 0, "concurrency": 4}, id="threads here"),
]
places = pytest.mark.parametrize("place", PLACES)
EXPECTED = [float(i) for i in range(20)]


class Tensors:
    """One sample hangs until a file is there, some raise; whoever does not know better may call it a list."""

    def __init__(self, gate: Path | None = None, at: int = -1, bad: tuple[int, ...] = ()) -> None:
        self.gate = gate
        self.at = at
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise LookupError(f"no sample {index}")
        if index == self.at:
            self.wait_for_the_gate()
        time.sleep(0.001 * (index * 7 % 4))
        return torch.full((3,), float(index))

    def wait_for_the_gate(self) -> None:
        assert self.gate is not None
        while not self.gate.exists():
            time.sleep(0.002)


class Modes:
    """Samples say whether gradients are recorded where they are made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return torch.is_grad_enabled()


class Pids:
    """Samples say which process they are made in."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Thread(threading.Thread):
    """What a context may have for a process, as MONAI's has; its pid is the trainer's, or no pid at all."""

    pid = 1 << 40


class ThreadWithOurPid(threading.Thread):
    """One whose pid must not be signalled either."""

    pid = property(lambda self: os.getpid())


class ContextOfThreads(SpawnContext):
    """A context whose processes are none."""

    _name = "threads"

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.Process = kind


def firsts(batches: Any) -> list[float]:
    """Return the first number of each sample."""
    return [float(sample[0]) for batch in batches for sample in batch]


@places
async def test_order_faces_and_persistence(place: dict[str, Any]) -> None:
    """As from worker processes; short last batches, whole batches at once, a collate_fn that calls torch's."""
    collate = {"collate_fn": default_collate} if place["num_workers"] else {"collate_fn": lambda b: default_collate(b)}
    loader: Any = DataLoader(Tensors(), batch_size=3, **place, **collate)  # type: ignore[arg-type]
    assert firsts(loader) == EXPECTED
    assert firsts([batch async for batch in loader]) == EXPECTED
    assert [len(batch) for batch in loader] == [3] * 6 + [2]
    whole: Any = type("Whole", (Tensors,), {"__getitems__": lambda self, keys: [self[key] for key in keys]})()
    assert firsts(DataLoader(whole, batch_size=3, **place)) == EXPECTED
    if place["num_workers"]:
        loader = DataLoader(Tensors(), batch_size=3, persistent_workers=True, **place)  # type: ignore[arg-type]
        next(iter(loader))
        for _ in range(2):
            assert firsts(loader) == EXPECTED
        loader.close()


@places
def test_errors_are_those_of_their_batch(place: dict[str, Any]) -> None:
    """As they were raised, with the indices; or left out, sample by sample."""
    dataset: Any = Tensors(bad=(4, 11))
    iterator: Any = iter(DataLoader(dataset, batch_size=4, **place))
    seen, errors = [], []
    for _ in range(5):
        try:
            seen += firsts([next(iterator)])
        except LookupError as error:
            errors.append((error.args, [note for note in error.__notes__ if "indices" in note]))
    assert seen == EXPECTED[:4] + EXPECTED[12:]
    assert errors == [
        (("no sample 4",), ["The batch has the indices [4, 5, 6, 7]."]),
        (("no sample 11",), ["The batch has the indices [8, 9, 10, 11]."]),
    ]
    skipping: Any = DataLoader(dataset, batch_size=4, on_error="skip", **place)
    assert firsts(skipping) == EXPECTED[:4] + EXPECTED[5:11] + EXPECTED[12:]


@places
def test_a_slow_sample_holds_one_batch(place: dict[str, Any], tmp_path: Path) -> None:
    """With several samples at once in a worker; the others are finished before it."""
    if "concurrency" not in place:
        pytest.skip("one sample at a time")
    dataset: Any = Tensors(tmp_path / "gate", at=0)
    iterator = iter(DataLoader(dataset, batch_size=2, in_order=False, **place))
    others = firsts([next(iterator) for _ in range(9)])
    (tmp_path / "gate").touch()
    assert firsts([next(iterator)]) == [0.0, 1.0]
    assert sorted(others) == EXPECTED[2:]


class Met(Tensors):
    """A sample is there when four of them are asked for."""

    meeting = threading.Barrier(4, timeout=20)

    def __getitem__(self, index: int) -> Any:
        self.meeting.wait()
        return super().__getitem__(index)


def test_samples_of_a_part_are_fetched_several_at_once() -> None:
    """torch's `Subset` asks the dataset in it for one sample after the other."""
    part = Subset(Met(), range(8, 16))  # type: ignore[arg-type]
    assert firsts(DataLoader(part, batch_size=4, concurrency=4)) == EXPECTED[8:16]


@places
def test_a_timeout_names_the_line(place: dict[str, Any], tmp_path: Path) -> None:
    """Of the thread that hangs; nothing is lost."""
    if not place["num_workers"]:
        pytest.skip("torch knows no timeout there")
    dataset: Any = Tensors(tmp_path / "gate", at=5)
    iterator: Any = iter(DataLoader(dataset, batch_size=4, timeout=0.3, **place))
    assert firsts([next(patiently(iterator))]) == EXPECTED[:4]
    error = hung(iterator, "in wait_for_the_gate")
    assert error.keys == [4, 5, 6, 7]
    assert "in wait_for_the_gate" in error.stack
    del error
    (tmp_path / "gate").touch()
    assert firsts(patiently(iterator)) == EXPECTED[4:]


def test_a_hung_thread_is_abandoned(tmp_path: Path) -> None:
    """Its batch is fetched by another; the thread ends when it comes back, and nobody waits for it."""

    class HangsOnce(Tensors):
        def wait_for_the_gate(self) -> None:
            assert self.gate is not None
            if not self.gate.with_name("hung").exists():
                self.gate.with_name("hung").touch()
                super().wait_for_the_gate()

    dataset: Any = HangsOnce(tmp_path / "gate", at=5)
    loader: Any = DataLoader(dataset, batch_size=4, timeout=0.3, on_timeout="retry", max_retries=50, **THREADS)
    assert firsts(loader) == EXPECTED
    (tmp_path / "gate").touch()
    for thread in threading.enumerate():
        if thread.name.startswith("asyncloader worker"):
            thread.join(5)


class Shares(IterableDataset[Any]):
    """Asks which worker it is in, as torch's documentation shows."""

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        yield from range(info.id, 12, info.num_workers)


@pytest.mark.parametrize("place", [*PLACES[:2], {"num_workers": 1, "multiprocessing_context": "fork"}])
async def test_modes_are_those_of_the_thread_that_iterates(place: dict[str, Any]) -> None:
    """Also where `async for` has another thread start the workers."""
    loader = DataLoader(Modes(), **place)
    with torch.no_grad():
        seen = [batch.item() for batch in loader], [batch.item() async for batch in loader]
    assert seen == ([False, False], [False, False])


def test_worker_info_belongs_to_the_thread() -> None:
    """In its threads, in functions imported by name, and never in the trainer's; batches are not torch-shared."""
    seen: list[Any] = []

    def init(worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        info.dataset.own = worker  # each has a copy of its own
        seen.append((worker, info.id, info.num_workers, os.getpid(), threading.current_thread().name))

    dataset: Any = Tensors()
    loader: Any = DataLoader(dataset, batch_size=2, worker_init_fn=init, **THREADS)
    batches = []
    for batch in loader:
        assert get_worker_info() is None
        batches.append(batch)
    assert not any(batch.is_shared() for batch in batches)
    assert not hasattr(dataset, "own")
    assert sorted(entry[:3] for entry in seen) == [(0, 0, 2), (1, 1, 2)]
    assert {entry[3] for entry in seen} == {os.getpid()}
    assert sorted(map(int, DataLoader(Shares(), batch_size=None, **THREADS))) == list(range(12))


@places
def test_random_numbers_of_a_sample_are_its_own(place: dict[str, Any]) -> None:
    """Those of a sample are its own everywhere; the trainer's global generators are left alone."""

    class Noisy(Tensors):
        def __getitem__(self, index: int) -> Any:
            sample_rng().normal()
            return torch.tensor([index, sample_rng().integers(1 << 40)])

    def run(**arguments: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(Noisy(), batch_size=3, generator=generator, **arguments)  # type: ignore[arg-type]
        return torch.cat(list(loader)).tolist()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    expected = run(num_workers=1)
    assert run(**place) == expected == run(num_workers=0)
    assert len({draw for _, draw in expected}) == 20
    assert torch.equal(torch.get_rng_state(), before)


def test_system_exit_in_a_thread_is_told() -> None:
    """It would end a worker process; in this process it stands for its batch."""

    class Leaves(Tensors):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                raise SystemExit(3)
            return super().__getitem__(index)

    iterator = iter(DataLoader(Leaves(), batch_size=10, **THREADS))  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        next(iterator)
    assert firsts([next(iterator)]) == EXPECTED[10:]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Thread, ThreadWithOurPid, lambda **how: Thread(**how)], ids=["none", "ours", "made"])
@pytest.mark.parametrize("persistent_workers", [False, True])
async def test_a_context_whose_processes_are_threads(kind: Any, persistent_workers: bool) -> None:
    """Workers are threads of ours then: the same pids, nothing seeded, figures of threads."""
    loader: DataLoader[Any] = DataLoader(
        Pids(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=ContextOfThreads(kind),
        persistent_workers=persistent_workers,
        timeout=30,
    )
    before = torch.get_rng_state()
    iterator = iter(loader)
    drawn = torch.get_rng_state()
    assert {int(pid) for batch in iterator for pid in batch} == {os.getpid()}
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.equal(before, drawn)  # the base seed
    assert [int(pid) async for batch in loader for pid in batch] == [os.getpid()] * 20
    assert loader.worker_backend == "process"  # as it was given: loaders are made anew from their attributes
    assert loader.stats().batches == 5
    loader.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_system_that_has_room_for_few_threads(
    place: dict[str, Any], room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that there are get all samples; where there is none, that is the error of each batch, and no wait."""
    start, started = threads.start, Counter[threading.Thread]()

    def start_few(target: Callable[[], object], name: str) -> threading.Thread:
        if "sample thread" in name:
            if started[threading.current_thread()] >= room:  # of one worker
                raise RuntimeError("can't start new thread")
            started[threading.current_thread()] += 1
        return start(target, name)

    monkeypatch.setattr(threads, "start", start_few)
    iterator = iter(DataLoader(Tensors(), batch_size=4, timeout=30, **place))  # type: ignore[arg-type]
    if room:
        assert firsts(iterator) == EXPECTED
        assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    for _ in range(0 if room else 2):
        with pytest.raises(RuntimeError, match="new thread") as told:
            next(iterator)
        assert any("concurrency" in note for note in told.value.__notes__)
    iterator.close()  # type: ignore[attr-defined]
