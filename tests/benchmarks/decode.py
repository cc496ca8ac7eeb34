"""decode: real photographs, as JPEG, with 2 workers.

Measured: photographs of two sizes (500 x 375, and 2 megapixels; made of the two that scikit-learn carries), decoded
with Pillow, each as it is and resized to 224 x 224; batches of 32, of 8 where a sample has 6 MB; 320 batches, no work
in the trainer. Beside torch's DataLoader, SPDL's drop-in and ours stands the bound: two processes that decode and
collate half of the batches each, and hand them to nobody. Each clock runs from before the first worker is started until
the last batch is there, so nothing is made outside of it. With --quick 48 batches.

Targets: at least 1.3 times torch's images a second, 1.1 times SPDL's, and 95 % of the bound.

Profiled (getrusage of the thread, around ``__getitem__``): samples that are freed together at the end of a batch were
given back to the system by malloc and faulted in again, 200 pages for a photograph of 640 x 427, 0.6 ms of system time.
A worker that frees one large block at its start has malloc keep them: no faults (``bootstrap._keep_freed_memory``).
The bound's processes do so too: without it, and with as many threads of OpenMP as there are cores, they took 0.65 to
0.84 of the rate that loaders had, which no bound can.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from asyncloader.worker.bootstrap import _LARGEST_KEPT_BYTES
from tests.benchmarks import peers
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds
from tests.benchmarks.photos import decode, photographs

WORKERS = 2
SIZES = {"small": (500, 375), "2 MP": (1632, 1224)}


class Photographs(Dataset[Tensor]):
    """JPEG files in memory, decoded when they are asked for.

    Args:
        size: Width and height in pixels.
        count: How many there are; they repeat after 64.
        resized: To this width and height, or None.
    """

    def __init__(self, size: tuple[int, int], count: int, resized: tuple[int, int] | None) -> None:
        self._encoded = photographs(min(count, 64), size)
        self._count = count
        self._resized = resized

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return decode(self._encoded[index % len(self._encoded)], size=self._resized)


def bound(dataset: Photographs, batch: int) -> Run:
    """Decode and collate in processes that do nothing else."""
    context = multiprocessing.get_context("fork")

    def work(first: int) -> None:
        torch.set_num_threads(1)  # as loaders' workers do: OpenMP does not work in a forked child
        bytes(_LARGEST_KEPT_BYTES)  # and has malloc keep what is freed, as ours do: a bound does without page faults
        for start in range(first * batch, len(dataset), WORKERS * batch):
            default_collate([dataset[index] for index in range(start, start + batch)])

    began, cpu = time.perf_counter(), cpu_seconds()
    processes = [context.Process(target=work, args=(first,)) for first in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return _run(dataset, batch, began, cpu)


def load(make: Any, dataset: Photographs, batch: int) -> Run:
    """Run through the data once."""
    began, cpu = time.perf_counter(), cpu_seconds()
    iterator = iter(make(dataset, batch, WORKERS))
    for _ in range(len(dataset) // batch):
        next(iterator)
    return _run(dataset, batch, began, cpu)


def _run(dataset: Photographs, batch: int, began: float, cpu: float) -> Run:
    took_s, cpu_s = time.perf_counter() - began, cpu_seconds() - cpu
    extras = {"ms/batch": took_s / (len(dataset) / batch) * 1e3, "CPU ms/image": cpu_s / len(dataset) * 1e3}
    return Run(len(dataset) / took_s, extras)


def measure(bench: Bench) -> None:
    batches, rounds = (48, 3) if bench.quick else (320, 5)
    loaders: dict[str, Any] = {"torch": peers.torch_ordered, "ours": peers.ours}
    if "spdl" not in peers.missing():
        loaders["SPDL"] = peers.spdl_drop_in
    for name, size in SIZES.items():
        for resized in ((224, 224), None):
            batch = 8 if size[0] * size[1] > 1_000_000 and resized is None else 32
            dataset = Photographs(size, batches * batch, resized)
            sides: dict[str, Any] = {side: partial(load, make, dataset, batch) for side, make in loaders.items()}
            sides["two processes alone"] = partial(bound, dataset, batch)
            title = f"JPEG {name}, {'resized' if resized else 'as it is'}, batches of {batch}"
            found = bench.compare(title, "images/s", sides, rounds=rounds, targets={"ours": Target(">=", 1.3)})
            for other, least in (("SPDL", 1.1), ("two processes alone", 0.95)):
                if other in found:
                    pairs = zip(found["ours"], found[other], strict=True)
                    ratios = sorted(mine.value / theirs.value for mine, theirs in pairs)
                    bench.check(f"{title}: ours to {other}", ratios[len(ratios) // 2], Target(">=", least))


if __name__ == "__main__":
    main(__doc__ or "", measure)
