"""Handlers of signals that raise in the consumer, at a moment that is drawn, and consumers that go on.

What has to hold: whether the consumer goes on with ``next()``, or resumes from a state that was saved in the handler,
it gets the batches of an epoch without interrupts, in order: none is lost, and none comes twice. Where the interrupt
has ended the sampler itself, which then is a finished generator, the iterator says so, and the state goes on. A sampler
that draws each step from a global generator may go on otherwise after a state is loaded, with as many batches; then the
log has said so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import multiprocessing
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from tests import generators
from tests.faults.chaos.chaotic import AsyncDrawing, Drawing
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.resumed import PLACES, Crew
from tests.faults.chaos.sampling import BY_NAME, Sampling, Size
from tests.faults.chaos.told import DRAWS_ON, told
from tests.faults.test_interrupts_everywhere import CtrlC

EPOCHS = 2
MOST_INTERRUPTS = 20
SAMPLERS = (
    "in order",
    "shuffle=True",
    "RandomSampler, replacement",
    "per step, random",
    "batches, torch",
    "ElasticSampler",
)


class Stop(BaseException):
    """What a handler of the user's raises, as schedulers' preemption handlers do.

    No ordinary exception: out of a sample or a sampler that would be an error of theirs, whoever has raised it.
    """


@dataclasses.dataclass(frozen=True)
class Interrupts:
    """The dimension of signals: when they come and what their handler does.

    Attributes:
        by: "the clock", at any time, or "a bytecode" of the library.
        raises: What the handler raises.
        saves: The handler saves a state.
        seed: Of the times or bytecodes.
    """

    by: str
    raises: type[BaseException]
    saves: bool
    seed: str

    @classmethod
    def draw(cls, chance: random.Random, seed: int) -> Interrupts:
        """Draw the signals of a run."""
        by = chance.choice(["the clock", "a bytecode", "a bytecode"])
        if sys.version_info[:2] == (3, 12):  # CPython 3.12.1 crashes by itself where instructions are traced
            by = "the clock"
        raises = chance.choice([KeyboardInterrupt, KeyboardInterrupt, Stop])
        return cls(by, raises, chance.random() < 0.6, f"{seed} interrupts")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: a loader, and how it is interrupted.

    Attributes:
        seed: Of the run.
        size: How much is sampled.
        sampling: By which sampler.
        is_async: The dataset is.
        crew: The workers.
        interrupts: What hits the consumer.
        resumes_in: Where the rest is read from a saved state: "this process" or "a fresh process".
        face: "for" or "async for".
    """

    seed: int
    size: Size
    sampling: Sampling
    is_async: bool
    crew: Crew
    interrupts: Interrupts
    resumes_in: str
    face: str

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said."""
        chance = random.Random(f"{seed} interrupted")
        drawn = chance.choice(PLACES)
        place = place or drawn
        is_async = chance.random() < 0.3
        persistent = place != "here" and chance.random() < 0.4
        interrupts = Interrupts.draw(chance, seed)  # the clock hits asyncio itself too, which loses callbacks then
        return cls(
            seed=seed,
            size=Size(chance.randint(20, 120), chance.choice([1, 2, 4]), seed),
            sampling=BY_NAME[chance.choice(SAMPLERS)],
            is_async=is_async,
            crew=Crew.draw(chance, place, "sample", persistent=persistent),
            interrupts=interrupts,
            resumes_in=chance.choice(["this process"] * 15 + ["a fresh process"]),
            face="for" if interrupts.by == "the clock" else chance.choice(["for", "async for"]),
        )

    def make(self, folder: Path, **more: Any) -> DataLoader[Any]:
        """Make the loader."""
        kind = AsyncDrawing if self.is_async else Drawing
        dataset = kind(self.size.length, "sample_rng", {}, folder)
        options = {**self.sampling.make(self.size, None), **self.crew.options, **more}
        return DataLoader(dataset, **options, seeding="sample")

    def check(self) -> list[str]:
        """Play the run; return how often it was interrupted and what was done then.

        Raises:
            AssertionError: if a batch is lost, comes twice or out of order, or anything is left behind.
        """
        with tempfile.TemporaryDirectory(prefix="chaos-") as name, nothing_left(), told(DRAWS_ON) as warned:
            folder = Path(name)
            whole = self._read(self.make(folder))
            consumer = Consumer(self, self.make(folder), whole, warned)
            consumer.read()
            for saved in consumer.chosen(2):
                if self.resumes_in == "this process":
                    rest = resume(self, saved.state, folder)
                else:
                    rest, warned = in_a_fresh_process(self, saved.state)
                wanted = whole[saved.epoch][saved.count :]
                if saved.is_over:
                    wanted = whole[saved.epoch + 1] if saved.epoch + 1 < EPOCHS else rest
                where = f"a state saved in the handler after {saved.count} batches of epoch {saved.epoch}: "
                assert self.is_resumed(rest, wanted, warned), where + difference(rest, wanted)
        return [
            *["interrupted"] * consumer.hits,
            f"interrupts: {self.interrupts.raises.__name__}, {self.interrupts.by}",
            f"place: {self.crew.place}",
            *[f"resumed in {self.resumes_in}"] * min(2, len(consumer.saved)),
            *[f"told: {self.sampling.name}"] * bool(warned),
        ]

    def is_resumed(self, batches: list[Any], wanted: list[Any], warned: list[str]) -> bool:
        """Whether batches after a state are right: exact, or as many, and the log has said that they may be others."""
        assert not warned or self.sampling.lazily_from_all, warned
        return batches == wanted or bool(warned and len(batches) == len(wanted))

    def _read(self, loader: DataLoader[Any]) -> list[list[Any]]:
        generators.seed_all(self.seed)
        epochs = [[digest(batch) for batch in loader] for _ in range(EPOCHS)]
        loader.close()
        return epochs


@dataclasses.dataclass(frozen=True)
class Saved:
    """A state that was saved in a handler.

    Attributes:
        epoch: In which epoch.
        count: How many batches of it the consumer had.
        is_over: The state is one after the end of that epoch.
        state: As JSON.
    """

    epoch: int
    count: int
    is_over: bool
    state: str


class Consumer:
    """Reads epochs to their ends, whatever interrupts it.

    Args:
        plan: The run.
        loader: What it reads.
        whole: The epochs as they are without interrupts.
        warned: What the log has said of draws.
    """

    def __init__(self, plan: Plan, loader: DataLoader[Any], whole: list[list[Any]], warned: list[str]) -> None:
        self._plan = plan
        self._loader = loader
        self._interrupts = interrupts = plan.interrupts
        self._whole = whole
        self._warned = warned
        self._has_resumed = False
        self._chance = random.Random(interrupts.seed)
        self._epoch = 0
        self._got: list[Any] = []
        self._taking = _For() if plan.face == "for" else _AsyncFor()
        self.saved: list[Saved] = []
        self.hits = 0

    def read(self) -> None:
        """Read all epochs.

        Raises:
            AssertionError: if a batch is lost, comes twice or out of order.
        """
        generators.seed_all(int(self._interrupts.seed.split()[0]))
        try:
            for self._epoch in range(EPOCHS):
                self._read_epoch()
                got, wanted = [digest(batch) for batch in self._got], self._whole[self._epoch]
                may_differ = self._has_resumed and self._plan.is_resumed(got, wanted, self._warned)
                assert got == wanted or may_differ, (
                    f"epoch {self._epoch}, interrupted {self.hits} times: {difference(got, wanted)}"
                )
        finally:
            self._taking.close()
            self._loader.close()

    def chosen(self, most: int) -> list[Saved]:
        """Return some of the states."""
        return self._chance.sample(self.saved, min(most, len(self.saved)))

    def _read_epoch(self) -> None:
        got = self._got = []
        iterator = iter(self._loader)
        for _ in range(MOST_INTERRUPTS):
            try:
                with self._signals():
                    self._taking(iterator, got)
                return
            except self._interrupts.raises:
                self.hits += 1
            except LoaderClosedError:
                iterator = self._resume()
        try:
            self._taking(iterator, got)
        except LoaderClosedError:  # the last interrupt has ended the sampler
            self._taking(self._resume(), got)

    def _resume(self) -> Iterator[Any]:
        """Go on with the state, as the error says."""
        self._has_resumed = True
        self._loader.load_state_dict(self._loader.state_dict())
        return iter(self._loader)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if self._interrupts.by == "a bytecode":
            with Bytecode(int(self._chance.random() ** 2 * 3000) + 1, self._handle):
                yield
            return
        before = signal.signal(signal.SIGALRM, lambda number, frame: self._handle())
        callbacks, gc.callbacks[:] = gc.callbacks[:], []  # Hypothesis has one; what it raises is lost
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + self._chance.random() * 0.01)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.callbacks[:] = callbacks

    def _handle(self) -> None:
        """What the handler of the signal does."""
        if self._interrupts.saves:
            state = self._loader.state_dict()
            self.saved.append(Saved(self._epoch, len(self._got), state["finished"], json.dumps(state)))
        raise self._interrupts.raises


class _For:
    """Takes all batches. Between the end of next() and the list nothing looks for signals."""

    def __call__(self, iterator: Any, got: list[Any]) -> None:
        for batch in iterator:
            got.append(batch)

    def close(self) -> None:
        """Nothing is held."""


class _AsyncFor:
    """Takes all batches in tasks of a loop. A task that the interrupt has left unfinished is awaited later."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def __call__(self, iterator: Any, got: list[Any]) -> None:
        is_over = False
        while not is_over:
            unfinished = next(iter(asyncio.all_tasks(self._loop)), None)
            task = unfinished or self._loop.create_task(self._take(iterator, got))
            try:
                is_over = self._loop.run_until_complete(task)
            except RuntimeError as error:
                if "Event loop stopped before" not in str(error):  # asyncio has kept the stop of an interrupted call
                    raise

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()

    async def _take(self, iterator: Any, got: list[Any]) -> bool:
        async for batch in iterator:
            got.append(batch)
            return False
        return True


