"""``asyncloader doctor``: what is wrong on this machine for loading data, and how to put it right."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.utils.data

from asyncloader.cli.report import Report
from asyncloader.loader import DataLoader
from asyncloader.machine import memory_limits, usable_cores

_FEW_DESCRIPTORS = 1024
_FEW_BYTES = 1 << 30


class Finding(NamedTuple):
    """Something that was looked at. ``advice`` is empty where all is well."""

    what: str
    found: str
    advice: str = ""
    is_bad: bool = False


def versions() -> Finding:
    """Python, torch, the loop."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    advice = "pip install uvloop: it passes on several times as many batches" * (not has_uvloop)
    return Finding("versions", f"{found}, {'uvloop' if has_uvloop else 'asyncio'}", advice)


def cores() -> Finding:
    """Compare the cores that the process may use with those that the machine shows."""
    usable, shown = usable_cores(), os.cpu_count() or 1
    advice = f"Choose num_workers by {usable}: affinity or a container allows no more." * (usable < shown)
    return Finding("cores", f"{usable} of {shown}", advice)


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
    return Finding("memory", found)


def descriptors() -> Finding:
    """Open files allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_DESCRIPTORS:
        advice = f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}: a worker takes 8 descriptors."
        return Finding("descriptors", f"{soft} at most", advice, is_bad=soft < 128)
    return Finding("descriptors", f"{soft} at most")


def workers() -> Finding:
    """Start two workers and get batches of them."""
    began = time.perf_counter()
    try:
        batches = torch.utils.data.TensorDataset(torch.ones(4, 1 << 20))
        for _ in DataLoader(batches, batch_size=1, num_workers=2, timeout=60):
            pass
    except Exception as error:
        return Finding("workers", f"{type(error).__name__}", str(error), is_bad=True)
    method, seconds = multiprocessing.get_start_method(), time.perf_counter() - began
    return Finding("workers", f"2 started by {method} and delivered in {seconds:.2g} s")


CHECKS: tuple[Callable[[], Finding], ...] = (
    versions,
    cores,
    torch_threads,
    memory,
    descriptors,
    workers,
)


def examine(report: Report) -> bool:
    """Look at everything and print it; whether nothing is bad."""
    findings = [check() for check in CHECKS]
    rows = [
        {"": "bad" if one.is_bad else "note" if one.advice else "ok", "what": one.what, "found": one.found}
        for one in findings
    ]
    report.table("findings", f"asyncloader {importlib.metadata.version('asyncloader')} on {sys.platform}", rows)
    for one in findings:
        if one.advice:
            report.say(f"advice: {one.what}", f"{one.what}: {one.advice}", one.advice)
    return not any(one.is_bad for one in findings)
