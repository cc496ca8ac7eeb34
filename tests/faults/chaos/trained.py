"""Epochs as trainers run them: seeded each time, looked at from elsewhere, left and begun again, saved at their edges.

    seed -> (look) -> (loop that is left -> seed) -> iter -> (others draw) -> batches, with looks and states among them

The dataset holds generators of its own (two of them seeded alike, as an image's and its mask's) and reads a file that
it has opened in ``__init__``. What has to hold:

- a state changes nothing: the batches after it, and all later epochs, are those of the same program without states;
- each sample's record of the file is its own, and generators that were seeded alike draw alike;
- with workers that are started for each epoch, what an epoch draws from the global generators follows from the seed
  that was set before it, whatever ran before.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader import DataLoader
from tests.faults.chaos.disturbed import difference
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.sampling import BY_NAME, Sampling, Size
from tests.faults.chaos.told import READ_IN_TURNS, told
from tests.support import generators

EPOCHS = 3
RECORD = struct.Struct("<q")
PLACES = ("process", "process", "process", "thread", "here")
SAMPLING_NAMES = (
    "in order",
    "shuffle=True",
    "shuffle=True",
    "RandomSampler",
    "WeightedRandomSampler",
    "own state",
    "DistributedSampler",
    "ElasticSampler",
    "WeightedSampler",
    "MixtureSampler",
    "BalancedBatchSampler",
)
FROM_GLOBAL = {"shuffle=True", "RandomSampler", "WeightedRandomSampler"}
"""Whose order is drawn from torch's global generator."""
COUNTS_FOR_ITSELF = {
    "ElasticSampler",
    "WeightedSampler",
    "MixtureSampler",
    "BalancedBatchSampler",
}
"""Whose epochs the loader counts where nobody calls ``set_epoch``."""

OWN: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "random": (random.Random, lambda rng: rng.random()),
    "numpy": (np.random.default_rng, lambda rng: float(rng.random())),
    "philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda rng: float(rng.random())),
    "RandomState": (np.random.RandomState, lambda rng: float(rng.rand())),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda rng: torch.rand((), generator=rng, dtype=torch.float64).item(),
    ),
}
"""Generators that a dataset may hold: how each is made, and how it is drawn from."""


class Transform:
    """Draws from a generator of its own, as a library's transform does."""

    def __init__(self, kind: str, seed: int) -> None:
        make, self.draw_from = OWN[kind]
        self.rng = make(seed)

    def __call__(self) -> float:
        """Draw a number."""
        return self.draw_from(self.rng)

    def __getstate__(self) -> dict[str, Any]:
        return {"kind": next(kind for kind, (_, draw) in OWN.items() if draw is self.draw_from), "rng": self.rng}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.draw_from, self.rng = OWN[state["kind"]][1], state["rng"]


class Records:
    """A file of records that is opened once.

    Args:
        folder: Where the files are.
        how: "file", "descriptor" or "zip".
    """

    def __init__(self, folder: Path, how: str) -> None:
        self.how = how
        if how == "descriptor":
            self.descriptor = os.open(folder / "records", os.O_RDONLY)
        elif how == "file":
            self.file = open(folder / "records", "rb", buffering=0)  # noqa: SIM115 - as datasets do, for good
        else:
            self.zip = zipfile.ZipFile(folder / "records.zip")

    def __getitem__(self, index: int) -> int:
        if self.how == "descriptor":
            os.lseek(self.descriptor, index * RECORD.size, os.SEEK_SET)
            data = os.read(self.descriptor, RECORD.size)
        elif self.how == "file":
            self.file.seek(index * RECORD.size)
            data = self.file.read(RECORD.size)
        else:
            data = self.zip.read(str(index))
        return int(RECORD.unpack(data)[0])

    def close(self) -> None:
        """Close the file."""
        if self.how == "descriptor":
            os.close(self.descriptor)
        elif self.how == "file":
            self.file.close()
        else:
            self.zip.close()


def write_records(folder: Path, length: int) -> None:
    """Write the files that `Records` reads: record n is the number n."""
    (folder / "records").write_bytes(b"".join(map(RECORD.pack, range(length))))
    with zipfile.ZipFile(folder / "records.zip", "w") as file:
        for index in range(length):
            file.writestr(str(index), RECORD.pack(index))


