"""packing: documents of two sources, mixed and packed into blocks of 8,192 tokens: fill, blocks a second, resuming.

Documents have log-normal lengths, 500 tokens on average (sigma 1), and lie in memory. Every side makes batches of 8
blocks in this process, without workers: token ids, labels or segments, positions.

- ours: `MixtureSampler` inside `PackingBatchSampler`, `pack_collate`;
- Grain: `MapDataset.mix` of shuffled sources, `BestFitPackIterDataset` with 64 bins, `batch(8)`; or first-fit;
- torch: a shuffled loader, no mixture, whose collate function lays the documents of a batch one behind the other: as
  many as fill 8 blocks on average.

And of `PackingBatchSampler` and `LengthBatchSampler` over 10,000,000 lengths: the first batch, going on in the middle
of the epoch, memory beside the lengths, blocks a second of the sampler alone; with --quick over 1,000,000.

Targets: fill >= 97 %; first batch <= 0.3 s, resuming <= 50 ms, memory <= 3 times that of the lengths, theirs included;
>= 2,000 blocks/s.

Found on two cores at 2.5 GHz, with Grain 0.2.18 (medians of 3 rounds):

                              blocks/s    fill    resume
    torch, packing collate       5,760   87.7 %   212 ms     reads again what was yielded: grows with the epoch
    Grain, first-fit               366   99.7 %   199 ms
    Grain, best-fit                322   99.7 %   208 ms
    ours                         4,714   99.9 %    23 ms

torch's loader is faster, since it plans nothing. Counted in tokens, without what blocks leave empty, ours is at 0.93 of
it.

Over 10,000,000 lengths: packing 24 ms to the first batch, 17 ms to go on in the middle, 1.03 times the lengths' memory,
26,700 blocks/s; by length 13 ms, 6 ms, 1.03 times, 203,000 blocks/s.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader

from asyncloader import DataLoader
from asyncloader.samplers import LengthBatchSampler, MixtureSampler, PackingBatchSampler, pack_collate
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run

BLOCK = 8192
BLOCKS = 8
MEAN = 500
SOURCES = (150_000, 50_000)
WEIGHTS = (0.7, 0.3)


def log_normal(count: int) -> Any:
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - 0.5, 1.0, count)
    return drawn.astype(np.int32).clip(1, BLOCK)


class Documents:
    """Rows of tokens, all of them cut of one array."""

    def __init__(self, lengths: Any, begins: int = 0) -> None:
        self.lengths = lengths
        self.tokens = np.arange(1, 1_000_000, dtype=np.int32)
        self.starts = (np.arange(begins, begins + len(lengths)) * 97) % 900_000

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]]


def pack_as_they_come(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pack a batch as collate functions do by themselves: the next block begins where a document does not fit."""
    return pack_collate(samples, block_size=BLOCK)


def ours(dataset: Documents, skip: Any = None) -> tuple[Any, Iterator[Any]]:
    sampler = PackingBatchSampler(
        dataset.lengths, block_size=BLOCK, batch_size=BLOCKS, sampler=MixtureSampler(SOURCES, WEIGHTS)
    )
    collate = partial(pack_collate, block_size=BLOCK, batch_size=BLOCKS)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    if skip is not None:
        loader.load_state_dict(skip)
    return loader, iter(loader)


def torchs(dataset: Documents, skip: Any = None) -> tuple[Any, Iterator[Any]]:
    torch.manual_seed(0)
    documents = BLOCK * BLOCKS // MEAN
    loader = TorchLoader(dataset, documents, shuffle=True, collate_fn=pack_as_they_come)  # type: ignore[arg-type, var-annotated]
    iterator = iter(loader)
    for _ in range(skip or 0):  # it has no state: what was yielded is read again
        next(iterator)
    return loader, iterator


def grains(name: str, dataset: Documents, skip: Any = None) -> tuple[Any, Iterator[Any]]:
    import grain
    from grain import experimental

    first = SOURCES[0]
    parts = (Documents(dataset.lengths[:first]), Documents(dataset.lengths[first:], first))
    sources = [grain.MapDataset.source(part).seed(0).shuffle().repeat() for part in parts]
    mixed = grain.MapDataset.mix(sources, WEIGHTS).map(_named).to_iter_dataset(grain.ReadOptions(num_threads=0))
    packed = getattr(experimental, name)(mixed, length_struct={"input_ids": BLOCK}, num_packing_bins=64)
    iterator = iter(packed.batch(BLOCKS))
    if skip is not None:
        iterator.set_state(skip)
    return iterator, iterator


