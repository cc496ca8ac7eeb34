"""``asyncloader doctor --selftest``: does a loader keep its promises on this machine?

Needs none of the packages that the other commands need, and no test framework.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from asyncloader.loader import DataLoader
from asyncloader.machine import HAS_WORKER_PROCESSES

_LENGTH, _BATCH_SIZE = 64, 4
_LONGEST_S = 60.0  # for one batch: a start by spawn imports torch, for 2 s, and for 20 beside 40 busy processes


class Draws(Dataset[tuple[int, torch.Tensor]]):
    """Indices, each with a random draw; the first sample is slow. Threads share their generators, so they draw nothing.

    Args:
        flag: A file. The process that makes sample 30 kills itself, and leaves the file for the next to know.
    """

    def __init__(self, flag: Path | None = None) -> None:
        self.flag = flag

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 0:
            time.sleep(0.1)
        if index == 30 and self.flag is not None and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index, torch.rand(2) if HAS_WORKER_PROCESSES else torch.zeros(2)


def _loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """Make the loader of one seed: whatever the options are, its batches have to be the same."""
    torch.manual_seed(7)
    options = {"batch_size": _BATCH_SIZE, "shuffle": True, "num_workers": 2, "timeout": _LONGEST_S, **options}
    return DataLoader(dataset or Draws(), **options)


def _is_run(batches: list[Any]) -> bool:
    """Whether these are all batches of the run, in its order and with its draws, as one worker makes them."""
    expected = list(_loader(num_workers=1))
    pairs = zip(batches, expected, strict=False)
    same = all(torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) for one, other in pairs)
    return same and len(batches) == len(expected)


def order() -> bool:
    """Batches come in order, whichever worker is first."""
    return _is_run(list(_loader(scheduling="dynamic")))


def kill() -> bool:
    """A worker is killed, and no batch is missing or another."""
    with tempfile.TemporaryDirectory() as folder:
        return _is_run(list(_loader(Draws(Path(folder, "killed")))))


def resume() -> bool:
    """Another loader, with one worker less, goes on from a state."""
    loader = _loader()
    with iter(loader) as batches:
        head = [next(batches) for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))
    other = _loader(num_workers=1)
    other.load_state_dict(state)
    return _is_run(head + list(other))


def async_for() -> bool:
    """A coroutine takes the batches while its loop runs another task."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.002)
            turns += 1

    async def take() -> list[Any]:
        counting = asyncio.ensure_future(count())
        batches = [batch async for batch in _loader()]
        counting.cancel()
        return batches

    return _is_run(asyncio.run(take())) and turns > 5


def shared_memory() -> bool:
    """Batches of 8 MiB come through shared memory, and keep their values while others are made."""
    data = torch.arange(16.0)[:, None].expand(16, 1 << 20)
    kept = list(_loader(TensorDataset(data), batch_size=2, shuffle=False))
    return all(torch.equal(batch, data[2 * at : 2 * at + 2]) for at, (batch,) in enumerate(kept))


def _starts() -> dict[str, Callable[[], bool]]:
    """Return a check for each way of starting workers that this platform has."""

    def start(method: str) -> bool:
        return _is_run(list(_loader(multiprocessing_context=method)))

    return {f"start by {method}": partial(start, method) for method in multiprocessing.get_all_start_methods()}


def selftest(as_json: bool) -> bool:
    """Check each promise, and print a line for it, or JSON; tell whether all are kept."""
    promises = (order, kill, resume, async_for, shared_memory) if HAS_WORKER_PROCESSES else (order, resume, async_for)
    starts = _starts() if HAS_WORKER_PROCESSES else {}
    checks = starts | {promise.__name__.replace("_", " "): promise for promise in promises}
    python = f"Python {platform.python_version()}, {sys.platform}"
    about = f"asyncloader {version('asyncloader')}, torch {torch.__version__}, {python}"
    if not as_json:
        print(about, flush=True)
    found = {name: _judge(name, check, as_json) for name, check in checks.items()}
    is_well = all(each["result"] == "ok" for each in found.values())
    if as_json:
        print(json.dumps({"about": about, "checks": found, "ok": is_well}, indent=1))
    return is_well


def _judge(name: str, check: Callable[[], bool], as_json: bool) -> dict[str, Any]:
    """Check one promise; a killed worker, and more workers than cores, are meant, so nothing is said of them."""
    log, began = logging.getLogger("asyncloader"), time.perf_counter()
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            words = "ok" if check() else "batches differ"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    finally:
        log.setLevel(level)
    seconds = round(time.perf_counter() - began, 2)
    if not as_json:
        print(f"{name:20} {seconds:5.2f} s  {words}", flush=True)
    return {"result": words, "seconds": seconds}
