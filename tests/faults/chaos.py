"""Disturb runs over data in every way that comes up, and hold each against an undisturbed one.

    python -m tests.faults.chaos --runs 1000

A run is a configuration of the loader and a list of faults, both drawn from the run's own seed, which is the seed of
the whole plus the number of the run: ``--seed N --runs 1`` repeats run N alone. Without ``--seed`` it comes from the
clock. ``--place`` has all workers be processes, threads, or none ("here"). What has to hold:

- the batches, and the errors in their places, are those of an undisturbed run with one worker, bit for bit;
- nothing hangs;
- no child, thread, descriptor, memfd, mapping or segment of shared memory is left.

Faults that workers do to themselves happen in a sample, once, whoever fetches it. Those that come from outside happen
when the consumer has taken so many batches. Each one writes down that it happened.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from asyncloader import DataLoader
from asyncloader.engine import slicer
from asyncloader.engine.staff import END_GRACE_S
from tests.faults.chaotic import STREAMS, AsyncChaotic, Bad, Chaotic, DrawingChaotic, gate, note
from tests.faults.datasets import DEATHS
from tests.leftovers import Holdings

TIMEOUT_S = 0.5
HANG_S = 120.0  # a worker that is stopped while it opens the dataset is given 60 s
PATIENCE_S = 3 * END_GRACE_S  # a worker that was stopped for good is killed after that grace
OWN_FAULTS = (*(f"dies: {death}" for death in DEATHS), "hangs", "is slow")
OUTER_FAULTS = ("killed", "stopped for good", "stopped for a while")
PLACES = (*["process"] * 6, "thread", "here")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: how the loader is made, how it is iterated, and what befalls it."""

    seed: int
    kind: str  # of the dataset: "map", "async", or one of STREAMS
    length: int
    size: int
    loader: dict[str, Any]
    face: str
    breaks: tuple[int, str] | None  # after how many batches the first epoch is left, and how
    bad: frozenset[int]
    own: dict[int, str]
    outer: dict[int, str]
    place: str = "process"
    cancels: frozenset[int] = frozenset()  # after how many batches the consumer asks for one, and is cancelled
    crews: dict[int, int] = dataclasses.field(default_factory=dict)  # after how many batches there are how many workers

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said."""
        chance = random.Random(f"{seed} {cls.__name__}")
        where = chance.choice(PLACES)
        plan = cls._draw(seed)
        cancels = chance.sample(range(60), chance.choice([0, 1, 3])) if plan.face == "async for" else []
        may_change = plan.kind not in STREAMS and (place or where) != "here"
        changes = chance.sample(range(60), chance.choice([0, 0, 2, 6]) * may_change)
        crews = {after: chance.randint(1, 4) for after in changes}
        if plan.loader["persistent_workers"] and plan.kind not in STREAMS:
            plan.loader["prefetch_epochs"] = chance.choice([0, 1])
        if plan.kind not in STREAMS:
            plan.loader["max_tasks_per_child"] = chance.choice([None, None, 1, 4, 15])
            if chance.random() < 0.2:
                plan.loader.update(num_workers="auto", max_workers=chance.randint(1, 4))
        if plan.kind == "map" and (place or where) != "here" and chance.random() < 0.3:
            plan.loader.update(scheduling="split", seeding="sample")
        return dataclasses.replace(plan, cancels=frozenset(cancels), crews=crews)._moved(place or where)

    def _moved(self, place: str) -> Plan:
        """Return the run with its workers in another place, and those of its faults that can happen there."""
        if place == "process":
            return self
        is_async = "async" in self.kind or "telling" in self.kind
        loader = {**self.loader, "multiprocessing_context": None, "max_tasks_per_child": None}
        own = {index: fault for index, fault in self.own.items() if fault in ("hangs", "is slow")}
        if place == "thread":
            loader["worker_backend"] = "thread"
        else:
            loader |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "prefetch_epochs": 0}
            loader["max_workers"] = None
            if not is_async:
                loader["timeout"] = 0
            # Nobody can help a loop that is blocked, nor one that hangs in a stream that has not told where it is.
            may_hang = is_async and self.kind != "telling stream"
            own = {index: fault for index, fault in own.items() if fault == "is slow" or (may_hang and not index % 2)}
        return dataclasses.replace(self, place=place, loader=loader, own=own, outer={})

    @classmethod
    def _draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        batch_size = chance.choice([1, 2, 4, 8])
        batches = chance.randint(50, 70)
        length = batches * batch_size - chance.randrange(batch_size)
        kind = chance.choice(["map", "map", "map", "async", *STREAMS])
        most_bad = 0 if kind in STREAMS else chance.choice([0, 0, 0, 1, 3])
        bad = frozenset(chance.sample(range(length), most_bad))
        loader = {
            "batch_size": batch_size,
            "shuffle": chance.random() < 0.7,
            "drop_last": chance.random() < 0.3,
            "num_workers": chance.choice([1, 2, 2, 3]),
            "prefetch_factor": chance.choice([1, 2, 4]),
            "scheduling": chance.choice(["static", "dynamic"]),
            "max_buffered_bytes": chance.choice([0, 64 << 20]),
            "persistent_workers": chance.random() < 0.4,
            "on_error": chance.choice(["raise", "skip", "replace"]) if bad else "raise",
            "on_timeout": "retry",
            "timeout": TIMEOUT_S,
            "max_retries": 50,
            "multiprocessing_context": "forkserver" if chance.random() < 0.05 else "fork",
        }
        kinds = chance.choices([0, 1, 2], [1, 6, 3])[0], chance.choices([0, 1, 2], [2, 6, 2])[0]
        weights = [*[3] * len(DEATHS), 2, 6]
        own = {chance.randrange(length): chance.choices(OWN_FAULTS, weights)[0] for _ in range(kinds[0])}
        outer = {chance.randrange(1, batches - 2): chance.choices(OUTER_FAULTS, [8, 2, 4])[0] for _ in range(kinds[1])}
        if kind in STREAMS:
            loader["shuffle"] = False
            loader["concurrency"] = None if kind == "stream" else chance.choice([2, 7, None])
            loader["snapshot_every_n_steps"] = chance.choice([1, 1, 3])
        how = chance.choice(["dropped", "closed", "raises in the body", "cancelled"])
        breaks = (chance.randrange(batches - 2), how) if chance.random() < 0.3 else None
        if breaks is not None and how == "closed":
            loader["persistent_workers"] = False  # new workers draw a new base seed, as torch's: not the same data
        return cls(
            seed=seed,
            kind=kind,
            length=length,
            size=chance.choice([3, 3, 20_000]),
            loader=loader,
            face=chance.choice(["for", "async for"]),
            breaks=breaks,
            bad=bad,
            own=own,
            outer=outer,
        )

    def undisturbed(self) -> Plan:
        """Return the run with the same data, one worker (but for streams, which they divide) and no faults."""
        loader = {**self.loader, "timeout": 0, "on_timeout": "raise", "scheduling": "static", "prefetch_epochs": 0}
        loader["max_tasks_per_child"] = None
        if self.kind not in STREAMS and self.place != "here":
            loader |= {"num_workers": 1, "max_workers": None}
        if self.place == "process":
            loader["multiprocessing_context"] = "fork"
        quiet: dict[str, Any] = {"own": {}, "outer": {}, "breaks": None, "cancels": frozenset(), "crews": {}}
        return dataclasses.replace(self, loader=loader, face="for", **quiet)


class Disturber:
    """Does from outside what is planned, while an epoch runs.

    Args:
        plan: The run.
        folder: Where each fault writes down that it happened.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._chance = random.Random(plan.seed + 1)
        self._timers: list[threading.Timer] = []

    def taken(self, count: int, iterator: Any, loader: Any) -> None:
        """The consumer has so many batches of the epoch."""
        if crew := self._plan.crews.get(count):
            loader.set_num_workers(crew)
        fault = self._plan.outer.get(count)
        if fault is None:
            return
        pid = self._chance.choice(iterator._workers).pid
        with contextlib.suppress(ProcessLookupError):
            if fault == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                if fault == "stopped for a while":
                    self._later(self._chance.random() * 0.3, pid)
            note(self._folder, fault, count)

    def _later(self, delay_s: float, pid: int) -> None:
        timer = threading.Timer(delay_s, _resume, [pid])
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        """Wait for what is still to come."""
        for timer in self._timers:
            timer.join()


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def digest(batch: Any) -> Any:
    """Return what is compared of a batch."""
    indices, draws, samples = batch
    return indices.tolist(), draws.tolist(), zlib.crc32(samples.numpy().tobytes())


