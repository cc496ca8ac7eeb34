"""transport_memory: what the consumer keeps is what stays in memory.

Measured, every run in a fresh process of its own, with 2 workers, torch's DataLoader and ours taking turns; memory
is that of the process tree:
- "labels": 200 batches of 64 images (38.5 MB), of which `kept.append(labels)` keeps the labels alone;
- "everything": every batch is kept, 1.5 GB of them;
- "soak": 5,000 batches (with --quick 800) of random sizes from 2 kB to 16 MB in two buffers, held for up to 128
  batches, some as a whole, some as a slice of a tensor, some as a numpy view; checksums taken in the worker are
  compared when a batch comes and again when it is let go. What the program needs is what it holds, the window (4
  batches of the largest size) and what the dataset itself has in hands while it makes a sample (2 copies in each
  worker).

Targets: keeping labels takes no more memory than with torch, to within one batch, neither at the end (last 10
batches, beyond what there was before the loader) nor in growth (last 10 batches against batches 10 to 20); in the
soak, memory beyond the start (first batch taken, nothing held) is at most what the program needs; every value is
right.

Not profiled yet.
"""

from __future__ import annotations

import gc
import statistics
import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main, number
from tests.benchmarks.measure import Memory, settle
from tests.benchmarks.transport import read_pages

MB = 1e6
IMAGE_BATCH_MB = 64 * 3 * 224 * 224 * 4 / MB
SMALLEST, LARGEST = 1 << 10, 8 << 20  # bytes of each of the two buffers of a soaking batch
WORKERS = 2
WINDOW = 2 * WORKERS


# ---- keeping ----


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """One image, and the index as its label."""

    def __init__(self, batches: int) -> None:
        self.image = torch.ones(3, 224, 224)
        self.length = batches * 64

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index


def labels(bench: Bench, name: str) -> dict[str, float]:
    """Keep the labels of all batches."""
    batches = 60 if bench.quick else 200
    kept, early, late = [], 0, 0
    memory = Memory()
    before = memory.bytes()
    for turn, (images, label) in enumerate(bench.loaders[name](LabelledImages(batches), 64, num_workers=WORKERS)):
        read_pages(images)
        kept.append(label)
        if 10 <= turn < 20:
            early = max(early, memory.bytes())
        if turn >= batches - 10:
            late = max(late, memory.bytes())
    del images
    if not torch.equal(torch.cat(kept), torch.arange(batches * 64)):
        raise RuntimeError("labels are wrong")
    settle()
    return _megabytes(
        before=before, by_20=early, at_end=late, growth=late - early, taken=late - before, loader_gone=memory.bytes()
    )


def everything(bench: Bench, name: str) -> dict[str, float]:
    """Keep all batches."""
    batches = 12 if bench.quick else 40
    memory = Memory()
    before = memory.bytes()
    kept = list(bench.loaders[name](LabelledImages(batches), 64, num_workers=WORKERS))
    settle()
    after = memory.bytes()
    for images, _ in kept:
        if float(images.min()) != 1 or float(images.max()) != 1:
            raise RuntimeError("values are wrong")
    held = sum(images.nbytes for images, _ in kept)
    return _megabytes(before=before, held=held, loader_gone=after, beyond_held=after - before - held)


# ---- soaking ----


class RandomSizes(Dataset[dict[str, Any]]):
    """Samples of random sizes, log-uniform, and their checksums; everything about one follows from its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.Generator(np.random.SFC64(index))
        sizes = np.exp(draw.uniform(np.log(SMALLEST), np.log(LARGEST), 2)).astype(int) & ~7
        data, array = (np.frombuffer(bytearray(draw.bytes(int(size))), np.uint8) for size in sizes)
        sums = checksum(data), checksum(array)
        return {"index": index, "data": torch.from_numpy(data), "array": array.view(np.int64), "sums": sums}


def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    """Collate nothing: torch's default would make a tensor of the array."""
    return sample


def checksum(values: Any) -> int:
    return zlib.crc32(np.asarray(values).view(np.uint8).data)


