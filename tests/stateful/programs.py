"""Datasets and samplers of all kinds, for loaders of torchdata's and ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, Sampler, get_worker_info

LENGTH = 23
STREAM_LENGTHS = (5, 14, 9)
"""Samples of each worker's part of a stream: they end one after the other."""


class Map(torch.utils.data.Dataset[int]):
    """Without a state."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class CountingMap(Map):
    """Each sample says how many this copy of the dataset has given before."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return index + 1000 * self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[int]):
    """Without a state; divided among workers, in parts of different lengths."""

    def part(self) -> range:
        info = get_worker_info()
        if info is None:
            return range(sum(STREAM_LENGTHS))
        first = 100 * info.id
        return range(first, first + STREAM_LENGTHS[info.id])

    def __iter__(self) -> Iterator[int]:
        return iter(self.part())


class StatefulStream(Stream):
    """The dataset says where its iterator is, and begins anew after the end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        part = self.part()
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Reader:
    """An iterator with a state, in which there is a tensor."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.at = torch.tensor(0)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at = self.at + 1
        return self.numbers[int(self.at) - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StreamOfReaders(Stream):
    """Its iterators say where they are."""

    def __iter__(self) -> Any:
        return Reader(self.part())


class OwnIterator(Stream):
    """It is its own iterator, and counts its epochs."""

    def __init__(self) -> None:
        self.at = 0
        self.epoch = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        part = self.part()
        if self.at >= len(part):
            self.at = 0
            self.epoch += 1
            raise StopIteration
        self.at += 1
        return part[self.at - 1] + 1000 * self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class StatefulSampler(Sampler[int]):
    """Gives another order in each epoch, and says in which it is, and where."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < LENGTH:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class SamplerOfReaders(Sampler[int]):
    """Its iterators have states."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Any:
        return Reader(range(LENGTH)[::-1])


class CountedSampler(Sampler[int]):
    """Gives another order each time that it is iterated over."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter([(self.count + 5 * number) % LENGTH for number in range(LENGTH)])


class Batches(Sampler[list[int]]):
    """A batch sampler without a state."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for size in (1, 4, 2, 6, 3, 5):
            yield list(range(size))


class StatefulBatches(Batches):
    """A batch sampler with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        while self.at < len(batches):
            self.at += 1
            yield batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _shared() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {"batch_size": 4, "sampler": RandomSampler(Map(), generator=generator), "generator": generator}


def _distributed() -> DistributedSampler[int]:
    return DistributedSampler(Map(), num_replicas=2, rank=1, seed=7)


SAMPLERS: dict[str, Any] = {
    "sequential": lambda: {"batch_size": 4},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
    },
    "shuffled, no batches": lambda: {"batch_size": None, "shuffle": True},
    "torch's, seeded": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(Map(), generator=torch.Generator().manual_seed(7)),
    },
    "torch's, with the loader's generator": _shared,
    "distributed": lambda: {"batch_size": 4, "sampler": _distributed()},
    "own, with a state": lambda: {"batch_size": 4, "sampler": StatefulSampler()},
    "own, with a state, no batches": lambda: {"batch_size": None, "sampler": StatefulSampler()},
    "own, with iterators with a state": lambda: {"batch_size": 4, "sampler": SamplerOfReaders()},
    "counted": lambda: {"batch_size": 4, "sampler": CountedSampler()},
    "of batches": lambda: {"batch_sampler": Batches()},
    "of batches, with a state": lambda: {"batch_sampler": StatefulBatches()},
}
MAPS: dict[str, Any] = {"map": Map, "map with a state": CountingMap}
STREAMS: dict[str, Any] = {
    "stream": Stream,
    "stream with a state": StatefulStream,
    "iterator with a state": StreamOfReaders,
    "its own iterator": OwnIterator,
}
WORKERS = (0, 1, 3)
EVERY = (1, 4)
EVERYTHING = [
    (dataset, sampler, num_workers, every, persistent)
    for dataset in (*MAPS, *STREAMS)
    for sampler in (sorted(SAMPLERS.keys() - {"counted"}) if dataset in MAPS else ("sequential", "no batches"))
    for num_workers in WORKERS
    for every in (EVERY if num_workers else (1,))
    for persistent in ((False, True) if num_workers and every == 1 else (False,))
]
"""Programs: a dataset, a sampler, how many workers, how often a state is taken, whether the workers persist."""


def make(loader_class: Any, program: tuple[str, str, int, int, bool], num_workers: int | None = None) -> Any:
    """Make a loader of a class for a program, perhaps with another number of workers."""
    dataset, sampler, number, every, persistent = program
    number = number if num_workers is None else num_workers
    torch.manual_seed(3)
    options = {"batch_size": None} if sampler == "no batches" else SAMPLERS[sampler]()
    made = (MAPS | STREAMS)[dataset]()
    persistent = persistent and number > 0
    return loader_class(
        made, num_workers=number, snapshot_every_n_steps=every, persistent_workers=persistent, **options
    )


def plain(batches: Any) -> list[Any]:
    """Read batches as plain numbers."""
    return [batch.tolist() if torch.is_tensor(batch) else batch for batch in batches]
