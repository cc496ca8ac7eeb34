"""Delays: whoever sends or reads a message stops for a moment now and then, as on a machine that is too busy.

Nothing else befalls the run, and nothing helps it: there is no timeout after which a worker would be replaced, so a
wake-up that is lost stays lost. What has to hold: all batches come, the right ones, in the order that torch draws. Of
194 runs on code that left tickets unread behind an answer (commit 4ee4b6b), one hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, TensorDataset

from asyncloader import DataLoader
from asyncloader.backends.processes.channel import Channel
from asyncloader.backends.threads.transport import LocalTransport
from asyncloader.engine.handoff import Handoff
from asyncloader.transport.heap import Heap
from asyncloader.worker.channel import WorkerChannel
from tests.faults.chaos.left import nobody_left
from tests.faults.chaos.resumed import Crew

HANG_S = 60.0
EPOCHS = 5
ROW = 12_000  # numbers of two bytes: a batch travels in shared memory

MOMENTS: dict[str, tuple[type[Any], str]] = {
    "a worker has sent": (WorkerChannel, "send"),
    "a worker has read": (WorkerChannel, "receive"),
    "a worker has slabs back": (Heap, "returned"),
    "the loop has sent": (Channel, "_flush"),
    "the loop has read": (Channel, "_on_readable"),
    "the loop has handed over": (Handoff, "wake"),
    "a thread was sent to": (LocalTransport, "put"),
    "a thread has read": (LocalTransport, "receive"),
    "a thread has sent": (LocalTransport, "send_outcome"),
}


class Rows(Dataset[Any]):
    """Each sample is its index and a row."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.full((ROW,), index, dtype=torch.int16)


class AwaitedRows(Rows):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.001 * (index % 3))
        return super().__getitem__(index)


def in_memory(length: int) -> Dataset[Any]:
    """Make rows that are found once a batch."""
    numbers = torch.arange(length)
    return TensorDataset(numbers, numbers.to(torch.int16)[:, None].expand(-1, ROW).contiguous())


KINDS: dict[str, Callable[[int], Dataset[Any]]] = {"map": Rows, "in memory": in_memory, "async": AwaitedRows}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: a loader, two epochs of it, and where they are held up.

    Attributes:
        seed: Of the run, and of its order.
        kind: Of the dataset.
        batches: Of an epoch.
        size: Of a batch.
        crew: The workers.
        concurrency: Of the loader.
        face: "for" or "async for".
        delays: By moment, how often it takes long, and how long at most. Seconds.
        consumer: The same of the consumer, before each batch.
    """

    seed: int
    kind: str
    batches: int
    size: int
    crew: Crew
    concurrency: int | None
    face: str
    delays: dict[str, tuple[float, float]]
    consumer: tuple[float, float]

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said. There are messages only with workers."""
        chance = random.Random(f"{seed} delayed")
        place = place if place in ("process", "thread") else chance.choice(["process", "process", "process", "thread"])
        kind = chance.choice(list(KINDS))
        overlaps = kind == "async" or chance.random() < 0.7
        crew = Crew.draw(chance, place, "batch", persistent=chance.random() < 0.3)
        meant = [moment for moment in MOMENTS if ("thread" in moment) is (place == "thread") or "loop" in moment]
        held_up = chance.sample(meant, chance.randint(1, 3))
        return cls(
            seed=seed,
            kind=kind,
            batches=chance.choice([1, 2, 3, 4, 5, 6, 8, 12]),  # few: at the end of an epoch no more messages come
            size=chance.choice([1, 3, 7]),
            crew=crew,
            concurrency=chance.choice([2, 4, 8]) if overlaps else None,
            face=chance.choice(["for", "for", "async for"]),
            delays={moment: (chance.choice([0.1, 0.3, 1.0]), chance.choice([0.005, 0.03, 0.1])) for moment in held_up},
            consumer=(chance.choice([0.0, 0.3, 0.3, 1.0]), chance.choice([0.01, 0.1, 0.1])),
        )

    def check(self) -> list[str]:
        """Play the run; return what was held up.

        Raises:
            AssertionError: if it hangs, batches are others than torch's, or anybody is left behind.
        """
        data = KINDS[self.kind](self.batches * self.size)
        expected = self._expected()
        with nobody_left():
            loader = DataLoader(data, self.size, shuffle=True, generator=self._order(), **self._options())
            with self._held_up():
                for epoch in range(EPOCHS):
                    found = self._read(loader)
                    assert found == expected[epoch], f"epoch {epoch}: {found} instead of {expected[epoch]}"
            loader.close()
        return [f"kind: {self.kind}", self.face, *self.delays]

    def _options(self) -> dict[str, Any]:
        return {**self.crew.options, "concurrency": self.concurrency}

    def _order(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _expected(self) -> list[list[Any]]:
        """Return the indices of all epochs as torch's loader draws them: persistent workers have one base seed."""
        order, sampled = self._order(), range(self.batches * self.size)
        sampler = BatchSampler(RandomSampler(sampled, generator=order), self.size, drop_last=False)
        epochs = []
        for epoch in range(EPOCHS):
            if epoch == 0 or not self.crew.options.get("persistent_workers"):
                torch.empty((), dtype=torch.int64).random_(generator=order)
            epochs.append(list(sampler))
        return epochs

    @contextlib.contextmanager
    def _held_up(self) -> Iterator[None]:
        """Have these methods take long now and then, in this process and in those that are forked of it."""
        with contextlib.ExitStack() as patches:
            for moment, (often, longest) in self.delays.items():
                kind, name = MOMENTS[moment]
                held_up = _held_up(getattr(kind, name), often, longest)
                patches.enter_context(mock.patch.object(kind, name, held_up))
            yield

    def _read(self, loader: DataLoader[Any]) -> list[Any]:
        """Read an epoch in a thread, so that a hang can be told.

        Raises:
            AssertionError: if it hangs, or a row is not that of its index.
        """
        found: list[Any] = []
        errors: list[str] = []  # written down: the frames of an exception keep the iterator, and its workers

        def take(batch: Any) -> None:
            indices, rows = batch
            assert torch.equal(rows, indices.to(torch.int16)[:, None].expand(-1, ROW)), f"not the rows of {indices}"
            found.append(indices.tolist())

        def read() -> None:
            try:
                if self.face == "async for":
                    asyncio.run(read_async())
                else:
                    iterator = iter(loader)
                    _stop(*self.consumer)
                    for batch in iterator:
                        take(batch)
                        _stop(*self.consumer)
            except BaseException as error:
                errors.append(repr(error))

        async def read_async() -> None:
            async for batch in loader:
                take(batch)
                _stop(*self.consumer)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(HANG_S)
        assert not thread.is_alive(), f"hangs with {len(found)} batches of {self.batches}"
        assert not errors, errors
        return found


def _held_up(method: Callable[..., Any], often: float, longest: float) -> Callable[..., Any]:
    def held_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _stop(often, longest)

    return held_up


def _stop(often: float, longest: float) -> None:
    """Do nothing for a moment, or go on: by the system's chance, for a forked worker has its own."""
    chance = random.SystemRandom()
    if chance.random() < often:
        time.sleep(chance.random() * longest)
