"""Epochs that are cut: a state is taken, and the loader or a new one goes on from it.

What has to hold: the order is that of torch's DataLoader without the cuts, in the epoch that was resumed and in all
later ones; the random numbers of samples are those of a loader without cuts; so are the trainer's own, where the
trainer has restored its generators.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from asyncloader import DataLoader
from tests.faults.chaos.chaotic import AsyncDrawing, Drawing, DrawingStream
from tests.faults.chaos.disturbed import difference
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.sampling import BY_NAME, SAMPLINGS, Sampling, Size
from tests.faults.datasets import DEATHS
from tests.support import generators

EPOCHS = 3
PLACES = ("process", "process", "thread", "here")


@dataclasses.dataclass(frozen=True)
class Crew:
    """The dimension of workers: where they are, how many there are, and how they work.

    Attributes:
        place: "process", "thread" or "here".
        options: Of the loader.
    """

    place: str
    options: dict[str, Any]

    @classmethod
    def draw(cls, chance: random.Random, place: str, seeding: str, *, persistent: bool) -> Crew:
        """Draw workers of a place."""
        if place == "here":
            return cls(place, {})
        options: dict[str, Any] = {
            "num_workers": chance.choice([1, 2, 2, 3, 4]),
            "prefetch_factor": chance.choice([1, 2, 4]),
            "scheduling": chance.choice(["static", "dynamic"]),
            "max_buffered_bytes": chance.choice([0, 64 << 20]),
        }
        if place == "thread":
            options["worker_backend"] = "thread"
        if persistent:
            options["persistent_workers"] = True
        return cls(place, options)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The dimension of states: when one is taken, how it travels, and who goes on.

    Attributes:
        epoch: In which epoch.
        where: "before" the epoch, when its iterator has "begun", "inside" it or "over", after it.
        share: Inside the epoch, how much of it has come: 1 is inside the last iteration.
        times: How often in a row.
        via: "as it is", "json" or a "file".
        who: "the same loader", "a new loader, generators restored", or "a new loader, generators elsewhere".
        closes: The old loader is closed; otherwise it is dropped.
        early: Generators are restored before the state is loaded, and not after.
        tells: The trainer tells the new loader the epoch.
    """

    epoch: int
    where: str
    share: float
    times: int
    via: str
    who: str
    closes: bool
    early: bool
    tells: bool

    @classmethod
    def draw(cls, chance: random.Random, who: list[str]) -> Cut:
        """Draw a cut."""
        return cls(
            epoch=chance.randrange(EPOCHS - 1),
            where=chance.choices(["before", "begun", "inside", "over"], [1, 2, 8, 2])[0],
            share=chance.choice([1.0, *(chance.random() for _ in range(5))]),
            times=chance.choice([1, 1, 2]),
            via=chance.choice(["as it is", "json", "file"]),
            who=chance.choice(who),
            closes=chance.random() < 0.5,
            early=chance.random() < 0.5,
            tells=chance.random() < 0.5,
        )

    @property
    def is_in_place(self) -> bool:
        return self.who == "the same loader"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: what is sampled and how, by which loader, and where it is cut.

    Attributes:
        seed: Of the run.
        size: How much is sampled.
        sampling: By which sampler.
        generator: Whose generator is the trainer's own one: "nobody's", "the loader's", "the sampler's" or "both".
        kind: Of the dataset: "map", "async" or "stream".
        how: Its samples draw.
        seeding: Of the loaders.
        crews: The workers of the first loader, and of each that goes on.
        cuts: In order.
        consumer: What it does after a batch: "nothing", "draws", or iterates over "another loader" that shuffles.
        face: "for" or "async for".
        deaths: At which samples workers die.
    """

    seed: int
    size: Size
    sampling: Sampling
    generator: str
    kind: str
    how: str
    seeding: str
    crews: tuple[Crew, ...]
    cuts: tuple[Cut, ...]
    consumer: str
    face: str
    deaths: dict[int, str]

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; where its workers are as well, if that is not said."""
        chance = random.Random(f"{seed} resumed")
        ranks = chance.choice([1, 2, 3])
        size = Size(chance.randint(20, 90), chance.choice([1, 2, 4, 5]), seed, chance.randrange(ranks), ranks)
        sampling = chance.choice(SAMPLINGS)
        generator = chance.choice(["nobody's", "the loader's", "the sampler's", "both"])
        kind = chance.choice(["map"] * 5 + ["async"] * 2 + ["stream"])
        how, seeding = chance.choice(
            [
                ("sample_rng", "batch"),
                ("sample_rng", "sample"),
                ("in a block", "sample"),
                ("in a block", "sample"),
                ("nothing", "worker"),
                *[("global", "sample")] * (kind != "stream"),
                *[("global", "batch")] * (kind == "map"),
            ]
        )
        count = chance.choice([1, 1, 2, 3])
        if kind == "stream":
            return cls._draw_stream(seed, chance, size, place, count)
        places = _places(chance, place, count + 1, how, sampling)
        persistent = "here" not in places and chance.random() < 0.4
        crews = [Crew.draw(chance, each, seeding, persistent=persistent) for each in places]
        consumer = chance.choice(_consumers(sampling, generator))
        draws_on = sampling.disturbs_others(generator in ("the sampler's", "both"))
        cuts = [Cut.draw(chance, _ELSEWHERE if draws_on else _successors(consumer)) for _ in range(count)]
        may_die = {crew.place for crew in crews} == {"process"} and chance.random() < 0.3
        deaths = {
            chance.randrange(size.length): chance.choice([*DEATHS]) for _ in range(may_die * chance.randint(1, 3))
        }
        face = chance.choice(["for", "async for"])
        return cls(
            *(seed, size, sampling, generator, kind, how, seeding, tuple(crews), tuple(cuts), consumer, face, deaths)
        )

    @classmethod
    def _draw_stream(cls, seed: int, chance: random.Random, size: Size, place: str | None, count: int) -> Plan:
        """Draw a run over a stream: each worker reads its share, so their number stays."""
        place = place or chance.choice(PLACES)
        persistent = place != "here" and chance.random() < 0.5
        # The generators of persistent workers have come through earlier epochs: the log says that they begin anew.
        is_seeded_anew = place == "process" and not persistent
        how = chance.choice(["global", "sample_rng"]) if is_seeded_anew else "sample_rng"
        crew = Crew.draw(chance, place, "worker", persistent=persistent)
        cuts = tuple(Cut.draw(chance, _successors("nothing")) for _ in range(count))
        generator = chance.choice(["nobody's", "the loader's"])
        face = chance.choice(["for", "async for"])
        in_order = BY_NAME["in order"]
        return cls(seed, size, in_order, generator, "stream", how, "worker", (crew,), cuts, "nothing", face, {})

    def check(self) -> list[str]:
        """Play the run; return its cuts and its sampler.

        Raises:
            AssertionError: if the order is not torch's, or batches differ from those of a loader without cuts, or
                anything is left behind.
        """
        torchs = Trainer(self, torch.utils.data.DataLoader).train()
        with tempfile.TemporaryDirectory(prefix="chaos-") as name, nothing_left():
            undisturbed = dataclasses.replace(self, deaths={})
            whole = Trainer(undisturbed, DataLoader, folder=Path(name)).train()
            order = [[(indices, after) for indices, _, after in epoch] for epoch in whole]
            expected = [[(indices, after) for indices, _, after in epoch] for epoch in torchs]
            assert order == expected, "without a cut, not as torch: " + difference(order, expected)
            at = {_moment(cut, [len(epoch) for epoch in whole]): cut for cut in self.cuts}
            trainer = Trainer(self, DataLoader, at, Path(name))
            seen = trainer.train()
            if any(cut.who.endswith("elsewhere") for cut in self.cuts):
                seen, whole = _batches_alone(seen), _batches_alone(whole)
            assert seen == whole, "after a cut: " + difference(seen, whole)
        return [
            *(f"{cut.where}: {cut.who}" for cut in at.values()),
            f"sampler: {self.sampling.name}" if self.kind != "stream" else "a stream",
            *{f"place: {crew.place}" for crew in self.crews},
            f"samples draw: {self.how}",
            f"consumer: {self.consumer}",
        ]