class Left(Exception):
    """The body of the loop raises."""


def play(plan: Plan, folder: Path) -> list[list[Any]]:
    """Run two epochs; return for each the batches and, in the place of one, the error."""
    torch.manual_seed(plan.seed)
    gate.clear()
    loader: DataLoader[Any] = DataLoader(make_dataset(plan, folder), **plan.loader)
    disturber = Disturber(plan, folder)
    epochs: list[list[Any]] = []
    try:
        for number in range(2):
            seen: list[Any] = []
            epochs.append(seen)
            leave = plan.breaks if number == 0 else None
            with contextlib.suppress(Left, asyncio.CancelledError):
                if plan.face == "for":
                    _play_for(loader, seen, disturber, leave)
                else:
                    asyncio.run(_play_async_for(loader, seen, disturber, leave, plan.cancels))
            if leave is not None:  # what asyncio.run raises is a circle with its frame, in which the iterator is
                gc.collect()
    finally:
        disturber.close()
        loader.close()
        gate.set()
    return epochs


def make_dataset(plan: Plan, folder: Path) -> Any:
    """Make the dataset of a run."""
    plain = Chaotic if plan.place == "process" else DrawingChaotic
    kind = AsyncChaotic if plan.kind == "async" else plain
    dataset = kind(plan.length, plan.size, set(plan.bad), plan.own, folder)
    return STREAMS[plan.kind](dataset) if plan.kind in STREAMS else dataset