class Bytecode(CtrlC):
    """Calls a handler in the library, at the moment of this number.

    Args:
        moment: How many moments at which a signal may hit are passed until then.
        handler: Called then.
    """

    def __init__(self, moment: int, handler: Callable[[], None]) -> None:
        super().__init__(moment)
        self._handler = handler

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        try:
            return super()._step(frame, event, arg)
        except KeyboardInterrupt:
            pass
        self._handler()
        return self._step


def resume(plan: Plan, state: str, folder: Path) -> list[Any]:
    """Return the batches of a new loader that goes on from a state, with other generators."""
    generators.seed_all(plan.seed + 99)
    loader = plan.make(folder)
    loader.load_state_dict(json.loads(state))
    rest = [digest(batch) for batch in loader]
    loader.close()
    return rest


def in_a_fresh_process(plan: Plan, state: str) -> tuple[list[Any], list[str]]:
    """Do the same in a process that has never seen the run; return what its log has said of draws, too."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_tell_rest, args=(plan.seed, plan.crew.place, state, writer))
    process.start()
    writer.close()
    with reader:
        rest: tuple[list[Any], list[str]] = reader.recv()
    process.join()
    process.close()
    return rest


def _tell_rest(seed: int, place: str, state: str, writer: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, writer, told(DRAWS_ON) as warned:
        writer.send((resume(Plan.draw(seed, place), state, Path(name)), warned))


def digest(batch: Any) -> tuple[list[int], list[float]]:
    """Return what is compared of a batch."""
    return batch[0].tolist(), batch[1].tolist()


def difference(seen: list[Any], expected: list[Any]) -> str:
    """Say where two epochs differ first."""
    pairs = itertools.zip_longest(seen, expected)
    where = next((f"batch {number}: {a}, not {b}" for number, (a, b) in enumerate(pairs) if a != b), "the same")
    return f"{where} ({len(seen)} batches, not {len(expected)})"