def _places(chance: random.Random, place: str | None, count: int, how: str, sampling: Sampling) -> list[str]:
    """Draw where the workers of each loader are, such that the order and the random numbers can be the same."""
    first = place or chance.choice(PLACES)
    if how in ("global", "in a block"):  # threads share the generators, with each other or with the trainer
        return ["process"] * count
    if place:
        return [place] * count
    others = PLACES if not sampling.draws_in_iter else tuple(p for p in PLACES if (p == "here") == (first == "here"))
    return [first, *(chance.choice(others) for _ in range(count - 1))]


def _consumers(sampling: Sampling, generator: str) -> list[str]:
    """Return what the consumer may do without changing the order itself."""
    if sampling.disturbs_others(generator in ("the sampler's", "both")):
        return ["nothing"]
    return ["nothing", "another loader", "draws"]


_ELSEWHERE = ["a new loader, generators elsewhere"]
"""Who may go on with a sampler that draws from a global generator while it is read: where that is not put back."""


def _successors(consumer: str) -> list[str]:
    """Return who may go on with a state, such that the rest can be the same."""
    restored, elsewhere = "a new loader, generators restored", "a new loader, generators elsewhere"
    return ["the same loader", restored, *[elsewhere] * (consumer == "nothing")]


def _moment(cut: Cut, counts: list[int]) -> tuple[int, str | int]:
    if cut.where != "inside":
        return cut.epoch, cut.where
    return cut.epoch, max(1, math.ceil(cut.share * counts[cut.epoch]))


