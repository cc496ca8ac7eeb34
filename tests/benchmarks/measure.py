"""What the benchmarks measure with: the sides, clocks, CPU seconds, memory, the machine.

How figures come about, in every script of this folder:

- A *side* is a function that does one run. Sides take turns in one process (A B A B ...), so whatever else the
  machine does falls on all of them alike, and ratios are made of runs of the same round. Shown are medians, with
  lowest and highest.
- A run begins when the workers of the run before are gone (`settle`).
- CPU seconds are those of this process with all its threads, of its live descendants and of those that ended.
- Memory is that of the process tree and of the shared memory it uses (see `Memory`; Linux only). Every figure of it
  comes from a fresh process per side; peaks are watched from outside every 50 ms, in passes whose times do not
  count.
- Targets are printed beside what was seen. `--null` puts torch's DataLoader on both sides: its ratios are the
  noise.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader as TorchLoader

HELPERS = ("multiprocessing.forkserver", "resource_tracker", "tests.services.")
PACKAGES = ("torch", "numpy", "uvloop", "asyncloader", "torchdata", "spdl-core", "grain", "pillow")
OTHERS = ("litdata", "turboloader", "datago", "dataloader-rs", "dlio-benchmark")  # what only `outsiders` measures
ABSENT = "not installed"
OUR_OPTIONS = {"max_buffered_bytes", "scheduling", "seeding", "concurrency"}


class Run(NamedTuple):
    """One run of one side: the figure that is compared, and what else is worth a column."""

    value: float
    extras: Mapping[str, float] = {}


class NullLoader(TorchLoader[Any]):
    """torch's DataLoader in our place: takes our options and drops them, and blocks the loop in `async for`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{name: value for name, value in kwargs.items() if name not in OUR_OPTIONS})

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self:
            yield batch


def loader_classes(null: bool) -> dict[str, Any]:
    """Return the classes that are compared, by the name of their side."""
    if null:
        return {"torch": TorchLoader, "ours": NullLoader}
    from asyncloader import DataLoader

    return {"torch": TorchLoader, "ours": DataLoader}


# ---- clocks ----


def cpu_seconds() -> float:
    """Return the CPU seconds this process and all its descendants have used so far, those that have ended included."""
    total = 0.0
    for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)):
        total += usage.ru_utime + usage.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it ended meanwhile; what it used is in RUSAGE_CHILDREN by the next call
            continue
        # children_*: a forkserver's workers are reaped by the forkserver, and counted there.
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Stopwatch:
    """Times a run in three parts: up to the first batch, the next `warm_up` batches, and the steady part that counts.

    The steady part ends after `batches`, or after `seconds`, or with the data, whichever comes first.
    """

    def __init__(self, *, warm_up: int = 0, batches: float = float("inf"), seconds: float = float("inf")) -> None:
        self._warm = warm_up + 1
        self._last = self._warm + batches
        self._limit_s = seconds
        self._until = float("inf")
        self._seen = 0
        self._cpu_opened = self._first = self._opened = self._closed = float("nan")
        self._began = time.perf_counter()

    def lap(self) -> bool:
        """Count a batch; return whether that is enough. To be called when the batch has been used."""
        now = time.perf_counter()
        self._seen += 1
        if self._seen <= self._warm:
            if self._seen == 1:
                self._first = now
            if self._seen == self._warm:
                self._cpu_opened = cpu_seconds()
                self._opened = time.perf_counter()
                self._until = self._opened + self._limit_s
            return False
        self._closed = now
        return self._seen >= self._last or now >= self._until

    @property
    def batches(self) -> int:
        """Batches in the steady part."""
        return self._seen - self._warm

    def run(self, per_batch: float = 1.0) -> Run:
        """Return the steady part's rate, in `per_batch` units a second, with start, warm-up and CPU beside it.

        To be called while the workers still live, or their CPU time is known only once they are reaped.
        """
        cpu = cpu_seconds() - self._cpu_opened
        extras = {"cpu us/batch": cpu / self.batches * 1e6, "start ms": (self._first - self._began) * 1e3}
        if self._warm > 1:
            extras["warm-up ms/batch"] = (self._opened - self._first) / (self._warm - 1) * 1e3
        extras["batches"] = float(self.batches)
        return Run(self.batches * per_batch / (self._closed - self._opened), extras)


