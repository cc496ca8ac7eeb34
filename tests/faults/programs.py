"""Pieces of programs under test, and what the tests ask of programs that have ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.nursery import Program
from tests.support.patience import TRIES

NUMBERS = """
import asyncio, atexit, ctypes, os, signal, subprocess, sys, threading, time
import torch
from torch.utils.data import Dataset, IterableDataset
from asyncloader import DataLoader

def say(word):
    # One write, which nothing that a worker says can come into.
    os.write(1, f"{word} {time.monotonic()}\\n".encode())

class Numbers(Dataset):
    def __init__(self, length=40):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return index

class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.01)
        return index
"""
"""Imports that programs need, and datasets of numbers."""

HUNG = """
class Hung(Numbers):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.hung = torch.zeros(self.length).share_memory_()
    def wait_until_it_hangs(self):
        while self.hung.count_nonzero() < 2:
            time.sleep(0.001)
    def __getitem__(self, index):
        if index >= 8:
            self.hung[index] = 1
            os.write(1, b"hung\\n")
            if self.way == "sleep":
                time.sleep(1000)
            elif self.way == "interpreter's lock held":
                ctypes.PyDLL(None).sleep(1000)
            elif self.way == "busy":
                while True:
                    pass
            elif self.way == "a loop that swallows everything":
                while True:
                    try:
                        time.sleep(1000)
                    except BaseException:
                        pass
            elif self.way == "a thread that does not end":
                threading.Thread(target=time.sleep, args=(1000,)).start()
            elif self.way == "a child":
                subprocess.run(["sleep", "1000"])
        return index
"""
"""A dataset that hangs from sample 8 on, in one of several ways; the trainer can wait until two workers do."""

FACES = {
    "for": """
def train(loader):
    seen = []
    for batch in loader:
        seen += batch.tolist()
    return seen
""",
    "async for": """
def train(loader):
    async def main():
        seen = []
        async for batch in loader:
            seen += batch.tolist()
        return seen
    return asyncio.run(main())
""",
}
"""A function that returns all numbers of an epoch, by each face."""

QUICK_FACES = ["for", pytest.param("async for", marks=pytest.mark.slow)]
"""For long lists of cases: `make test` runs them by one face, `make test-all` by both."""


def seconds_after(program: Program, line: str) -> float:
    """Return how long the program took to end after it printed the line and the time."""
    (said,) = [text for text in program.out.splitlines() if text.startswith(line)]
    return program.ended_at - float(said.removeprefix(line))


def assert_within(limit_s: float, attempt: Callable[[], float], alone: Callable[[], float] = lambda: 0.0) -> None:
    """See that what an attempt measures can be had within the limit: the best of three, for the machine has other
    work. What it takes at that moment without a loader (`alone`) is the machine's."""
    seconds = []
    for _ in range(TRIES):
        seconds.append(attempt())
        if seconds[-1] < limit_s:
            return
        seconds[-1] -= alone()
        if seconds[-1] < limit_s:
            return
    raise AssertionError(f"took {[round(s, 3) for s in seconds]} seconds, never less than {limit_s}")


def end_alone(run: Callable[..., Program]) -> float:
    """Return how long a program without a loader takes to end: the interpreter takes down torch, page by page."""
    return seconds_after(run(f"{NUMBERS}say('bye')"), "bye")
