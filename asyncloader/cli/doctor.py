"""``asyncloader doctor``: what is wrong on this machine for loading data, and how to put it right."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from asyncloader.cli import cluster
from asyncloader.cli.finding import Finding
from asyncloader.cli.large import find_large
from asyncloader.cli.report import Report
from asyncloader.loader import DataLoader
from asyncloader.machine import available_bytes, memory_limits, private_bytes, usable_cores
from asyncloader.observe.activity import threaded_libraries
from asyncloader.options import AutoWorkers
from asyncloader.ray import RayWorkers

_FEW_DESCRIPTORS = 1024
_FEW_BYTES = 1 << 30


class Probe(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of 4 MB, to see that workers start and deliver."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 << 20)


def versions() -> Finding:
    """Python, torch, the loop."""
    try:
        loop = f"uvloop {importlib.metadata.version('uvloop')}"
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "versions", _versions("asyncio"), "pip install uvloop: it passes on several times as many batches"
        )
    return Finding("versions", _versions(loop))


def _versions(loop: str) -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, {loop}, {platform.system()}"


def cores() -> Finding:
    """Compare the cores that the process may use with those that the machine shows."""
    usable, shown = usable_cores(), os.cpu_count() or 1
    if usable < shown:
        advice = f"Choose num_workers by {usable}: affinity or a container allows no more."
        return Finding("cores", f"{usable} of {shown}", advice)
    return Finding("cores", str(usable))


def torch_threads() -> Finding:
    """Threads of the trainer's own computing."""
    threads, usable = torch.get_num_threads(), usable_cores()
    if threads > usable:
        advice = f"Set OMP_NUM_THREADS={usable}, or call torch.set_num_threads({usable}): more threads than cores."
        return Finding("torch threads", str(threads), advice, is_bad=True)
    return Finding("torch threads", f"{threads} (workers: 1 each)")


def memory() -> Finding:
    """Report the memory that the machine and the cgroups leave."""
    limit = min(memory_limits(), key=lambda limit: limit.left_bytes)
    left = max(0, limit.left_bytes)
    where = f" in {limit.what}" * (limit.what != "the machine")
    found = f"{left / 2**30:.1f} of {limit.limit_bytes / 2**30:.1f} GiB free{where}"
    if left < _FEW_BYTES:
        advice = "Batches use at most half of what is free; what does not fit is copied through a socket, slowly."
        return Finding("memory", found, advice, is_bad=True)
    if private_bytes() is None:
        advice = "What a worker has to itself is not told here: max_tasks_per_child can renew workers that grow."
        return Finding("memory", found, advice)
    return Finding("memory", found)


def shared_memory() -> Finding:
    """/dev/shm: torch's loader needs it, ours does not."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "not there", "Our batches do not need it; torch's own loader does.")
    size = status.f_frsize * status.f_blocks
    advice = "" if size >= _FEW_BYTES else "Enough for asyncloader; torch's own loader wants docker run --shm-size=8g."
    return Finding("/dev/shm", f"{size / 2**20:.0f} MiB", advice)


def descriptors() -> Finding:
    """Open files allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_DESCRIPTORS:
        advice = f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}: a worker takes 8 descriptors."
        return Finding("descriptors", f"{soft} at most", advice, is_bad=soft < 128)
    return Finding("descriptors", f"{soft} at most")


