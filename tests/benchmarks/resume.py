"""resume: what the state of a loader costs, and going on in the middle of an epoch of 32,000,000 samples.

Measured, each beside torchdata's StatefulDataLoader where it does the same:

- an epoch of small batches with `state_dict()` after every batch: how long a call takes;
- from `load_state_dict` to the first batch in the middle of an epoch of 32,000,000 samples, batches of 32, shuffled by
  torch's RandomSampler, beside what drawing that order and skipping to the middle costs by itself; and with
  ElasticSampler;
- the memory that an ElasticSampler over 10 billion indices takes, and how long it takes to go on in the middle of them.

With --quick the large epoch has 2,000,000 samples, and each side has fewer rounds.

Targets: less than 20 us a batch; at most 1.1 times drawing and skipping; less than 10 ms with ElasticSampler, and less
than 1 MB.

What profiling found: of the 6 to 10 us of a state, 2 are for looking whether the random generators are still where the
loader has left them, and the rest is for the dictionary. Writing down what the generators were takes 10 us, once an
epoch. A pair of an old and a new commit found that each state froze the settings of the loader anew: that took as long
as the rest, and is done only for a state before the first run now.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from asyncloader.samplers import ElasticSampler
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, states_after_each

BATCH = 32


class Numbers:
    """A dataset that is its indices, and counts how many were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def stateful(bench: Bench) -> dict[str, Any]:
    """Return the loaders that have a state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

    return {"torchdata": StatefulDataLoader, "ours": StatefulDataLoader if bench.null else bench.loaders["ours"]}


def added(make: Callable[..., Any], num_workers: int, batches: int) -> Run:
    """Take the state after every batch of an epoch; return the microseconds that a call takes."""
    loader = make(Numbers(batches * BATCH), batch_size=BATCH, shuffle=True, num_workers=num_workers)
    whole, in_calls = states_after_each(loader)
    return Run(in_calls / batches * 1e6, {"us/batch beside": (whole - in_calls) / batches * 1e6})


def resume(make: Callable[..., Any], length: int, elastic: bool) -> Run:
    """Go on in the middle of an epoch; return the seconds to its first batch there."""

    def loader() -> Any:
        dataset = Numbers(length)
        sampler = ElasticSampler(dataset) if elastic else RandomSampler(dataset)
        return make(dataset, batch_size=BATCH, sampler=sampler)

    state = state_in_the_middle(loader(), length)
    other = loader()
    began = time.perf_counter()
    other.load_state_dict(state)
    iterator = iter(other)  # kept: to let go of 32,000,000 numbers takes a second
    next(iterator)
    return Run(time.perf_counter() - began, {"samples read": float(other.dataset.read)})


def state_in_the_middle(loader: Any, length: int) -> dict[str, Any]:
    """Return the state of an epoch half of which was yielded, without taking that long."""
    iterator = iter(loader)
    next(iterator)
    state = dict(loader.state_dict())
    half = length // BATCH // 2
    if "position" in state:
        state["position"] = half
        if state["samplers"] is not None:
            state["samplers"] = state["samplers"].replace(f'"cursor": {BATCH}', f'"cursor": {half * BATCH}')
    else:
        state["_sampler_iter_yielded"] = state["_num_yielded"] = half
        state["_sampler_iter_state"]["samples_yielded"] = half * BATCH
    return state


def draw_and_skip(length: int) -> Run:
    """Do by hand what a loader has to do: draw the order, skip the half of it, make a batch."""
    dataset = Numbers(length)
    next(iter(RandomSampler(dataset)))  # as the others have done: memory is warm
    began = time.perf_counter()
    indices = iter(RandomSampler(dataset))
    deque(islice(indices, length // BATCH // 2 * BATCH), maxlen=0)
    batch = next(iter(BatchSampler(indices, BATCH, False)))
    torch.utils.data.default_collate([dataset[index] for index in batch])
    return Run(time.perf_counter() - began, {"samples read": float(dataset.read)})


def ten_billion() -> tuple[float, float]:
    """Return the bytes that a sampler over 10 billion indices takes, and the milliseconds of going on in the middle."""
    tracemalloc.start()
    deque(islice(ElasticSampler(10_000_000_000), 10_000), maxlen=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    state = {**ElasticSampler(10_000_000_000).state_dict(), "cursor": 5_000_000_001}
    times = []
    for _ in range(20):
        sampler = ElasticSampler(10_000_000_000)
        began = time.perf_counter()
        sampler.load_state_dict(state)
        next(iter(sampler))
        times.append(time.perf_counter() - began)
    return float(peak), statistics.median(times) * 1e3


def measure(bench: Bench) -> None:
    rounds = 3 if bench.quick else 7
    for num_workers in (0, 2):
        batches = 1000 if bench.quick else 5000
        sides = {name: partial(added, make, num_workers, batches) for name, make in stateful(bench).items()}
        title = f"state_dict() after every batch, {num_workers} workers: added"
        runs = bench.compare(title, "us", sides, rounds=rounds)
        cost = statistics.median(run.value for run in runs["ours"])
        bench.check(f"{title}, us", cost, Target("<", 20))

    length = 2_000_000 if bench.quick else 32_000_000
    make = stateful(bench)
    by_hand = {
        "drawing and skipping": partial(draw_and_skip, length),
        "ours": partial(resume, make["ours"], length, False),
        "torchdata": partial(resume, make["torchdata"], length, False),
        "ours, elastic": partial(resume, make["ours"], length, True),
    }
    title = f"going on in the middle of {length:,} samples"
    runs = bench.compare(title, "s", by_hand, rounds=3, targets={"ours": Target("<=", 1.1)})
    elastic = statistics.median(run.value for run in runs["ours, elastic"])
    bench.check("going on with ElasticSampler, ms", elastic * 1e3, Target("<", 10))
    peak, seek = ten_billion()
    bench.check("ElasticSampler over 10,000,000,000 indices, MB", peak / 1e6, Target("<", 1))
    bench.check("going on in the middle of them, ms", seek, Target("<", 10))


if __name__ == "__main__":
    main(__doc__ or "", measure)