def drain(loader: Iterable[Any], use: Callable[[Any], object] | None, per_batch: float = 1.0, **parts: Any) -> Run:
    """Run through a loader with `for`, calling `use` on each batch; `parts` are the Stopwatch's."""
    watch = Stopwatch(**parts)
    iterator = iter(loader)
    for batch in iterator:
        if use is not None:
            use(batch)
        if watch.lap():
            break
    return watch.run(per_batch)


async def drain_async(loader: Any, use: Callable[[Any], object] | None, per_batch: float = 1.0, **parts: Any) -> Run:
    """Do the same with `async for`."""
    watch = Stopwatch(**parts)
    iterator = aiter(loader)
    async for batch in iterator:
        if use is not None:
            use(batch)
        if watch.lap():
            break
    run = watch.run(per_batch)
    await iterator.aclose()
    return run


def settle() -> None:
    """Wait until the workers of the run before are gone, so that their end does not fall into the next run."""
    gc.collect()
    deadline = time.monotonic() + 10
    while workers := [child for child in psutil.Process().children(recursive=True) if not _stays(child)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"workers still there 10 s after their run: {workers}")
        time.sleep(0.002)


def _stays(child: psutil.Process) -> bool:
    """Tell whether this is no worker: helpers of multiprocessing, and servers, are direct children and outlive runs."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            return True
        helper = any(name in " ".join(child.cmdline()) for name in HELPERS)
        return helper and child.ppid() == os.getpid()
    except psutil.Error:
        return True


# ---- memory ----


class Memory:
    """What a process tree takes: its private memory, and the machine's shared memory beyond what there was before.

    Private is proportional (anonymous and file pages that n processes share count 1/n in each). Shared memory (tmpfs,
    memfd) is counted machine-wide, because pages that nobody maps just now belong to no process: nothing else on the
    machine may use shared memory meanwhile.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._shared_before = _shared_bytes()

    def bytes(self) -> int:
        """Return what the tree takes now."""
        private = self.private_bytes()
        return private + _shared_bytes() - self._shared_before if private else 0

    def private_bytes(self) -> int:
        """Return the private part of it, which nothing else on the machine can change."""
        try:
            root = psutil.Process(self._pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.Error:
            return 0
        return sum(map(_private_bytes, tree))


def _private_bytes(process: psutil.Process) -> int:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in rollup[1:]}
    return (sizes.get("Pss_Anon:", 0) + sizes.get("Pss_File:", 0)) * 1024


def _shared_bytes() -> int:
    return int(psutil.virtual_memory().shared)


# ---- the machine ----


def machine() -> dict[str, str]:
    """Describe what the figures were taken on."""
    versions = {name: _version(name) for name in PACKAGES + OTHERS}
    versions = {name: version for name, version in versions.items() if name in PACKAGES or version != ABSENT}
    model = ""
    if (cpus := Path("/proc/cpuinfo")).exists():
        model = next((line.partition(":")[2] for line in cpus.read_text().splitlines() if "model name" in line), "")
    return {
        "cores": f"{len(os.sched_getaffinity(0))} ({model.strip() or platform.processor()})",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "load before": f"{os.getloadavg()[0]:.2f} runnable on average in the last minute",
        "torch threads": str(torch.get_num_threads()),
        "a million additions": _speed(),
    }


def _speed() -> str:
    """Say how long a loop of Python takes, again and again: on a shared machine that changes by the second."""
    times = []
    for _ in range(20):
        began, total = time.perf_counter(), 0
        for number in range(1_000_000):
            total += number
        times.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.05)
    return f"{min(times):.0f} ms at the least, {statistics.median(times):.0f} in the median, {max(times):.0f} at most"


def _commit() -> str:
    """Name what is measured, and whether it is as it was committed; pages that are made of results may change.

    Commits may be joined later; the package's tree keeps its name.
    """
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD", "HEAD:asyncloader"], capture_output=True, text=True, check=True
        ).stdout
        head = ", the package's tree ".join(found.split())
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", ":/", ":!/docs"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ", with changes" * bool(changed)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def states_after_each(loader: Any) -> tuple[float, float]:
    """Take the state after every batch of an epoch; return the seconds of the epoch, and those of the calls in them."""
    in_calls = 0.0
    began = time.perf_counter()
    for _ in loader:
        called = time.perf_counter()
        loader.state_dict()
        in_calls += time.perf_counter() - called
    return time.perf_counter() - began, in_calls