def processes() -> Finding:
    """Processes and threads allowed: by the user's limit, and by the cgroup."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft >= 0 else []
    try:
        text = Path("/sys/fs/cgroup/pids.max").read_text().strip()
        limits += [int(text)] if text != "max" else []
    except (OSError, ValueError):
        pass
    if not limits:
        return Finding("processes", "no limit")
    if min(limits) < 256:
        advice = "ulimit -u, or docker run --pids-limit: a worker and its helpers are about 4 processes and threads."
        return Finding("processes", f"{min(limits)} at most", advice, is_bad=min(limits) < 64)
    return Finding("processes", f"{min(limits)} at most")


def start_method() -> Finding:
    """How workers start, and whether that goes with what the process already is."""
    method = multiprocessing.get_start_method()
    if method == "fork" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        advice = 'Say multiprocessing_context="forkserver": CUDA cannot be used in forked processes.'
        return Finding("start method", f"{method}, CUDA is initialised", advice, is_bad=True)
    return Finding("start method", method)


def library_threads() -> Finding:
    """Libraries that have threads of their own, which forked workers do not get."""
    if not (loaded := threaded_libraries()):
        return Finding("library threads", "no such library is loaded")
    advice = (
        "A worker that is forked after such a library was used may wait for its threads for ever. If workers hang in "
        'one of these, say multiprocessing_context="forkserver".'
    )
    return Finding("library threads", ", ".join(loaded), advice * (multiprocessing.get_start_method() == "fork"))


def pinning() -> Finding:
    """Whether page-locked memory can be had."""
    if not torch.accelerator.is_available():
        return Finding("pinned memory", "no accelerator", "pin_memory=True has no effect here.")
    try:
        torch.ones(1 << 20).pin_memory()
    except RuntimeError as error:
        return Finding("pinned memory", "fails", f"{str(error).splitlines()[0]} (ulimit -l?)", is_bad=True)
    return Finding("pinned memory", "works")


def workers() -> Finding:
    """Start two workers and get batches of them."""
    began = time.perf_counter()
    try:
        for _ in DataLoader(Probe(), batch_size=1, num_workers=2, timeout=60):
            pass
    except Exception as error:
        return Finding("workers", f"{type(error).__name__}", str(error), is_bad=True)
    return Finding("workers", f"2 started and delivered in {time.perf_counter() - began:.2g} s")


CHECKS: tuple[Callable[[], Finding], ...] = (
    versions,
    cores,
    torch_threads,
    memory,
    shared_memory,
    descriptors,
    processes,
    start_method,
    library_threads,
    pinning,
    workers,
)


def _most_workers(loader: torch.utils.data.DataLoader[Any]) -> int:
    """Return how many workers there may come to be."""
    is_auto = isinstance(loader, DataLoader) and isinstance(loader.num_workers, AutoWorkers)
    return loader._loader_options().most_waiting if is_auto else loader.num_workers  # type: ignore[attr-defined]


def crew(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Finding]:
    """How many workers there may be, where that looks after itself, and what they may take, where that is bound."""
    if not isinstance(loader, DataLoader):
        return
    options = loader._loader_options()
    if options.is_auto:
        most = f"up to {options.most_computing} that compute, {options.most_waiting} that mostly wait"
        yield Finding("num_workers", f'"auto": {options.num_workers} to begin with, {most}')
    if (bound := options.max_worker_memory) is not None:
        total, left = bound * _most_workers(loader), available_bytes()
        found = f"{bound / 2**30:.2g} GiB in each, {total / 2**30:.2g} GiB in all workers"
        advice = f"{left / 2**30:.2g} GiB are left: at most {left / 2**30 / _most_workers(loader):.1g} for each."
        yield Finding("max_worker_memory", found, advice * (total > left), is_bad=total > left)


def copies(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Finding]:
    """Large lists and dicts of a dataset, of which each worker will have a copy."""
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    num_workers = _most_workers(loader)
    for large in find_large(loader.dataset):
        cost = large.cost(num_workers, method)
        found = f"{large.kind} of {large.length:,}, {large.all_bytes / 1e6:,.0f} MB; {cost / 1e6:,.0f} MB more with "
        found += f"{num_workers} workers ({method})"
        is_bad = cost > available_bytes()
        yield Finding(f"{large.owner}.{large.name}", found, large.advice() if num_workers else "", is_bad=is_bad)


def examine(report: Report, loader: torch.utils.data.DataLoader[Any] | None = None) -> bool:
    """Look at everything, and at what a loader's dataset holds; print it; whether nothing is bad."""
    provider = loader._loader_options().provider if isinstance(loader, DataLoader) else None
    findings = list(_look(report, provider if isinstance(provider, RayWorkers) else None))
    if loader is not None:
        findings += crew(loader)
        findings += list(copies(loader)) or [Finding("dataset", "holds no large list or dict")]
    rows: list[dict[str, Any]] = [
        {"": "bad" if one.is_bad else "note" if one.advice else "ok", "what": one.what, "found": one.found}
        for one in findings
    ]
    report.table("findings", f"asyncloader {importlib.metadata.version('asyncloader')} on {sys.platform}", rows)
    for one in findings:
        if one.advice:
            report.say(f"advice: {one.what}", f"{one.what}: {one.advice}", one.advice)
    return not any(one.is_bad for one in findings)


def _look(report: Report, workers: RayWorkers | None) -> Iterator[Finding]:
    with report.progress("looking", len(CHECKS) + 1) as advance:
        for check in CHECKS:
            advance(check.__name__.replace("_", " "))
            yield check()
        advance("Ray")
        yield from cluster.look(workers)
