"""stateful: asyncloader.stateful.StatefulDataLoader beside torchdata's, in one run.

- `state_dict()` after every batch: the microseconds of a batch with it, and of the call by itself, without workers and
  with two, for a map-style dataset that is shuffled, a stream whose iterators have a state, and one whose state is a
  thousand numbers;
- from `load_state_dict` to the next batch after 10,000 batches: of a map-style dataset, of a stream whose iterators
  have a state, and of a stream that has none and is read again. Ours goes on from its own state, and from torchdata's.

With --quick there are fewer batches, and resumes after 1,000.

Targets: with workers, batches with states take at most as long as torchdata's, and resumes at most 1.1 times as long.
Without workers a state of ours costs more: it has the generators as well.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.stateful import StatefulDataLoader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, states_after_each

BATCH = 8


class Numbers:
    """A map-style dataset of its indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers, divided among workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def share(self) -> range:
        info = get_worker_info()
        return range(self.length) if info is None else range(info.id, self.length, info.num_workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.share())


class Reader:
    """An iterator with a state, beside its place some numbers that stay."""

    def __init__(self, numbers: range, more: int) -> None:
        self.numbers, self.at, self.more = numbers, 0, list(range(more))

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": dict.fromkeys(map(str, self.more), self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulStream(Stream):
    """Its iterators say where they are."""

    def __init__(self, length: int, more: int = 0) -> None:
        super().__init__(length)
        self.more = more

    def __iter__(self) -> Any:
        return Reader(self.share(), self.more)


DATASETS: dict[str, Callable[[int], Any]] = {
    "map, shuffled": Numbers,
    "stream with a state": StatefulStream,
    "stream with a state of 1,000 numbers": partial(StatefulStream, more=1000),
    "stream without a state": Stream,
}


def make(loader_class: Any, kind: str, batches: int, num_workers: int) -> Any:
    options = {"shuffle": True} if kind.startswith("map") else {}
    return loader_class(DATASETS[kind](batches * BATCH), batch_size=BATCH, num_workers=num_workers, **options)


def cost_of_states(loader_class: Any, kind: str, batches: int, num_workers: int) -> Run:
    """Take the state after every batch; return the microseconds of a batch, those of the call among them."""
    whole, in_calls = states_after_each(make(loader_class, kind, batches, num_workers))
    return Run(whole / batches * 1e6, {"us/call": in_calls / batches * 1e6})


def resume(loader_class: Any, saved: dict[str, Any], kind: str, batches: int, num_workers: int) -> Run:
    """Go on from a state; return the seconds to the next batch."""
    loader = make(loader_class, kind, batches, num_workers)
    state = copy.deepcopy(saved)
    began = time.perf_counter()
    loader.load_state_dict(state)
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - began
    del iterator
    return Run(seconds, {})


def state_after(loader: Any, batches: int) -> dict[str, Any]:
    iterator = iter(loader)
    for _ in islice(iterator, batches):
        pass
    return copy.deepcopy(loader.state_dict())  # type: ignore[no-any-return]


def measure(bench: Bench) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader as Theirs

    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    classes = {"torchdata": Theirs, "ours": Theirs if bench.null else StatefulDataLoader}
    batches, until = (500, 1000) if bench.quick else (1000, 10_000)
    targets: dict[int, dict[str, Target]] = {0: {}, 2: {"ours": Target("<=", 1.0)}}
    resumes: dict[int, dict[str, Target]] = {0: {}, 2: {"ours": Target("<=", 1.1)}}
    for kind in [*DATASETS][:3]:
        for num_workers in (0, 2):
            sides = {name: partial(cost_of_states, one, kind, batches, num_workers) for name, one in classes.items()}
            title = f"{kind}, {num_workers} workers: a batch, with state_dict() after it"
            bench.compare(title, "us", sides, rounds=3, targets=targets[num_workers])
    for kind in (*[*DATASETS][:2], "stream without a state"):
        for num_workers in (0, 2):
            whole = until + 1000
            saved = {name: state_after(make(one, kind, whole, num_workers), until) for name, one in classes.items()}
            sides = {name: partial(resume, one, saved[name], kind, whole, num_workers) for name, one in classes.items()}
            theirs = saved["torchdata"]
            sides["ours, of torchdata's"] = partial(resume, classes["ours"], theirs, kind, whole, num_workers)
            title = f"{kind}, {num_workers} workers: from load_state_dict to the batch after {until:,}"
            bench.compare(title, "s", sides, rounds=3, targets=resumes[num_workers])


if __name__ == "__main__":
    main(__doc__ or "", measure)
