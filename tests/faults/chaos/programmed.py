"""Programs of several loaders: seeded, told epochs at odd places, killed, stopped anywhere and begun again.

    seed -> epoch of one loader (told an epoch, left once, its workers killed, a state taken inside) -> seed -> ...

Datasets hear of epochs, show them or reseed themselves by them, hold generators that are seeded alike, and may be
async, or streams that provide a state. What has to hold: an interrupted program, which makes all its loaders anew and
loads their states, gives what the program gives that was not interrupted, whichever seed each has begun with, and
whether or not it restores the generators by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from asyncloader import DataLoader, sample_rng
from tests.faults.chaos.chaotic import share
from tests.faults.chaos.disturbed import difference
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.sampling import BY_NAME, Size
from tests.faults.chaos.trained import OWN
from tests.support import generators

PLACES = ("process", "process", "process", "thread", "here")
SAMPLING_NAMES = ("in order", "shuffle=True", "shuffle=True", "DistributedSampler", "ElasticSampler", "WeightedSampler")
INDEX, TOLD, RNG, DRAWN, IMAGE, MASK = range(6)


class Heard(Dataset[Any]):
    """Samples that say what the dataset was told, and what they draw.

    Args:
        length: Number of samples.
        kind: Of its two generators, which are seeded alike: a key of OWN.
        seed: Of them.
        draws: Samples draw from the global generators.
    """

    told = -1

    def __init__(self, length: int, kind: str, seed: int, *, draws: bool) -> None:
        self.length = length
        self.kind = kind
        self.seed = seed
        self.draws = draws
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Have other generators."""
        make, _ = OWN[self.kind]
        self.image, self.nested = make(seed), {"mask": [make(seed)]}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)

    def sample(self, index: int) -> Any:
        """Make a sample."""
        _, draw = OWN[self.kind]
        drawn = random.random() + np.random.rand() + torch.rand((), dtype=torch.float64).item() if self.draws else 0.0
        own = draw(self.image), draw(self.nested["mask"][0])
        return torch.tensor([index, self.told, sample_rng().random(), drawn, *own], dtype=torch.float64)


class Showing(Heard):
    """Shows the epoch that it was told: without any it is as in epoch 0."""

    epoch = told = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self.told = epoch


class Reseeding(Heard):
    """Reseeds its generators by the epoch, and does not show it."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch
        self.reseed(self.seed * 1000 + epoch)


class Both(Reseeding):
    """Does both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


class Awaited(Showing):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.0005 * (index % 3))
        first = self.sample(index)
        await asyncio.sleep(0)
        return first