def _play_for(loader: DataLoader[Any], seen: list[Any], disturber: Disturber, leave: tuple[int, str] | None) -> None:
    iterator = iter(loader)
    for count in itertools.count(1):
        try:
            seen.append(digest(next(iterator)))
        except StopIteration:
            return
        except Bad as error:
            seen.append(repr(error))
        disturber.taken(count, iterator, loader)
        if leave is not None and count > leave[0]:
            _leave(iterator, leave[1])
            return


async def _play_async_for(
    loader: DataLoader[Any],
    seen: list[Any],
    disturber: Disturber,
    leave: tuple[int, str] | None,
    cancels: frozenset[int],
) -> None:
    iterator = aiter(loader)
    for count in itertools.count(1):
        try:
            asked = await _ask_and_be_cancelled(iterator) if count in cancels else None
            seen.append(digest(await (asked or anext(iterator))))
        except StopAsyncIteration:
            return
        except Bad as error:
            seen.append(repr(error))
        disturber.taken(count, iterator, loader)
        if leave is not None and count > leave[0]:
            if leave[1] == "cancelled":
                await _ask_and_be_cancelled(iterator)
            _leave(iterator, leave[1])
            return


async def _ask_and_be_cancelled(iterator: Any) -> asyncio.Future[Any] | None:
    """Ask for a batch and be cancelled while waiting: it is for whoever asks next. Return it if it came before."""
    task = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task


def _leave(iterator: Any, how: str) -> None:
    if how == "closed":
        iterator.close()
    elif how == "raises in the body":
        raise Left