def _named(tokens: Any) -> dict[str, Any]:
    return {"input_ids": tokens}


def state_of(held: Any, batches: int) -> Any:
    if hasattr(held, "state_dict"):
        return held.state_dict()
    return held.get_state() if hasattr(held, "get_state") else batches


def one_run(make: Callable[..., tuple[Any, Iterator[Any]]], dataset: Documents, batches: int) -> Run:
    """Return blocks a second of an epoch's beginning, how full they are, and how long going on from its end takes."""
    held, iterator = make(dataset)
    next(iterator)
    tokens = blocks = 0
    began = time.perf_counter()
    for batch in islice(iterator, batches):
        ids = batch["input_ids"]
        ids = ids[0] if isinstance(ids, tuple) else ids
        blocks += len(ids)
        tokens += int((np.asarray(ids) != 0).sum())
    took = time.perf_counter() - began
    state = state_of(held, batches + 1)
    began = time.perf_counter()
    _, resumed = make(dataset, state)
    next(resumed)
    extras = {"fill %": 100 * tokens / (blocks * BLOCK), "resume ms": (time.perf_counter() - began) * 1e3}
    return Run(blocks / took, extras)


def samplers(bench: Bench) -> None:
    """Measure the samplers alone, over many lengths."""
    count = 1_000_000 if bench.quick else 10_000_000
    lengths = log_normal(count)
    makes: dict[str, Callable[[], Any]] = {
        "packing": lambda: PackingBatchSampler(lengths, block_size=BLOCK, batch_size=BLOCKS),
        "by length": lambda: LengthBatchSampler(lengths, max_tokens=BLOCKS * BLOCK),
    }
    for name, make in makes.items():
        firsts, resumes, rates = [], [], []
        for _ in range(5):
            began = time.perf_counter()
            sampler = make()
            iterator = iter(sampler)
            next(iterator)
            firsts.append(time.perf_counter() - began)
            state = json.loads(json.dumps(sampler.state_dict()))
            state["cursor"] = {"window": count // sampler.window // 2, "unit": 11}
            began = time.perf_counter()
            sampler.load_state_dict(state)
            resumed = iter(sampler)
            next(resumed)
            resumes.append(time.perf_counter() - began)
            began = time.perf_counter()
            batches = sum(1 for _ in islice(resumed, 500))
            rates.append(batches * BLOCKS / (time.perf_counter() - began))
        tracemalloc.start()
        next(iter(make()))
        peak = tracemalloc.get_traced_memory()[1] + lengths.nbytes
        tracemalloc.stop()
        title = f"{name}, {count:,} lengths"
        bench.check(f"{title}: first batch, s", statistics.median(firsts), Target("<=", 0.3))
        bench.check(f"{title}: going on in the middle, ms", statistics.median(resumes) * 1e3, Target("<=", 50))
        bench.check(f"{title}: memory, times that of the lengths", peak / lengths.nbytes, Target("<=", 3))
        bench.check(f"{title}: blocks of {BLOCK} tokens a second", statistics.median(rates), Target(">=", 2000))


def measure(bench: Bench) -> None:
    dataset = Documents(log_normal(sum(SOURCES)))
    batches = 40 if bench.quick else 150
    sides: dict[str, Callable[..., tuple[Any, Iterator[Any]]]] = {
        "torch, packing collate": torchs,
        "Grain, first-fit": partial(grains, "FirstFitPackIterDataset"),
        "Grain, best-fit": partial(grains, "BestFitPackIterDataset"),
        "ours": ours,
    }
    runs = bench.compare(
        f"blocks of {BLOCK} tokens, {batches} batches of {BLOCKS}",
        "blocks/s",
        {name: partial(one_run, make, dataset, batches) for name, make in sides.items()},
        rounds=2 if bench.quick else 3,
    )
    bench.check("fill of ours, %", runs["ours"][0].extras["fill %"], Target(">=", 97))
    samplers(bench)


if __name__ == "__main__":
    main(__doc__ or "", measure)