class Telling(IterableDataset[Any]):
    """Each worker's share of the samples, with noise of a generator that is in the stream's state."""

    def __init__(self, length: int, kind: str, seed: int, *, draws: bool) -> None:
        self.length = length
        self.rng = random.Random(seed)
        self.at = 0
        self.resumes = False
        self.told = -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch
        self.rng.seed(epoch)

    def reseed(self, seed: int) -> None:
        """Seed the noise."""
        self.rng.seed(seed)

    def __iter__(self) -> Iterator[Any]:
        first, step = share()
        self.at = self.at if self.resumes else 0
        self.resumes = False
        while (index := first + self.at * step) < self.length:
            self.at += 1
            yield torch.tensor([index, self.told, 0.0, 0.0, *2 * [self.rng.random()]], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.rng.getstate()
        return {"at": self.at, "told": self.told, "rng": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.at, self.told, self.resumes = state["at"], state["told"], bool(state["at"])
        self.rng.setstate((version, tuple(words), gauss))


class Keeping(Heard):
    """Its samples have noise of a generator that is in its state."""

    def __init__(self, length: int, kind: str, seed: int, *, draws: bool) -> None:
        super().__init__(length, kind, seed, draws=draws)
        self.rng = random.Random(seed)

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch
        self.rng.seed(epoch)

    def sample(self, index: int) -> Any:
        return torch.tensor([index, self.told, 0.0, 0.0, *2 * [self.rng.random()]], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.rng.getstate()
        return {"told": self.told, "rng": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.told = state["told"]
        self.rng.setstate((version, tuple(words), gauss))


KINDS: dict[str, Any] = {
    "plain": Heard,
    "showing": Showing,
    "reseeding": Reseeding,
    "both": Both,
    "async": Awaited,
    "stream": Telling,
    "keeping": Keeping,
}
MOVING = ("stream", "keeping")


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What a program does in one epoch of one loader.

    Attributes:
        loader: Which one.
        seed: Set before it; None for no seed.
        told: The epoch that is told before it; None for no such call.
        told_inside: An epoch that is told after the first batch. (Where datasets are not in worker processes, the rest
            of the epoch would be of it at once.)
        own: The seed that the trainer's copy of the dataset gives its generators before it.
        leaves_after: The loop is left once after so many batches, and begun again.
        draws: The trainer draws so many numbers after each batch.
        killed: After so many batches a worker is killed.
        cuts: After so many batches a state is taken and gone on from; -1 for right after ``iter``, and 99 for after
            the epoch.
    """

    loader: int
    seed: int | None
    told: int | None
    told_inside: int | None
    own: int | None
    leaves_after: int | None
    draws: int
    killed: int | None
    cuts: tuple[int, ...]


AFTER = 99


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Of the run.
        place: Where workers are.
        loaders: The kind of dataset, its generators, sampler, length and options, of each.
        epochs: What happens.
        starts: The seeds that the program, and each that goes on after it, begins with.
        restores: The program restores the generators: "before" the loaders load, "after", or never.
    """

    seed: int
    place: str
    loaders: tuple[dict[str, Any], ...]
    epochs: tuple[Epoch, ...]
    starts: tuple[int, ...]
    restores: str

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said."""
        chance = random.Random(f"{seed} programmed")
        place = place or chance.choice(PLACES)
        restores = chance.choice(["", "before", "after"])
        loaders = tuple(_draw_loader(chance, place) for _ in range(chance.choice([1, 2, 2])))
        epochs = tuple(_draw_epoch(chance, loaders, place, restores) for _ in range(chance.randint(2, 6)))
        starts = tuple(chance.choice([1, 2, 3]) for _ in range(40))
        return cls(seed, place, loaders, epochs, starts, restores)

    def check(self) -> list[str]:
        """Play the run; return what happened in it.

        Raises:
            AssertionError: if an interruption changes what comes, or generators that were seeded alike do not agree.
        """
        with nothing_left():
            whole = Program(self, disturbed=False).play()
            seen = Program(self, disturbed=True).play()
        for number, (expected, found) in enumerate(zip(whole, seen, strict=True)):
            loader = self.loaders[self.epochs[number].loader]
            wanted, got = (self._comparable(loader, epoch) for epoch in (expected, found))
            assert got == wanted, f"epoch {number}: " + difference(got, wanted)
            if MASK in self._columns(loader):
                assert all(row[IMAGE] == row[MASK] for epoch in (expected, found) for batch in epoch for row in batch)
        return [
            f"place: {self.place}",
            *(f"dataset: {loader['kind']}" for loader in self.loaders),
            *(f"cut at {min(cut, 5)}" for epoch in self.epochs for cut in epoch.cuts),
            *("a worker killed" for epoch in self.epochs if epoch.killed is not None),
            *("told an epoch" for epoch in self.epochs if epoch.told is not None),
        ]

    def _comparable(self, loader: dict[str, Any], epoch: list[Any]) -> Any:
        return [[[row[column] for column in self._columns(loader)] for row in batch] for batch in epoch]

    def _columns(self, loader: dict[str, Any]) -> list[int]:
        """Return what of a sample follows from the plan."""
        columns = [INDEX, TOLD, RNG]
        is_own = loader["options"].get("seeding") == "sample" or loader["kind"] != "async"
        if self.place == "process" and is_own:
            columns += [DRAWN, IMAGE, MASK]
        elif self.place == "here" and (
            loader["kind"] in MOVING or (loader["kind"] != "async" and loader["options"].get("seeding") == "sample")
        ):
            columns += [IMAGE, MASK]
        return columns


def _draw_loader(chance: random.Random, place: str) -> dict[str, Any]:
    kind = chance.choice([kind for kind in KINDS if place != "thread" or kind not in MOVING])  # threads would share it
    options: dict[str, Any] = {"batch_size": chance.choice([1, 2, 3, 5])}
    if place != "here":
        options |= {
            "num_workers": chance.randint(1, 3),
            "prefetch_factor": chance.choice([1, 2, 4]),
            "persistent_workers": chance.random() < 0.4,
        }
    if place == "thread":
        options["worker_backend"] = "thread"
    elif place == "process":
        options["multiprocessing_context"] = chance.choice(["fork"] * 9 + ["forkserver"])
    if place != "thread" and chance.random() < 0.5:
        options["seeding"] = "sample"
    if kind == "async" and chance.random() < 0.5:
        options["concurrency"] = chance.choice([1, 3, 8])
    if kind in MOVING and chance.random() < 0.5:
        options["snapshot_every_n_steps"] = chance.choice([1, 2, 5])
    sampling = "in order" if kind == "stream" else chance.choice(SAMPLING_NAMES)
    return {
        "kind": kind,
        "own": chance.choice([*OWN]),
        "length": chance.randint(6, 30),
        "sampling": sampling,
        "options": options,
        "tells": chance.random() < 0.7,
        "reseeds": kind not in MOVING and chance.random() < 0.3,
    }


def _draw_epoch(chance: random.Random, loaders: tuple[dict[str, Any], ...], place: str, restores: str) -> Epoch:
    number = chance.randrange(len(loaders))
    loader = loaders[number]
    batches = -(-loader["length"] // loader["options"]["batch_size"])
    moments = [-1, AFTER, *range(1, batches + 1)]
    is_process = place == "process"
    return Epoch(
        number,
        chance.choice([None, 1, 2, 3]),
        chance.randint(0, 3) if loader["tells"] else None,
        chance.choice([None, 1, 2]) if loader["tells"] and is_process else None,
        chance.choice([1, 2]) if loader["reseeds"] else None,
        chance.choice([None, None, 0, 1, 3]) if loader["kind"] not in MOVING else None,
        chance.choice([0, 0, 1]) if restores else 0,
        chance.randint(0, batches) if is_process and chance.random() < 0.4 else None,
        tuple(sorted(chance.sample(moments, chance.choice([0, 1, 1, 2])))) if len(moments) > 1 else (),
    )


class Program:
    """Plays the epochs of a plan.

    Args:
        plan: The run.
        disturbed: Kill workers, and interrupt the program.
    """

    def __init__(self, plan: Plan, *, disturbed: bool) -> None:
        self._plan = plan
        self._disturbed = disturbed
        self._starts = iter(plan.starts)
        self._loaders: list[Any] = []

    def play(self) -> list[list[Any]]:
        """Return the batches of each epoch."""
        self._start()
        try:
            return [list(self._epoch(epoch)) for epoch in self._plan.epochs]
        finally:
            self._close()

    def _start(self) -> None:
        generators.seed_all(next(self._starts))
        self._loaders = [self._make(number, **loader) for number, loader in enumerate(self._plan.loaders)]
        for loader in self._loaders:  # a copy cannot be told that no epoch was set yet
            loader.set_epoch(0)

    def _make(
        self, number: int, kind: str, own: str, length: int, sampling: str, options: dict[str, Any], **_: Any
    ) -> DataLoader[Any]:
        plan = self._plan
        size = Size(length, options["batch_size"], plan.seed + number)
        draws = plan.place == "process"
        dataset: Any = KINDS[kind](length, own, (plan.seed + number) % 1000, draws=draws)
        if kind in ("plain", "both") and plan.seed % 2:
            dataset = Subset(dataset, range(length)) if plan.seed % 4 == 1 else ConcatDataset([dataset])
        sampled = {} if kind == "stream" else BY_NAME[sampling].make(size, None)
        return DataLoader(dataset, **{**options, **sampled}, **({"max_retries": 20} if draws else {}))

    def _close(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders = []

    def _epoch(self, epoch: Epoch) -> Iterator[Any]:
        loader = self._loaders[epoch.loader]
        if epoch.seed is not None:
            generators.seed_all(epoch.seed)
        if epoch.own is not None:
            self._dataset(loader).reseed(epoch.own)
        self._tell(epoch, epoch.told)
        if epoch.leaves_after is not None:
            for _ in zip(range(epoch.leaves_after), loader, strict=False):
                pass
            self._tell(epoch, epoch.told)
        iterator = iter(loader)
        if self._disturbed and -1 in epoch.cuts:
            del iterator
            iterator = iter(self._gone_on(epoch))
        position = 0
        while (batch := self._next(iterator, epoch, position)) is not None:
            position += 1
            yield batch.tolist()
            torch.rand(epoch.draws)
            if position == 1:
                self._tell(epoch, epoch.told_inside)
            if self._disturbed and position in epoch.cuts:
                del iterator
                iterator = iter(self._gone_on(epoch))
        del iterator
        if self._disturbed and AFTER in epoch.cuts:
            self._gone_on(epoch)

    def _next(self, iterator: Any, epoch: Epoch, position: int) -> Any:
        if self._disturbed and position == epoch.killed:
            living = [worker for worker in getattr(iterator, "_workers", ()) if worker.is_alive()]
            if living:
                with contextlib.suppress(ProcessLookupError):  # it goes in this moment
                    os.kill(living[position % len(living)].pid, signal.SIGKILL)
        return next(iterator, None)

    @staticmethod
    def _dataset(loader: DataLoader[Any]) -> Any:
        dataset: Any = loader.dataset
        while not hasattr(dataset, "reseed"):
            dataset = dataset.datasets[0] if hasattr(dataset, "datasets") else dataset.dataset
        return dataset

    def _tell(self, epoch: Epoch, number: int | None) -> None:
        if number is not None:
            self._loaders[epoch.loader].set_epoch(number)

    def _gone_on(self, epoch: Epoch) -> DataLoader[Any]:
        """Interrupt the program, and return the loader of this epoch in the one that goes on."""
        plan = self._plan
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self._loaders]
        saved = generators.save(None)
        self._close()
        self._start()
        if plan.restores == "before":
            generators.restore(saved, None)
        for loader, state in zip(self._loaders, states, strict=True):
            loader.load_state_dict(state)
        if plan.restores == "after":
            generators.restore(saved, None)
        found: DataLoader[Any] = self._loaders[epoch.loader]
        return found