def check(plan: Plan) -> list[str]:
    """Play a run; return the faults that happened.

    Raises:
        AssertionError: if anything is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        expected = play(plan.undisturbed(), folder)
        before, mappings = Holdings.now(), memfd_mappings()
        with every_batch_divided():
            seen = play(plan, folder)
        happened = [path.name.split(" ", 1)[1] for path in folder.iterdir()]
        happened += ["asked and cancelled"] * bool(plan.cancels)
        if plan.place != "process":
            happened.append(f"place: {plan.place}")
        happened += ["workers come and go"] * bool(plan.crews)
        happened += ["workers are renewed"] * (plan.loader.get("max_tasks_per_child") is not None)
        happened += ["batches are divided"] * (plan.loader["scheduling"] == "split")
        happened += ["their number looks after itself"] * (plan.loader["num_workers"] == "auto")
        if plan.breaks is not None:
            expected[0] = expected[0][: len(seen[0])]
            happened.append(f"epoch left: {plan.breaks[1]}")
        assert seen == expected, difference(seen, expected)
        left = before.more_than_before(PATIENCE_S)
        assert not left, "left behind: " + "; ".join(left)
        gc.collect()
        assert memfd_mappings() <= max(mappings, 1), f"{memfd_mappings()} mappings, {mappings} before"
    return happened


@contextlib.contextmanager
def every_batch_divided() -> Iterator[None]:
    """Have scheduling="split" divide batches of cheap samples too, as often as it can."""
    with (
        mock.patch.object(slicer, "_LEAST_SLICE_S", 1e-9),
        mock.patch.object(slicer, "_MOST_CARRYING", float("inf")),
    ):
        yield


def difference(seen: list[list[Any]], expected: list[list[Any]]) -> str:
    """Say where two runs differ first."""
    for epoch, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
        for number, (a, b) in enumerate(itertools.zip_longest(got, wanted)):
            if a != b:
                return f"epoch {epoch}, batch {number}: {a}, not {b} ({len(got)} batches, not {len(wanted)})"
    return "the same"


def memfd_mappings() -> int:
    """Count this process's mappings of memfds."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


def soak(
    first_seed: int, runs: int | None, seconds: float, place: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Play one run after the other, so many or for so long; give each one's seed and faults."""
    begun = time.monotonic()
    for seed in itertools.count(first_seed):
        if (runs is not None and seed - first_seed >= runs) or time.monotonic() - begun > seconds:
            return
        plan = Plan.draw(seed, place)
        print(f"seed {seed} ", end="\r", file=sys.stderr)  # the last words, should it hang
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            yield seed, check(plan)
        except BaseException as error:
            where = f" --place {place}" if place else ""
            error.add_note(f"{plan}\nRepeat it: python -m tests.faults.chaos --runs 1 --seed {seed}{where}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def seed_of_the_clock() -> int:
    """Return a seed that nobody has seen, with room for the runs that follow until the next one."""
    return time.time_ns() // 1_000_000 * 1000


def quieten() -> None:
    """Expect what faults cause: warnings in the log, more workers than processors."""
    logging.getLogger("asyncloader").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)


def main() -> None:
    """Play runs and print how many of each fault happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--place", choices=sorted(set(PLACES)))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    quieten()
    first = seed_of_the_clock() if args.seed is None else args.seed
    print(f"first seed {first}", file=sys.stderr)
    histogram: collections.Counter[str] = collections.Counter()
    disturbed = count = 0
    begun = time.monotonic()
    for _, happened in soak(first, args.runs, args.seconds, args.place):
        count += 1
        disturbed += bool(happened)
        histogram.update(happened or ["nothing"])
        if count % 100 == 0:
            print(f"{count} runs, {disturbed} disturbed, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    print(f"{count} runs from seed {first}, {disturbed} disturbed; none wrong, none hung, nothing left behind")
    for fault, number in histogram.most_common():
        print(f"{number:6d}  {fault}")


if __name__ == "__main__":
    main()
