"""Two epochs under faults: workers that die, hang, are killed or stopped, samples that raise, consumers that leave.

What has to hold: the batches, and the errors in their places, are those of an undisturbed run with one worker, bit for
bit. Faults that workers do to themselves happen in a sample, once, whoever fetches it. Those that come from outside
happen when the consumer has taken so many batches. Each one writes down that it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import os
import random
import signal
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import torch

from asyncloader import DataLoader
from tests.faults.chaos.chaotic import STREAMS, AsyncChaotic, Bad, Chaotic, DrawingChaotic, gate, note
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.on_device import Device, Reading
from tests.faults.datasets import DEATHS
from tests.support import inside

TIMEOUT_S = 0.5
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
    device: Device | None = None

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
        if plan.kind not in STREAMS:
            if after := chance.choice([None, None, 1, 4, 15]):
                plan.loader.update(inside.renewed_after(after))
            if chance.random() < 0.2:
                plan.loader.update(num_workers="auto", max_workers=chance.randint(1, 4))
        more: dict[str, Any] = {"cancels": frozenset(cancels), "crews": crews, "device": Device.draw(seed)}
        return dataclasses.replace(plan, **more)._moved(place or where)

    def _moved(self, place: str) -> Plan:
        """Return the run with its workers in another place, and those of its faults that can happen there."""
        if place == "process":
            return self
        is_async = "async" in self.kind or "telling" in self.kind
        loader = {**self.loader, "multiprocessing_context": None, "max_worker_memory": None}
        own = {index: fault for index, fault in self.own.items() if fault in ("hangs", "is slow")}
        if place == "thread":
            loader["worker_backend"] = "thread"
        else:
            loader |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
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
        if kind == "telling stream" and (own or outer):
            # A worker that dies in a later epoch before it has given a state there is an error: see tests of streams.
            loader["persistent_workers"] = False
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
        loader = {**self.loader, "timeout": 0, "on_timeout": "raise", "scheduling": "static"}
        loader["max_worker_memory"] = None
        if self.kind not in STREAMS and self.place != "here":
            loader |= {"num_workers": 1, "max_workers": None}
        if self.place == "process":
            loader["multiprocessing_context"] = "fork"
        quiet: dict[str, Any] = {"own": {}, "outer": {}, "breaks": None, "cancels": frozenset(), "crews": {}}
        quiet["device"] = None
        return dataclasses.replace(self, loader=loader, face="for", **quiet)

    def check(self) -> list[str]:
        """Play the run; return the faults that happened.

        Raises:
            AssertionError: if a batch is not that of the undisturbed run, or anything is left behind.
        """
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            folder = Path(name)
            expected = play(self.undisturbed(), folder)
            with nothing_left():
                with inside.renewals_by_count():
                    seen = play(self, folder)
                if self.breaks is not None:
                    expected[0] = expected[0][: len(seen[0])]
                assert seen == expected, difference(seen, expected)
            happened = [path.name.split(" ", 1)[1] for path in folder.iterdir()]
        return happened + [what for what, is_so in self._circumstances().items() if is_so]

    def _circumstances(self) -> dict[str, bool]:
        loader = self.loader
        return {
            "asked and cancelled": bool(self.cancels),
            f"place: {self.place}": self.place != "process",
            "batches go to a device": self.device is not None,
            "workers come and go": bool(self.crews),
            "workers are renewed": loader.get("max_worker_memory") is not None,
            "their number looks after itself": loader["num_workers"] == "auto",
            f"epoch left: {self.breaks and self.breaks[1]}": self.breaks is not None,
        }


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
        workers = inside.workers(iterator)
        if not workers:  # the only one has died, and another is not there yet
            return
        pid = self._chance.choice(workers).pid
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
    reading = Reading(plan.device, digest)
    loader: Any = reading.wrap(DataLoader(make_dataset(plan, folder), **plan.loader))
    disturber = Disturber(plan, folder)
    epochs: list[list[Any]] = []
    try:
        for number in range(2):
            seen: list[Any] = []
            epochs.append(seen)
            leave = plan.breaks if number == 0 else None
            with contextlib.suppress(Left, asyncio.CancelledError):
                if plan.face == "for":
                    _play_for(loader, seen, reading, disturber, leave)
                else:
                    asyncio.run(_play_async_for(loader, seen, reading, disturber, leave, plan.cancels))
            if leave is not None:  # what asyncio.run raises is a circle with its frame, in which the iterator is
                gc.collect()
    finally:
        disturber.close()
        loader.close()
        gate.set()
    return [reading.read(seen) for seen in epochs]


def make_dataset(plan: Plan, folder: Path) -> Any:
    """Make the dataset of a run."""
    plain = Chaotic if plan.place == "process" else DrawingChaotic
    kind = AsyncChaotic if plan.kind == "async" else plain
    dataset = kind(plan.length, plan.size, set(plan.bad), plan.own, folder)
    return STREAMS[plan.kind](dataset) if plan.kind in STREAMS else dataset


def _play_for(
    loader: Any, seen: list[Any], reading: Reading, disturber: Disturber, leave: tuple[int, str] | None
) -> None:
    iterator = iter(loader)
    for count in itertools.count(1):
        try:
            seen.append(reading.note(next(iterator)))
        except StopIteration:
            return
        except Bad as error:
            seen.append(repr(error))
        disturber.taken(count, iterator, loader)
        if leave is not None and count > leave[0]:
            _leave(iterator, leave[1])
            return


async def _play_async_for(
    loader: Any,
    seen: list[Any],
    reading: Reading,
    disturber: Disturber,
    leave: tuple[int, str] | None,
    cancels: frozenset[int],
) -> None:
    iterator = aiter(loader)
    for count in itertools.count(1):
        try:
            asked = await _ask_and_be_cancelled(iterator) if count in cancels else None
            seen.append(reading.note(await (asked or anext(iterator))))
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


def difference(seen: list[list[Any]], expected: list[list[Any]]) -> str:
    """Say where two runs differ first."""
    for epoch, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
        for number, (a, b) in enumerate(itertools.zip_longest(got, wanted)):
            if a != b:
                return f"epoch {epoch}, batch {number}: {a}, not {b} ({len(got)} batches, not {len(wanted)})"
    return "the same"