class Masked(Dataset[Any]):
    """An image's crop, its mask's, and noise: three generators of its own, and the global ones.

    Args:
        length: Number of samples.
        kind: Of the paired generators: a key of OWN.
        noise: Of the third one.
        seed: Of all of them.
        records: What it reads; None to read nothing.
    """

    def __init__(self, length: int, kind: str, noise: str, seed: int, records: Records | None) -> None:
        self.length = length
        self.image, self.mask = Transform(kind, seed), Transform(kind, seed)
        self.transforms = {"noise": [Transform(noise, seed + 1)]}
        self.records = records

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        record = index if self.records is None else self.records[index]
        own = self.image(), self.mask(), self.transforms["noise"][0]()
        drawn = random.random() + np.random.rand() + torch.rand((), dtype=torch.float64).item()
        return torch.tensor([index, record, *own, drawn], dtype=torch.float64)


INDEX, RECORD_READ, IMAGE, MASK, NOISE, DRAWN = range(6)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What a trainer does in one epoch.

    Attributes:
        seed: Set before the epoch begins.
        looks_before: Something else takes one batch before the epoch is seeded.
        leaves_after: A loop is left after so many batches, and begun again with the same seed; None for no such loop.
        between: What happens after ``iter`` and before the first batch: "nothing", "manual_seed", "another loader".
        looks_after: Something else takes one batch after so many of this loop; None if nothing does.
        cut: When a state is taken and gone on from: after a share of the epoch, "begun", "last", or after its end:
            "between".
        who: Goes on: "same" or "new".
        moves_on: After a state of the last step, the trainer sets the next epoch and begins it.
        via: How the state travels: "memory", "json", "torch.save".
    """

    seed: int
    looks_before: bool
    leaves_after: int | None
    between: str
    looks_after: int | None
    cut: float | str | None
    who: str
    moves_on: bool
    via: str

    @classmethod
    def draw(cls, chance: random.Random, *, may_look_inside: bool, draws_late: bool) -> Epoch:
        """Draw an epoch.

        Args:
            chance: Draws.
            may_look_inside: Something else may take a batch in the middle of the epoch.
            draws_late: The order is drawn at the first batch: what happens before that, after a state, decides it.
        """
        cut = chance.choice([None, "begun", "last", "between", chance.random(), chance.random()])
        between = chance.choice(["nothing", "nothing", "manual_seed", "another loader"])
        return cls(
            chance.choice([11, 12, 13]),
            chance.random() < 0.3,
            chance.choice([None, None, 0, 1, 3]),
            "nothing" if draws_late and cut == "begun" else between,
            chance.choice([None, None, 1, 2, 5]) if may_look_inside else None,
            cut,
            chance.choice(["same", "new"]),
            chance.random() < 0.5,
            chance.choice(["memory", "json", "torch.save"]),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Of the run.
        size: How much is sampled.
        sampling: Which sampler.
        generators: Kinds of the dataset's own: of the pair, and of the noise.
        wrapped: The dataset is inside "Subset" or "ConcatDataset", or "nothing".
        reads: How the dataset reads its file, or "nothing".
        place: Where workers are.
        options: Of the loaders.
        counts: The workers of each loader.
        epochs: What happens in them.
        sets_epochs: The trainer calls ``set_epoch`` of the loader.
    """

    seed: int
    size: Size
    sampling: Sampling
    generators: tuple[str, str]
    wrapped: str
    reads: str
    place: str
    options: dict[str, Any]
    counts: tuple[int, ...]
    epochs: tuple[Epoch, ...]
    sets_epochs: bool

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said."""
        chance = random.Random(f"{seed} trained")
        place = place or chance.choice(PLACES)
        size = Size(chance.randint(12, 60), chance.choice([1, 2, 3, 5]), seed, 0, chance.choice([1, 1, 2]))
        options: dict[str, Any] = {}
        if place != "here":
            options = {
                "prefetch_factor": chance.choice([1, 2, 4]),
                "scheduling": chance.choice(["static", "dynamic"]),
                "seeding": chance.choice(["batch", "batch", "sample"]),
                "persistent_workers": chance.random() < 0.3,
            }
        if place == "thread":
            options["worker_backend"] = "thread"
        elif place == "process":
            options["multiprocessing_context"] = chance.choice(["fork"] * 6 + ["forkserver"])
        forks = options.get("multiprocessing_context", "fork") == "fork" and place != "thread"
        is_persistent = bool(options.get("persistent_workers"))
        # Threads that make samples draw from the trainer's generators: an order that is drawn from those is nobody's.
        names = [name for name in SAMPLING_NAMES if place != "thread" or name not in FROM_GLOBAL]
        sampling = BY_NAME[chance.choice(names)]
        # Iterators over one sampler of this kind read from one place: a later one depends on how far an earlier one was
        # read ahead.
        is_shared = sampling.name == "own state"
        if is_shared and place != "here":
            options["max_buffered_bytes"] = 0
        counts = [0 if place == "here" else chance.randint(1, 3) for _ in range(EPOCHS + 1)]
        return cls(
            seed,
            size,
            sampling,
            (chance.choice([*OWN]), chance.choice([*OWN])),
            chance.choice(["nothing", "nothing", "Subset", "ConcatDataset"]),
            chance.choice(["nothing", "file", "descriptor", "zip"]) if forks else "nothing",
            place,
            options,
            tuple(counts[:1] * len(counts) if is_shared else counts),
            tuple(
                Epoch.draw(
                    chance,
                    may_look_inside=not is_persistent,
                    draws_late=place == "here",
                )
                for _ in range(EPOCHS)
            ),
            chance.random() < 0.5,
        )

    def check(self) -> list[str]:
        """Play the run; return what happened in it.

        Raises:
            AssertionError: if a state changes what comes, or samples are not their own.
        """
        with tempfile.TemporaryDirectory(prefix="chaos-") as name, nothing_left():
            folder = Path(name)
            write_records(folder, self.size.length)
            whole = Trainer(self, folder, cuts=False).train()
            with told(READ_IN_TURNS) as warned:
                seen = Trainer(self, folder, cuts=True).train()
            for epoch in (*whole, *seen):
                self._check_samples(epoch)
            expected, got = self._comparable(whole), self._comparable(seen)
            if not self._is_told(warned):
                assert got == expected, "after a state: " + difference(got, expected)
            if self.place == "process" and not self.options["persistent_workers"]:
                self._check_seeds(whole)
        return [
            *(f"cut: {epoch.cut if isinstance(epoch.cut, str) else 'inside'}" for epoch in self.epochs if epoch.cut),
            *(f"a loop left after {epoch.leaves_after}" for epoch in self.epochs if epoch.leaves_after is not None),
            *("a look inside" for epoch in self.epochs if epoch.looks_after),
            f"place: {self.place}",
            f"sampler: {self.sampling.name}",
            f"reads: {self.reads}",
        ]

    def _check_samples(self, epoch: list[list[list[float]]]) -> None:
        for batch in epoch:
            for row in batch:
                assert row[RECORD_READ] == row[INDEX], f"sample {row[INDEX]:.0f} has record {row[RECORD_READ]:.0f}"
                if self.place != "thread":  # whose workers may share the dataset: two threads draw in between
                    assert row[IMAGE] == row[MASK], f"sample {row[INDEX]:.0f}: image and mask differ"

    def _comparable(self, epochs: list[list[list[list[float]]]]) -> Any:
        """Return of each sample what has to be the same: what is seeded by the loader only where processes make it."""
        columns = [INDEX, RECORD_READ]
        if self.place == "process":
            columns += [DRAWN, IMAGE, MASK, NOISE]
        return [[[[row[column] for column in columns] for row in batch] for batch in epoch] for epoch in epochs]

    def _is_told(self, warned: list[str]) -> bool:
        """Whether a warning has told that states do not fit: two iterators have read one sampler in turns."""
        looks = any(epoch.looks_after is not None for epoch in self.epochs)
        assert not warned or (looks and self.sampling.name == "own state"), warned
        return bool(warned)

    def _check_seeds(self, whole: list[list[list[list[float]]]]) -> None:
        """See that epochs of one seed draw alike, whatever ran before them."""
        drawn: dict[int, list[list[float]]] = {}
        for plan, epoch in zip(self.epochs, whole, strict=True):
            numbers = [[row[DRAWN] for row in batch] for batch in epoch]
            if self._shapes_differ:
                numbers = numbers[:1] and [numbers[0][:1]]
            first = drawn.setdefault(plan.seed, numbers)
            assert numbers == first, f"epochs of seed {plan.seed} draw other numbers: " + difference(numbers, first)

    @property
    def _shapes_differ(self) -> bool:
        """Whether batches of two epochs may differ in their number or size."""
        return self.sampling.name in ("MixtureSampler", "BalancedBatchSampler", "own state")


class Trainer:
    """Trains for all epochs of a run.

    Args:
        plan: The run.
        folder: Of the records.
        cuts: Take states and go on from them.
    """

    def __init__(self, plan: Plan, folder: Path, *, cuts: bool) -> None:
        self._plan = plan
        self._folder = folder
        self._cuts = cuts
        self._counts = iter(plan.counts)
        self._records: list[Records] = []
        self._loader: Any = None

    def train(self) -> list[list[Any]]:
        """Return the batches of each epoch: of each sample what the dataset has made of it."""
        generators.seed_all(self._plan.seed)
        self._make_loader()
        try:
            return [list(self._epoch(number, epoch)) for number, epoch in enumerate(self._plan.epochs)]
        finally:
            self._loader.close()
            self._loader = None
            for records in self._records:
                records.close()

    def _epoch(self, number: int, epoch: Epoch) -> Iterator[Any]:
        if epoch.looks_before:
            self._tell(number)
            self._look()
        if epoch.leaves_after is not None:
            iterator = self._begin(number, epoch.seed)
            for _ in zip(range(epoch.leaves_after), iterator, strict=False):
                pass
            del iterator
        iterator = self._begin(number, epoch.seed)
        if self._is_cut(epoch, "begun"):
            del iterator
            iterator = iter(self._gone_on(epoch))
        self._draw_between(epoch)
        position, count = 0, self._batches_left(epoch)
        while (batch := next(iterator, None)) is not None:
            yield batch.tolist()
            position += 1
            if position == epoch.looks_after:
                self._look()
            if self._is_cut(epoch, position, count):
                del iterator
                loader = self._gone_on(epoch)
                if epoch.moves_on and position == count and self._tells:
                    return
                iterator = iter(loader)
        del iterator
        if self._is_cut(epoch, "between"):
            self._gone_on(epoch)

    def _batches_left(self, epoch: Epoch) -> int | None:
        """Return how many batches the epoch has, if that is needed to say when its state is taken."""
        return len(self._loader) if self._cuts and epoch.cut not in (None, "begun", "between") else None

    def _is_cut(self, epoch: Epoch, moment: str | int, count: int | None = None) -> bool:
        if not self._cuts or epoch.cut is None:
            return False
        if isinstance(moment, str):
            return epoch.cut == moment
        if epoch.cut == "last":
            return moment == count
        return isinstance(epoch.cut, float) and moment == max(1, int(epoch.cut * (count or 0)))

    def _begin(self, number: int, seed: int) -> Iterator[Any]:
        self._tell(number)
        generators.seed_all(seed)
        return iter(self._loader)

    @property
    def _tells(self) -> bool:
        plan = self._plan
        return plan.sampling.has_epochs and (plan.sets_epochs or plan.sampling.name not in COUNTS_FOR_ITSELF)

    def _tell(self, number: int) -> None:
        if self._tells:
            self._loader.set_epoch(number)

    def _look(self) -> None:
        next(iter(self._loader), None)

    def _draw_between(self, epoch: Epoch) -> None:
        if epoch.between == "manual_seed":
            torch.manual_seed(epoch.seed + 5)
        elif epoch.between == "another loader":
            next(iter(torch.utils.data.DataLoader(range(4), shuffle=True)))

    def _gone_on(self, epoch: Epoch) -> DataLoader[Any]:
        """Save the state, and return the loader that goes on from it."""
        state = self._loader.state_dict()
        if epoch.via == "json":
            state = json.loads(json.dumps(state))
        elif epoch.via == "torch.save":
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file, weights_only=True)
        if epoch.who == "new":
            self._loader.close()
            generators.seed_all(11 + self._plan.seed % 4)  # as an epoch, perhaps
            self._make_loader()
        self._loader.load_state_dict(state)
        return self._loader

    def _make_loader(self) -> None:
        plan = self._plan
        records = None if plan.reads == "nothing" else Records(self._folder, plan.reads)
        self._records += [] if records is None else [records]
        dataset: Any = Masked(plan.size.length, *plan.generators, plan.seed % 1000, records)
        if plan.wrapped == "Subset":
            dataset = Subset(dataset, range(plan.size.length))
        elif plan.wrapped == "ConcatDataset":
            dataset = ConcatDataset([dataset])
        workers = {"num_workers": next(self._counts), **plan.options} if plan.place != "here" else {}
        self._loader = DataLoader(dataset, **plan.sampling.make(plan.size, None), **workers)
