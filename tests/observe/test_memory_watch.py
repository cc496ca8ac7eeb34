"""How much memory workers have to themselves, and that it is told of before it runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncloader.machine import MemoryLimit
from asyncloader.observe import private
from asyncloader.observe.memory_watch import MemoryWatch, show_bytes
from asyncloader.observe.private import PrivateBytes

GB = 10**9


class Machine:
    """A machine with 100 GB and a cgroup of 10."""

    def __init__(self) -> None:
        self.left = {"the machine": 50 * GB, "/sys/fs/cgroup/job": 5 * GB}
        self.cache = 0

    def __call__(self) -> list[MemoryLimit]:
        limits = {"the machine": 100 * GB, "/sys/fs/cgroup/job": 10 * GB}
        return [MemoryLimit(what, left, limits[what], self.cache) for what, left in self.left.items()]


def test_it_is_told_when_little_is_left_and_once() -> None:
    """Of whom, how much, who has it, and what helps; again when there was enough meanwhile."""
    machine = Machine()
    watch = MemoryWatch(machine)
    assert watch.look({}) == ""
    machine.left["/sys/fs/cgroup/job"] = GB // 3
    told = watch.look({0: GB, 1: 3 * GB, 2: 0})
    assert told.startswith(
        "Memory runs out: /sys/fs/cgroup/job has 333 MB left of 10.0 GB. A process that takes more may be killed."
    )
    assert "have to themselves: worker 1 3.0 GB, worker 0 1.0 GB." in told
    assert "max_worker_memory=" in told
    assert watch.look({}) == ""
    machine.left["/sys/fs/cgroup/job"] = GB * 9 // 10  # not enough for a new beginning
    assert watch.look({}) == ""
    machine.left["/sys/fs/cgroup/job"] = GB // 3
    assert watch.look({}) == ""
    machine.left["/sys/fs/cgroup/job"] = 2 * GB
    assert watch.look({}) == ""
    machine.left["/sys/fs/cgroup/job"] = -1
    assert "/sys/fs/cgroup/job has 0 kB left" in watch.look({})


def test_what_is_little_is_a_share_and_not_more_than_some_gigabytes() -> None:
    """A large machine has much left when it has a twentieth."""
    machine = Machine()
    watch = MemoryWatch(machine)
    machine.left["the machine"] = 3 * GB
    assert watch.look({}) == ""
    machine.left["the machine"] = 2 * GB
    assert "the machine has 2.0 GB left of 100 GB" in watch.look({})


def test_files_that_are_in_use_are_given_up_first() -> None:
    """Who reads much has a cgroup that is always full."""
    machine = Machine()
    machine.left["/sys/fs/cgroup/job"], machine.cache = 0, 4 * GB
    assert MemoryWatch(machine).look({}) == ""


def test_of_many_workers_the_largest_are_named() -> None:
    """One line is enough."""
    machine = Machine()
    machine.left["/sys/fs/cgroup/job"] = 0
    told = MemoryWatch(machine).look({worker: worker * 10**6 for worker in range(1, 20)})
    assert "worker 19 19.0 MB" in told
    assert "worker 12 12.0 MB, ...." in told
    assert "worker 11 " not in told


def test_this_machine_tells_what_it_has_left() -> None:
    """Whatever it has left."""
    assert isinstance(MemoryWatch().look({}), str)


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 kB"), (1500, "2 kB"), (2_500_000, "2.5 MB"), (310 * 10**6, "310 MB"), (GB, "1.0 GB")]
)
def test_bytes_are_written_with_two_or_three_digits(count: int, shown: str) -> None:
    """Two or three digits."""
    assert show_bytes(count) == shown


def test_a_worker_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first batch, then once a second; or less often where a look takes long."""
    looks: list[Any] = []
    clock = [0.0]

    def look(folder: Path) -> int | None:
        looks.append(folder)
        clock[0] += 0.05
        return 100 * len(looks)

    monkeypatch.setattr(private, "private_bytes", look)
    monkeypatch.setattr(private, "perf_counter", lambda: clock[0])
    memory = PrivateBytes(tmp_path)
    told = []
    for _ in range(6):
        told.append(memory.take(clock[0]))
        clock[0] += 2.0
    assert told == [0, 100, 100, 100, 200, 200]
    assert looks == [tmp_path] * 2


def test_a_worker_with_a_bound_looks_whenever_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first batch, then after each eighth of the bound, and once a second; not for what comes and goes."""
    anonymous = [500]  # of which 450 are shared with the trainer
    looks: list[int] = []

    def look(folder: Path) -> int:
        looks.append(anonymous[0] - 450)
        return looks[-1]

    monkeypatch.setattr(private, "private_bytes", look)
    monkeypatch.setattr(private, "anonymous_bytes", lambda folder: anonymous[0])
    monkeypatch.setattr(private, "perf_counter", lambda: 0.0)
    memory = PrivateBytes(tmp_path, bound=80)
    told = []
    for now, size in ((0.1, 500), (0.2, 509), (0.3, 510), (0.4, 525), (0.5, 510), (0.6, 534), (0.7, 535), (1.8, 520)):
        anonymous[0] = size
        told.append(memory.take(now))
    assert told == [50, 50, 60, 75, 75, 75, 85, 70]
    assert looks == [50, 60, 75, 85, 70]
