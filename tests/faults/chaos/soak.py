"""Plays one run after the other."""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from asyncloader import DataLoader
from tests.faults.chaos import broken, delayed, disturbed, edges, mismatched, programmed, resumed, trained

HANG_S = 120.0  # a worker that is stopped while it opens the dataset is given 60 s


class Plan(Protocol):
    """One run of a property: a frozen dataclass with the values of all dimensions, which is what a failure prints."""

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said: "process", "thread" or "here"."""

    def check(self) -> list[str]:
        """Play the run; return what happened in it, for the statistics.

        Raises:
            AssertionError: if anything is wrong.
        """


PROPERTIES: dict[str, type[Any]] = {
    "disturbed": disturbed.Plan,
    "resumed": resumed.Plan,
    "mismatched": mismatched.Plan,
    "broken": broken.Plan,
    "delayed": delayed.Plan,
    "trained": trained.Plan,
    "edges": edges.Plan,
    "programmed": programmed.Plan,
}


def draw(seed: int, place: str | None = None, name: str | None = None) -> tuple[str, Plan]:
    """Draw a run; its property as well, if that is not said."""
    if name is None:
        name = random.Random(f"{seed} property").choice(list(PROPERTIES))
    return name, PROPERTIES[name].draw(seed, place)


def soak(
    first_seed: int, runs: int | None, seconds: float, place: str | None = None, name: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Play one run after the other, so many or for so long; give each one's seed and what happened in it.

    Args:
        first_seed: Of the first run; the second has the next one.
        runs: How many; None for any number.
        seconds: For how long.
        place: Where all workers are; otherwise drawn.
        name: Of the property; otherwise drawn.
    """
    for seed in seeds(first_seed, runs, seconds):
        yield seed, play(seed, place, name)


def seeds(first: int, runs: int | None, seconds: float) -> Iterator[int]:
    """Yield the seeds of so many runs, or of runs for so long."""
    begun = time.monotonic()
    for seed in itertools.count(first):
        if (runs is not None and seed - first >= runs) or time.monotonic() - begun > seconds:
            return
        yield seed


def play(seed: int, place: str | None, name: str | None) -> list[str]:
    """Play one run; return what happened in it.

    Raises:
        AssertionError: if anything is wrong, with the plan and the command that repeats it.
    """
    name, plan = draw(seed, place, name)
    print(f"seed {seed} {name} ", end="\r", file=sys.stderr)  # the last words, should it hang
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        return [f"[{name}]", *plan.check()]
    except BaseException as error:
        where = f" --place {place}" if place else ""
        command = f"python -m tests.faults.chaos --runs 1 --seed {seed} --property {name}{where}"
        error.add_note(f"{name}: {plan}\nRepeat it: {command}")
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def play_apart(seed: int, place: str | None, name: str | None) -> list[str] | None:
    """Play one run in a forked process; return what happened in it, or None if anything was wrong or hung.

    To be called where no loader has been made yet.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        code = 1
        try:
            settle()
            os.write(writer, "\n".join(play(seed, place, name)).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as told:
        happened = told.read().split("\n")
    _, status = os.waitpid(pid, 0)
    if status and os.WIFSIGNALED(status):
        print(f"seed {seed}: ended by {signal.Signals(os.WTERMSIG(status)).name}", file=sys.stderr)
    return None if status else happened


def settle() -> None:
    """Bring to life what stays once it exists, as tests/conftest.py does: the loop's thread, and shared memory."""
    for _ in DataLoader([torch.zeros(1 << 18)], num_workers=1):
        pass


def seed_of_the_clock() -> int:
    """Return a seed that nobody has seen, with room for the runs that follow until the next one."""
    return time.time_ns() // 1_000_000 * 1000