def _batches_alone(epochs: list[list[Any]]) -> list[list[Any]]:
    return [[(indices, values) for indices, values, _ in epoch] for epoch in epochs]


class Trainer:
    """Trains for all epochs of a run, and is cut.

    Args:
        plan: The run.
        library: Whose class of loaders it takes: torch's, which knows nothing of states, or ours.
        cuts: By epoch and moment.
        folder: Of the dataset and of states.
    """

    def __init__(
        self,
        plan: Plan,
        library: type[torch.utils.data.DataLoader[Any]],
        cuts: dict[tuple[int, str | int], Cut] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._plan = plan
        self._library = library
        self._cuts = dict(cuts or {})
        self._folder = folder
        self._crews = iter(plan.crews)
        self._runner = asyncio.Runner()
        self._iterator: Any = None
        self._epochs: list[list[Any]] = []
        self._tells = True

    def train(self) -> list[list[Any]]:
        """Return for each epoch its batches: indices, what samples drew, and what the consumer drew afterwards."""
        generators.seed_all(self._plan.seed)
        self._make_loader(self._plan.seed)
        with self._runner:
            try:
                for epoch in range(EPOCHS):
                    self._train_epoch(epoch)
            finally:
                self._iterator = None
                self._close()
        return self._epochs

    def _train_epoch(self, epoch: int) -> None:
        seen: list[Any] = []
        self._epochs.append(seen)
        self._tells = True
        self._cut_at(epoch, "before")
        self._begin(epoch)
        if self._cut_at(epoch, "begun"):
            self._begin(epoch)
        while (batch := self._take()) is not None:
            seen.append((*batch, self._compute(len(seen))))
            if self._cut_at(epoch, len(seen)):
                self._begin(epoch)
        self._iterator = None
        self._cut_at(epoch, "over")

    def _begin(self, epoch: int) -> None:
        if self._tells and self._plan.sampling.has_epochs:
            sampler = self._loader.batch_sampler if "batch_sampler" in self._sampled else self._loader.sampler
            sampler.set_epoch(epoch)
        self._iterator = iter(self._loader) if self._plan.face == "for" or self._is_torch else aiter(self._loader)

    def _take(self) -> tuple[Any, Any] | None:
        try:
            if self._plan.face == "for" or self._is_torch:
                batch = next(self._iterator)
            else:
                batch = self._runner.run(_next(self._iterator))
        except (StopIteration, _Over):
            return None
        return (batch.tolist(), None) if self._is_torch else (batch[0].tolist(), batch[1].tolist())

    def _compute(self, count: int) -> Any:
        if self._plan.consumer == "draws":
            return generators.draw_from_all()
        if self._plan.consumer == "another loader" and count % 3 == 0:
            return [batch.tolist() for batch in self._library(range(8), 2, shuffle=True)]
        return None

    def _cut_at(self, epoch: int, moment: str | int) -> bool:
        """Take the state and go on from it, if the run is cut here."""
        cut = self._cuts.pop((epoch, moment), None)
        if cut is None:
            return False
        self._tells = cut.tells or moment in ("before", "over")
        for _ in range(cut.times):
            if cut.is_in_place:
                state = self._save(cut)
                self._iterator = None
                self._load(state)
            else:
                self._replace(cut)
        return True

    def _replace(self, cut: Cut) -> None:
        state = self._save(cut)
        self._iterator = None
        if cut.closes:
            self._close()
        saved = generators.save(self._generator)
        restores = cut.who.endswith("restored")
        generators.seed_all(self._plan.seed + 99)
        self._make_loader(self._plan.seed + 99)
        if restores and cut.early:
            generators.restore(saved, self._generator)
        self._load(state)
        if restores and not cut.early:
            generators.restore(saved, self._generator)

    def _save(self, cut: Cut) -> Any:
        if cut.via == "file":
            assert self._folder is not None
            path = self._folder / "state"
            torch.save(self._loader.state_dict(), path)
            return path
        state = self._loader.state_dict()
        return json.loads(json.dumps(state)) if cut.via == "json" else state

    def _load(self, state: Any) -> None:
        if isinstance(state, Path):
            self._loader.load_state_dict(torch.load(state, weights_only=True))
        else:
            self._loader.load_state_dict(state)

    @property
    def _is_torch(self) -> bool:
        return self._library is not DataLoader

    def _make_loader(self, seed: int) -> None:
        plan = self._plan
        crew = next(self._crews, plan.crews[-1])
        self._generator = None if plan.generator == "nobody's" else torch.Generator().manual_seed(seed)
        of_loader = self._generator if plan.generator in ("the loader's", "both") else None
        of_sampler = self._generator if plan.generator in ("the sampler's", "both") else None
        self._sampled = plan.sampling.make(plan.size, of_sampler)
        if self._is_torch:
            self._loader = self._make_torchs(crew, of_loader)
            return
        kind = AsyncDrawing if plan.kind == "async" else Drawing
        dataset: Any = kind(plan.size.length, plan.how, plan.deaths, self._folder or Path())
        if plan.kind == "stream":
            dataset = DrawingStream(dataset)
        retries = {"max_retries": 20}
        self._loader = DataLoader(
            dataset, **self._sampled, **crew.options, generator=of_loader, seeding=plan.seeding, **retries
        )

    def _make_torchs(self, crew: Crew, generator: torch.Generator | None) -> Any:
        workers: dict[str, Any] = {}
        dataset: Any = range(self._plan.size.length)
        if crew.place != "here":
            workers = {"num_workers": 1, "persistent_workers": crew.options.get("persistent_workers", False)}
        if self._plan.kind == "stream":
            dataset = DrawingStream(Drawing(self._plan.size.length, "nothing", {}, Path()))
            workers |= {"num_workers": crew.options.get("num_workers", 0), "collate_fn": _indices}
        return self._library(dataset, **self._sampled, **workers, generator=generator)

    def _close(self) -> None:
        if isinstance(self._loader, DataLoader):
            self._loader.close()
        self._loader = None


def _indices(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([index for index, _ in samples])


class _Over(Exception):
    """The end of an epoch, out of a coroutine."""


async def _next(iterator: Any) -> Any:
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        raise _Over from None
