"""Too little of something: it works, or one clear error says what is missing."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.faults.programs import FACES, NUMBERS, QUICK_FACES
from tests.support import effort
from tests.support.leftovers import descendants
from tests.support.nursery import Program

Run = Callable[..., Program]


@pytest.mark.parametrize("face", QUICK_FACES)
def test_a_hundred_descriptors_are_enough_for_two_workers(run: Run, face: str) -> None:
    """RLIMIT_NOFILE=100: several epochs, batches large and small."""
    main = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
class Large(Numbers):
    def __getitem__(self, index):
        return torch.full((300_000,), index)
for _ in range(2):
    print(train(DataLoader(Numbers(), batch_size=4, num_workers=2)) == list(range(40)))
    held = list(DataLoader(Large(), batch_size=4, num_workers=2))
    print([int(sample[0]) for batch in held for sample in batch] == list(range(40)))
"""
    program = run(NUMBERS + FACES[face] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n" * 4, "")


@pytest.mark.parametrize("face", QUICK_FACES)
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
for limit in range(len(before) + int(sys.argv[1]), len(before) + 36, int(sys.argv[2])):
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
    some = (random.randint(1, 3), 3) if effort.is_quick else (1, 1)
    program = run(NUMBERS + FACES[face] + main, *some)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("True True\n", "")


@pytest.mark.parametrize("limit", range(4, 26, 5))
def test_too_few_descriptors_for_the_first_loader(run: Run, limit: int) -> None:
    """The same where not even the loop can be made."""
    main = f"""
import resource
import asyncloader.errors
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
torch.ones(2) + 1  # torch reads what kind of processor this is
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, hard))
try:
    list(loader)
except asyncloader.errors.WorkerStartError as error:
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
import asyncloader.errors
list(DataLoader(Numbers(), num_workers=1))
os.setuid(54321)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
threads = threading.active_count()
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
try:
    list(DataLoader(Numbers(), num_workers=2))
except asyncloader.errors.WorkerStartError as error:
    print("ulimit -u" in str(error))
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
print(torch.cat(list(DataLoader(Numbers(), num_workers=2))).tolist() == list(range(40)))
"""
    program = run(NUMBERS + main)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("True\nTrue\n", "")


def test_workers_that_may_not_be_signalled(run: Run) -> None:
    """A trainer that has become another user since: its workers end all the same, also one that hangs."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    main = """
class Hangs(Numbers):
    def __getitem__(self, index):
        if index == 8:
            time.sleep(1000)
        return super().__getitem__(index)
loader = DataLoader(Hangs(), batch_size=4, num_workers=2)
iterator = iter(loader)
first = next(iterator).tolist()
workers = [each.pid for each in iterator._workers]
os.setuid(54321)
iterator.close()
def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
print(first, [is_running(pid) for pid in workers])
"""
    program = run(NUMBERS + main)
    assert program.returncode == 0, program.explain("failed")
    assert (program.out, program.err) == ("[0, 1, 2, 3] [False, False]\n", "")


class Range(Dataset[int]):
    """Numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


class Held(NamedTuple):
    """What the process holds: counts, and bytes of memory."""

    descriptors: int
    threads: int
    children: int
    mappings: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        """Look at the process as it is."""
        gc.collect()
        return cls(
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(descendants(os.getpid())),
            Path("/proc/self/maps").read_text().count("\n"),
            psutil.Process().memory_info().rss,
        )


def growth(times: int, use: Callable[[], Any]) -> Held:
    """Return what more there is after so many uses than after the first few."""
    for _ in range(5):
        use()
    before = Held.now()
    for _ in range(times):
        use()
    return Held._make(max(0, now - then) for now, then in zip(Held.now(), before, strict=True))


MANY_TIMES = [pytest.param(200, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]


@pytest.mark.parametrize("times", [5, *MANY_TIMES])
def test_early_breaks_leave_nothing(times: int) -> None:
    """No descriptor, thread, child, mapping or memory more after many loops that were left early and closed."""

    def break_early() -> None:
        iterator = iter(DataLoader(Range(), batch_size=4, num_workers=2))
        for i, _ in enumerate(iterator):
            if i == 3:
                break
        iterator.close()

    more = growth(times, break_early)
    assert (more.descriptors, more.threads, more.children) == (0, 0, 0)
    assert more.mappings < 20
    assert more.resident_bytes < 20e6


@pytest.mark.parametrize("times", [8, *MANY_TIMES])
def test_dropped_iterators_leave_nothing(times: int) -> None:
    """The same where nobody waits for workers: they go as fast as they come, and none is left in the end."""

    def drop() -> None:
        for _ in DataLoader(Range(), batch_size=4, num_workers=1):
            break

    more = growth(times, drop)
    assert more.descriptors < 60  # a few are still on their way out
    assert more.threads < 10
    assert more.children < 5
    assert more.resident_bytes < 20e6


def test_an_address_space_limit_is_slower_or_one_clear_error(run: Run) -> None:
    """RLIMIT_AS: what cannot be mapped travels inline; what cannot be had at all is a MemoryError or the like."""
    main = """
import resource
class Large(Numbers):
    def __getitem__(self, index):
        return torch.full((500_000,), float(index))
def vm_bytes():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (vm_bytes() + (int(sys.argv[1]) << 20),) * 2)
try:
    sums = [float(batch.mean()) for batch in DataLoader(Large(), batch_size=4, num_workers=2)]
    print(sums == [4 * i + 1.5 for i in range(10)])
except (RuntimeError, MemoryError) as error:
    print("error", type(error).__name__, str(error)[:60].replace(chr(10), " "))
"""
    for room_mb in (20, 2000):
        program = run(NUMBERS + main, room_mb)
        assert program.returncode == 0, program.explain("failed")
        assert program.out == "True\n" if room_mb == 2000 else program.out.startswith(("True", "error")), program.out


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of this test's own, in whichever version is mounted."""
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        folder.rmdir()
        pytest.skip("the memory controller is not delegated to this cgroup")
    yield folder
    folder.rmdir()


INTO_CGROUP = """
def enter(folder, room_mb):
    version_1 = os.path.exists(folder + "/memory.limit_in_bytes")
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    with open(f"{folder}/{limit}", "w") as file:
        file.write(str(int(room_mb) << 20))
    with open(f"{folder}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))

class Images(Numbers):
    def __getitem__(self, index):
        if index == 17 and not os.path.exists(sys.argv[2]):
            open(sys.argv[2], "w").close()
            self.waste = bytearray(os.urandom(1 << 20) * 700)
        return torch.full((1_000_000,), float(index))
"""


@pytest.mark.parametrize("wasteful", [False, True], ids=["batches only", "a worker that takes too much"])
def test_a_cgroup_at_its_limit(run: Run, cgroup: Path, tmp_path: Path, wasteful: bool) -> None:
    """Slabs keep within it, however many batches are wanted; a worker that the kernel kills for memory is replaced."""
    flag = tmp_path / "wasted"
    if not wasteful:
        flag.touch()
    main = """
enter(sys.argv[1], 500)
# 15 batches of 16 MB are more than what slabs may take, and fit, with copies on their way, if none is taken for long.
loader = DataLoader(Images(60), batch_size=4, num_workers=2, prefetch_factor=16)
means, pids = [], set()
iterator = iter(loader)
for batch in iterator:
    pids |= {worker.pid for worker in iterator._workers}
    means.append(float(batch.mean()))
print(means == [4 * i + 1.5 for i in range(15)], len(pids))
"""
    program = run(NUMBERS + INTO_CGROUP + main, cgroup, flag)
    assert program.returncode == 0, program.explain("failed")
    assert program.out == ("True 3\n" if wasteful else "True 2\n")
