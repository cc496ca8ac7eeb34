"""Errors inside the engine: a function of it raises when the loop thread calls it.

Such an error is a bug of the library, and nobody knows which one will be next. What has to hold: the consumer gets the
error or all batches, and never fewer without an error; nothing hangs; the next epoch works; no worker and no thread is
left. A descriptor may be: the function that raises may be the one that closes it.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import asyncloader
from asyncloader import DataLoader
from asyncloader.engine.portal import get_portal
from tests.faults.chaos.chaotic import AsyncDrawing, Drawing
from tests.faults.chaos.left import nobody_left
from tests.faults.chaos.resumed import Crew
from tests.faults.test_internal_errors import TRUSTED
from tests.support import generators

HANG_S = 40.0
ROOMS = tuple(str(Path(asyncloader.__file__).parent / room) + os.sep for room in ("engine", "backends", "messages"))
assert all(map(os.path.isdir, ROOMS)), "a room has another name: nothing in it would ever raise"


class Injected(RuntimeError):
    """What a function of the engine raises."""


class LoopTracer:
    """Sees which functions of the engine the loop thread calls; one of them may raise at one of its calls.

    Generator expressions are left out: one that is left early is closed by a call, and what that raises goes nowhere.

    Args:
        target: The function that raises, by its qualified name.
        call: At which of its calls, from 1.
    """

    def __init__(self, target: str = "", call: int = 0) -> None:
        self._target = target
        self._left = call
        self.seen: set[str] = set()
        self.has_raised = False

    def __enter__(self) -> LoopTracer:
        get_portal().call(sys.settrace, self._enter).result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._left = 0  # the call that ends this is none of the run
        get_portal().call(sys.settrace, None).result(HANG_S)

    def _enter(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOMS) and code.co_qualname not in TRUSTED
        if is_ours and code.co_name != "<genexpr>":
            name = qualified(code)
            self.seen.add(name)
            if name == self._target and not self.has_raised:
                self._left -= 1
                if self._left == 0:
                    self.has_raised = True
                    raise Injected(f"injected in {name}")


def qualified(code: CodeType) -> str:
    """Return a name of a function that is the same in each run."""
    return f"{Path(code.co_filename).stem}.{code.co_qualname}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: a loader, and which of the functions that the loop calls raises.

    Attributes:
        seed: Of the run.
        length: Of the dataset.
        is_async: The dataset is.
        crew: The workers.
        target: Where in the sorted list of functions that are called in an epoch the one is that raises: 0 to 1.
        call: At which of its calls it raises.
    """

    seed: int
    length: int
    is_async: bool
    crew: Crew
    target: float
    call: int

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said. Without workers there is no engine."""
        chance = random.Random(f"{seed} broken")
        place = place if place in ("process", "thread") else chance.choice(["process", "process", "thread"])
        is_async = chance.random() < 0.2
        persistent = chance.random() < 0.5
        return cls(
            seed=seed,
            length=chance.randint(40, 120),
            is_async=is_async,
            crew=Crew.draw(chance, place, "sample", persistent=persistent),
            target=chance.random(),
            call=chance.choice([1, 1, 2, 5, 20]),
        )

    def make(self, folder: Path) -> DataLoader[Any]:
        """Make the loader."""
        kind = AsyncDrawing if self.is_async else Drawing
        dataset = kind(self.length, "sample_rng", {}, folder)
        return DataLoader(dataset, 4, shuffle=True, seeding="sample", **self.crew.options)

    def check(self) -> list[str]:
        """Play the run; return what raised.

        Raises:
            AssertionError: if the epoch hangs, or is short without an error, or the next one does not work, or
                anybody is left behind.
        """
        with tempfile.TemporaryDirectory(prefix="chaos-") as name, nobody_left():
            folder = Path(name)
            whole, functions = self._look(folder)
            target = functions[int(self.target * len(functions))]
            loader = self.make(folder)
            generators.seed_all(self.seed)
            with LoopTracer(target, self.call) as tracer:
                consumer = Consumer(loader)
                consumer.read(f"{target} has raised at call {self.call}")
            got, error = consumer.got, consumer.error
            assert got == whole[: len(got)], f"other batches, {target} has raised"
            assert error is not None or got == whole, f"{len(got)} of {len(whole)} batches, and no error: {target}"
            later = Consumer(loader)
            later.read(f"the epoch after {target} has raised at call {self.call} ({error})")
            assert later.error is None, f"the epoch after {target} has raised: {later.error}"
            indices = sorted(index for indices, _ in later.got for index in indices)
            assert indices == [*range(self.length)], f"the epoch after {target} has raised has {len(indices)} samples"
            loader.close()
        if not tracer.has_raised:
            return ["nothing raised"]
        return [f"raised: {target}", "an error" if error else "all batches"]

    def _look(self, folder: Path) -> tuple[list[Any], list[str]]:
        """Return the batches of an epoch, and which functions of the engine the loop calls in it."""
        generators.seed_all(self.seed)
        loader = self.make(folder)
        with LoopTracer() as tracer:
            whole = [digest(batch) for batch in loader]
        loader.close()
        return whole, sorted(tracer.seen)


class Consumer:
    """Reads an epoch in a thread, so that a hang can be told.

    Args:
        loader: What it reads.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.got: list[Any] = []
        self.error: str | None = None  # written down: the frames of an exception keep the iterator, and its workers

    def read(self, after: str) -> None:
        """Read to the end or to the first error.

        Raises:
            AssertionError: if it hangs.
        """
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        thread.join(HANG_S)
        assert not thread.is_alive(), f"hangs with {len(self.got)} batches: {after}"

    def _read(self) -> None:
        try:
            for batch in self._loader:
                self.got.append(digest(batch))
        except Exception as error:
            self.error = repr(error)


def digest(batch: Any) -> tuple[list[int], list[float]]:
    """Return what is compared of a batch."""
    return batch[0].tolist(), batch[1].tolist()
