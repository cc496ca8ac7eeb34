"""States of one configuration that another configuration loads.

What has to hold: the loader goes on with exactly what the first one had left, or the state is refused with a
StateMismatchError. Samples of another order, lost or doubled, would train on in silence.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from asyncloader import DataLoader, StateMismatchError
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from tests.faults.chaos.chaotic import Drawing
from tests.faults.chaos.left import nothing_left
from tests.faults.chaos.sampling import unpacked
from tests.support import generators


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What decides which samples come, and in which order.

    Attributes:
        kind: Of the sampler or of the stream: a key of KINDS.
        length: Of the dataset.
        batch_size: Of the loader, or of the batch sampler.
        drop_last: The last batch is dropped if it is short.
        seed: Of the sampler or of the stream.
        seeding: Of the loader.
        ranks: How many ranks share the data.
        rank: Whose share it is.
        changed: How many weights or lengths differ from those of other configurations.
        window: Of samplers that look at so many samples at a time.
        inner: Of a batch sampler by length, the kind of the sampler in it: "", "ElasticSampler" or "WeightedSampler".
        num_workers: May differ.
    """

    kind: str
    length: int
    batch_size: int
    drop_last: bool
    seed: int
    seeding: str
    ranks: int
    rank: int
    changed: int
    window: int
    inner: str
    num_workers: int

    @classmethod
    def draw(cls, chance: random.Random) -> Configuration:
        """Draw a configuration."""
        ranks = chance.choice([1, 2, 4])
        return cls(
            kind=chance.choice([*KINDS, "LengthBatchSampler"]),
            length=chance.choice([300, 301, 600]),
            batch_size=chance.choice([5, 10, 20]),
            drop_last=chance.random() < 0.3,
            seed=chance.randrange(3),
            seeding=chance.choice(["batch", "batch", "sample"]),
            ranks=ranks,
            rank=chance.randrange(ranks),
            changed=0,
            window=chance.choice([20, 50]),
            inner=chance.choice(["", "ElasticSampler", "WeightedSampler"]),
            num_workers=chance.choice([0, 0, 0, 0, 1]),
        )

    def varied(self, chance: random.Random, name: str) -> Configuration:
        """Return the configuration with another value of one attribute."""
        if name == "changed":
            return dataclasses.replace(self, changed=chance.choice([1, 2, 40]))
        if name == "ranks":
            ranks = chance.choice([1, 2, 3, 8])
            return dataclasses.replace(self, ranks=ranks, rank=min(self.rank, ranks - 1))
        if name == "kind":
            others = OF_ELASTIC if self.is_elastic and chance.random() < 0.7 else OF_SAMPLERS
            return dataclasses.replace(self, kind=chance.choice(others))
        other = self.draw(chance)
        value = min(other.rank, self.ranks - 1) if name == "rank" else getattr(other, name)
        return dataclasses.replace(self, **{name: value})

    @property
    def is_elastic(self) -> bool:
        """Whether the state of one rank serves all, and any number of them."""
        return KINDS[self.kind].is_elastic

    def data(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of a loader over what it reads."""
        dataset = Drawing(self.length, "sample_rng", {}, folder)
        made = KINDS[self.kind].make(self)
        if self.kind.endswith("BatchSampler"):
            return {"dataset": dataset, "batch_sampler": made, "collate_fn": unpacked}
        own = {} if made is None else {"shuffle": True} if made is True else {"sampler": made}
        return {"dataset": dataset, "batch_size": self.batch_size, "drop_last": self.drop_last, **own}

    def make(self, folder: Path) -> DataLoader[Any]:
        """Make the loader of the configuration."""
        return DataLoader(**self.data(folder), seeding=self.seeding, num_workers=self.num_workers)

    def places(self) -> Any:
        """Return the places at which something differs: seldom the same two."""
        return np.random.default_rng(self.changed).choice(self.length, self.changed, replace=False)

    def lengths(self) -> Any:
        """Return how many tokens each sample has."""
        lengths = np.random.default_rng(0).integers(5, 30, self.length)
        lengths[self.places()] = 35 - lengths[self.places()]
        return lengths

    def weights(self) -> Any:
        """Return how likely each sample is."""
        weights = 1.0 + np.arange(self.length) % 5
        weights[self.places()] += 7.0
        return weights

    def divided(self) -> dict[str, Any]:
        """Return the arguments that our samplers share."""
        return {"num_replicas": self.ranks, "rank": self.rank, "seed": self.seed}

    def inner_sampler(self) -> Any:
        """Return the sampler in a batch sampler by length."""
        if not self.inner:
            return {"seed": self.seed, "num_replicas": self.ranks, "rank": self.rank}
        if self.inner == "ElasticSampler":
            inner: Any = ElasticSampler(self.length, seed=self.seed)
        else:
            inner = WeightedSampler(self.weights(), seed=self.seed)
        return {"sampler": inner, **self.divided()}


def _generator(configuration: Configuration) -> torch.Generator:
    return torch.Generator().manual_seed(configuration.seed)


class Kind(NamedTuple):
    """One kind of samplers or streams.

    Attributes:
        make: Makes a configuration's sampler.
        differs: The attributes of configurations that mean something to it.
        is_elastic: The state of one rank serves all, and any number of them.
    """

    make: Callable[[Configuration], Any]
    differs: tuple[str, ...]
    is_elastic: bool = False


_OF_ALL = ("kind", "length", "batch_size", "drop_last", "seeding")
_ELASTIC = (*_OF_ALL, "kind", "seed", "ranks")

KINDS = {
    "SequentialSampler": Kind(lambda c: None, _OF_ALL),
    "shuffle=True": Kind(lambda c: True, _OF_ALL),
    "RandomSampler": Kind(lambda c: RandomSampler(range(c.length), generator=_generator(c)), (*_OF_ALL, "seed")),
    "RandomSampler, replacement": Kind(
        lambda c: RandomSampler(range(c.length), replacement=True, generator=_generator(c)), (*_OF_ALL, "seed")
    ),
    "WeightedRandomSampler": Kind(
        lambda c: WeightedRandomSampler(c.weights().tolist(), c.length, generator=_generator(c)),
        (*_OF_ALL, "seed", "changed"),
    ),
    "DistributedSampler": Kind(
        lambda c: DistributedSampler(range(c.length), c.ranks, c.rank, seed=c.seed), (*_OF_ALL, "seed", "ranks", "rank")
    ),
    "ElasticSampler": Kind(lambda c: ElasticSampler(c.length, **c.divided()), _ELASTIC, is_elastic=True),
    "WeightedSampler": Kind(
        lambda c: WeightedSampler(c.weights(), **c.divided()), (*_ELASTIC, "changed"), is_elastic=True
    ),
    "MixtureSampler": Kind(
        lambda c: MixtureSampler(
            [100 + c.changed, c.length - 100 - c.changed], [2, 1 + (c.window == 50)], stop="first", **c.divided()
        ),
        (*_ELASTIC, "changed", "window"),
        is_elastic=True,
    ),
    "LengthBatchSampler": Kind(
        lambda c: LengthBatchSampler(c.lengths(), max_tokens=30 * c.batch_size, window=c.window, **c.inner_sampler()),
        (*_ELASTIC, "changed", "changed", "window", "inner", "inner"),
        is_elastic=True,
    ),
    "BalancedBatchSampler": Kind(
        lambda c: BalancedBatchSampler(c.lengths(), batch_size=c.batch_size, window=c.window, **c.inner_sampler()),
        (*_ELASTIC, "changed", "changed", "window", "inner", "inner"),
        is_elastic=True,
    ),
    "PackingBatchSampler": Kind(
        lambda c: PackingBatchSampler(
            c.lengths(), block_size=40, batch_size=c.batch_size, window=c.window, **c.inner_sampler()
        ),
        (*_ELASTIC, "changed", "changed", "window", "inner", "inner"),
        is_elastic=True,
    ),
}

OF_SAMPLERS = tuple(KINDS)
OF_ELASTIC = tuple(kind for kind in KINDS if KINDS[kind].is_elastic)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: two configurations, and when the state is taken.

    Attributes:
        seed: Of the run.
        saved: The configuration whose state is taken.
        loading: The one that loads the state.
        differing: The attributes that were drawn again.
        share: How much of the epoch has come; above 1 after its end.
        through: Whose state it is: "the loader"'s, or "the sampler"'s alone.
    """

    seed: int
    saved: Configuration
    loading: Configuration
    differing: tuple[str, ...]
    share: float
    through: str

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run; without workers where that is said."""
        chance = random.Random(f"{seed} mismatched")
        saved = Configuration.draw(chance)
        differing = tuple(chance.sample(KINDS[saved.kind].differs, chance.choice([0, 1, 1, 1, 2])))
        loading = saved
        for name in differing:
            loading = loading.varied(chance, name)
        loading = dataclasses.replace(loading, num_workers=chance.choice([0, 0, 0, 1, 2]))
        if place == "here":
            saved = dataclasses.replace(saved, num_workers=0)
            loading = dataclasses.replace(loading, num_workers=0)
        share = chance.choice([0.0, 1.0, 1.1, *(chance.random() for _ in range(5))])
        # A sampler alone does not know whether its end has been told.
        is_alone = saved.is_elastic and loading.is_elastic and share <= 1 and chance.random() < 0.4
        return cls(seed, saved, loading, differing, share, "the sampler" if is_alone else "the loader")

    def check(self) -> list[str]:
        """Play the run; return whether the state was taken or refused, and what differed.

        Raises:
            AssertionError: if it was taken, and other samples came than were left.
        """
        with tempfile.TemporaryDirectory(prefix="chaos-") as name, nothing_left():
            folder = Path(name)
            state, rest = self._save(self.saved, folder)
            if self.share > 1:  # a new epoch is that of any rank
                anew = dataclasses.replace(self.saved, rank=self.loading.rank, ranks=self.loading.ranks)
                _, rest = self._save(anew, folder)
            is_divided_anew = {"ranks", "rank", "batch_size"} & {*self._really_differing()}
            if self.saved.is_elastic and self.loading.is_elastic and is_divided_anew:
                refused = self._check_all_ranks(folder, state)
            else:
                refused = self._check_one(folder, state, rest)
        what = ", ".join(sorted({*self._really_differing()})) or "nothing"
        return [f"{'refused' if refused else 'taken'}: {what}", f"kind: {self.saved.kind}", f"of {self.through}"]

    def _really_differing(self) -> list[str]:
        fields = dataclasses.fields(Configuration)
        differ = [f.name for f in fields if getattr(self.saved, f.name) != getattr(self.loading, f.name)]
        return [name for name in differ if name != "num_workers"]

    def _make(self, configuration: Configuration, folder: Path) -> Any:
        loader = configuration.make(folder)
        if self.through == "the loader":
            return loader
        return loader.batch_sampler if loader.batch_size is None else loader.sampler

    def _save(self, configuration: Configuration, folder: Path) -> tuple[Any, list[Any]]:
        """Return a state of a configuration, and the batches that its next loop gives."""
        generators.seed_all(self.seed)
        loader = self._make(configuration, folder)
        epochs = [[digest(batch) for batch in loader]]
        generators.seed_all(self.seed)
        loader = self._make(configuration, folder)
        iterator = iter(loader)
        count = int(min(self.share, 1.0) * len(epochs[0]))
        for _ in range(count):
            next(iterator)
        if self.share > 1:
            assert next(iterator, None) is None
            return loader.state_dict(), [digest(batch) for batch in loader]
        return loader.state_dict(), epochs[0][count:]

    def _load(self, folder: Path, state: Any, rank: int | None = None) -> list[Any] | None:
        """Return the batches of the loader that takes the state; None if it refuses it."""
        generators.seed_all(self.seed + 1)
        configuration = self.loading if rank is None else dataclasses.replace(self.loading, rank=rank)
        loader = self._make(configuration, folder)
        try:
            loader.load_state_dict(json.loads(json.dumps(state)))
            return [digest(batch) for batch in loader]
        except StateMismatchError:
            return None
        finally:
            if isinstance(loader, DataLoader):
                loader.close()

    def _check_one(self, folder: Path, state: Any, rest: list[Any]) -> bool:
        """See that the loader goes on with the rest; return whether it refuses the state."""
        seen = self._load(folder, state)
        assert seen is not None or self._really_differing(), "refused, though nothing differs"
        assert seen is None or seen == rest, (
            f"other batches: {seen[:3]}..., not {rest[:3]}... ({len(seen)}, {len(rest)})"
        )
        return seen is None

    def _check_all_ranks(self, folder: Path, state: Any) -> bool:
        """See that all ranks together go on with what all ranks had left; return whether they refuse the state."""
        alike = dataclasses.replace(self, loading=self.saved)
        rest: collections.Counter[Any] = collections.Counter()
        for rank in range(self.saved.ranks):
            rest.update(alike._samples(alike._load(folder, state, rank)))
        seen: collections.Counter[Any] = collections.Counter()
        for rank in range(self.loading.ranks):
            batches = self._load(folder, state, rank)
            if batches is None:
                assert self._really_differing(), "refused, though nothing differs"
                return True
            seen.update(self._samples(batches))
        lost, doubled = rest - seen, seen - rest
        filled_up = {"ranks", "batch_size", "drop_last"} & {*self._really_differing()}
        spare = self.loading.ranks * self.loading.batch_size + self.saved.ranks * self.saved.batch_size
        if not filled_up:
            assert not lost, f"lost: {sorted(lost.elements())[:9]}..., {lost.total()} of {rest.total()}"
            assert not doubled, f"twice: {sorted(doubled.elements())[:9]}..., {doubled.total()} of {rest.total()}"
        else:  # what fills up the end of an epoch, or is dropped there, is a matter of ranks and batch sizes
            assert lost.total() <= spare, f"lost: {lost.total()} of {rest.total()}"
            assert doubled.total() <= spare, f"twice: {doubled.total()} of {rest.total()}"
        return False

    def _samples(self, batches: list[Any] | None) -> list[int]:
        assert batches is not None, "refused, though nothing differs"
        return [index for indices, _ in batches for index in indices]


def digest(batch: Any) -> tuple[list[int], list[float]]:
    """Return what is compared of a batch of a loader, or of what a sampler yields."""
    if isinstance(batch, int):
        return [batch], []
    if isinstance(batch[0], int):
        return batch, []
    return batch[0].tolist(), batch[1].tolist()