def check(batch: dict[str, Any]) -> None:
    if (checksum(batch["data"]), checksum(batch["array"])) != batch["sums"]:
        raise RuntimeError(f"batch {batch['index']} has changed")


class Held:
    """What the consumer holds of one batch, and how it finds out whether that is still right."""

    def __init__(self, batch: dict[str, Any], draw: np.random.Generator) -> None:
        self.nbytes = batch["data"].nbytes + batch["array"].nbytes
        length = len(batch["data"])
        start = int(draw.integers(length // 2))
        match draw.integers(3):
            case 0:
                self.kept = batch
            case 1:
                self.kept = batch["data"][start : start + length // 4]
            case _:
                self.kept = batch["data"].numpy()[start:]
        self.whole = self.kept is batch
        self.sum = None if self.whole else checksum(self.kept)

    def check(self) -> None:
        if self.whole:
            check(self.kept)
        elif checksum(self.kept) != self.sum:
            raise RuntimeError("a view that was held has changed")


def soak(bench: Bench, name: str) -> dict[str, float]:
    """Hold batches for random times, and look at memory every 25 batches."""
    batches = 800 if bench.quick else 5000
    draw = np.random.default_rng(11)
    held: dict[int, list[Held]] = {}
    now, most = 0, 0
    memory, excess = Memory(), []
    before, start = memory.bytes(), 0
    made = bench.loaders[name](RandomSizes(batches), batch_size=None, collate_fn=as_it_is, num_workers=WORKERS)
    for turn, batch in enumerate(made):
        check(batch)
        if turn == 0:
            start = memory.bytes()
        mine = Held(batch, draw)
        held.setdefault(turn + int(draw.integers(1, 128)), []).append(mine)
        now += mine.nbytes
        most = max(most, now)
        for due in held.pop(turn, ()):
            due.check()
            now -= due.nbytes
        if turn % 25 == 0:
            excess.append((memory.bytes() - start, now))
    del batch, mine, due
    for due in [one for some in held.values() for one in some]:
        due.check()
    del due
    held.clear()
    settle()
    gc.collect()
    half = len(excess) // 2
    return _megabytes(
        most_held=most,
        needed=most + (WINDOW + 2 * WORKERS) * 2 * LARGEST,
        peak=max(beyond for beyond, _ in excess),
        not_held_1st_half=max(beyond - holding for beyond, holding in excess[:half]),
        not_held_2nd_half=max(beyond - holding for beyond, holding in excess[half:]),
        left=memory.bytes() - before,
    )


def _megabytes(**figures: float) -> dict[str, float]:
    return {f"{name}_MB": value / MB for name, value in figures.items()}


# ---- the run ----


def turns(bench: Bench, job: str, rounds: int) -> dict[str, dict[str, float]]:
    """Let the sides take turns at a job, show the medians and return them."""
    said: dict[str, list[dict[str, float]]] = {name: [] for name in bench.loaders}
    for _ in range(rounds):
        for name, one in said.items():
            figures, peak = bench.alone(job, name)
            one.append({**figures, "highest_MB": peak / MB})
    medians = {
        name: {key: statistics.median(figures[key] for figures in one) for key in one[0]} for name, one in said.items()
    }
    headers = ["", *medians["torch"]]
    bench.table(
        f"{job} (medians of {rounds})", headers, [[name, *map(number, one.values())] for name, one in medians.items()]
    )
    bench.found[job] = medians
    return medians


def measure(bench: Bench) -> None:
    rounds = 1 if bench.quick else 3
    kept = turns(bench, "labels", rounds)
    for figure, what in (("growth_MB", "growth after batch 20"), ("taken_MB", "taken at the end, beyond the start")):
        allowed = kept["torch"][figure] + IMAGE_BATCH_MB
        bench.check(f"labels: {what}, MB", kept["ours"][figure], Target("<=", allowed))
    turns(bench, "everything", rounds)
    soaked = turns(bench, "soak", 1)["ours"]
    bench.check("soak: peak beyond the start, MB", soaked["peak_MB"], Target("<=", soaked["needed_MB"]))


if __name__ == "__main__":
    main(__doc__ or "", measure, labels=labels, everything=everything, soak=soak)
