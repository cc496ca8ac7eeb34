"""Too little of something: it works, or one clear error says what is missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.faults.nursery import Program
from tests.faults.programs import FACES, NUMBERS

Run = Callable[..., Program]


@pytest.mark.parametrize("face", FACES)
def test_a_hundred_descriptors_are_enough_for_two_workers(run: Run, face: str) -> None:
    """RLIMIT_NOFILE=100: several epochs, batches large and small."""
    main = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
class Large(Numbers):
    def __getitem__(self, index):
        return torch.full((300_000,), index)
for _ in range(3):
    print(train(DataLoader(Numbers(), batch_size=4, num_workers=2)) == list(range(40)))
    held = list(DataLoader(Large(), batch_size=4, num_workers=2))
    print([int(sample[0]) for batch in held for sample in batch] == list(range(40)))
"""
    program = run(NUMBERS + FACES[face] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n" * 6, "")


@pytest.mark.parametrize("face", FACES)
def test_too_few_descriptors_are_one_clear_error(run: Run, face: str) -> None:
    """At any lower limit it works, or the error names `ulimit -n`; afterwards the loader works, and nothing has
    leaked."""
    main = """
import psutil, resource
def held():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            pass
    return found
train(DataLoader(Numbers(), num_workers=1))
loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before = held()
worked = refused = 0
for limit in range(len(before) + 1, len(before) + 36):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        assert train(loader) == list(range(40))
        worked += 1
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "ulimit -n" in str(error), (limit, type(error), error)
        refused += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = time.monotonic() + 5
    while (held() - before or psutil.Process().children()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not held() - before, (limit, held() - before)
assert train(loader) == list(range(40))
while threading.active_count() > 2:
    time.sleep(0.001)
print(worked > 0, refused > 0)
"""
    program = run(NUMBERS + FACES[face] + main, timeout_s=60)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("True True\n", "")


@pytest.mark.parametrize("limit", range(4, 26, 3))
def test_too_few_descriptors_for_the_first_loader(run: Run, limit: int) -> None:
    """The same where not even the loop can be made."""
    main = f"""
import resource
import asyncloader
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, hard))
loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
try:
    list(loader)
except asyncloader.WorkerStartError as error:
    print("ulimit -n" in str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(torch.cat(list(loader)).tolist() == list(range(40)))
"""
    program = run(NUMBERS + main)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("True\nTrue\n", "")


def test_too_few_processes_are_one_clear_error(run: Run) -> None:
    """RLIMIT_NPROC: the error says so. (root is not limited, so the program becomes somebody else.)"""
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user with no other processes")
    main = """
import resource
import asyncloader
list(DataLoader(Numbers(), num_workers=1))
os.setuid(54321)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
threads = threading.active_count()
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
try:
    list(DataLoader(Numbers(), num_workers=2))
except asyncloader.WorkerStartError as error:
    print("ulimit -u" in str(error))
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
print(torch.cat(list(DataLoader(Numbers(), num_workers=2))).tolist() == list(range(40)))
"""
    program = run(NUMBERS + main)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("True\nTrue\n", "")


class Range(Dataset[int]):
    """Numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def growth(times: int, use: Callable[[], Any]) -> tuple[int, int]:
    """Return how many descriptors and threads more there are after so many uses than after the first few."""
    for _ in range(3):
        use()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(times):
        use()
    return len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_early_breaks_leave_nothing(times: int) -> None:
    """No descriptor, thread or child more after many loops that were left early and closed."""

    def break_early() -> None:
        iterator = iter(DataLoader(Range(), batch_size=4, num_workers=2))
        for i, _ in enumerate(iterator):
            if i == 3:
                break
        iterator.close()

    assert growth(times, break_early) == (0, 0)


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_dropped_iterators_leave_nothing(times: int) -> None:
    """The same where nobody waits for workers: they go as fast as they come, and none is left in the end."""

    def drop() -> None:
        for _ in DataLoader(Range(), batch_size=4, num_workers=1):
            break

    descriptors, threads = growth(times, drop)
    assert descriptors < 60  # a few are still on their way out
    assert threads < 10
