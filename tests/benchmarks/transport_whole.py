"""transport_whole: from distinct samples in memory to a consumer that reads everything.

Measured: GB/s of 2 GB of distinct float32 samples (3, 224, 224), far more than any cache holds, read three times
over (with --quick 0.3 GB, twice) in batches of 64 by 1 and by 2 workers that inherit them, collated by default and
summed by the consumer, on one thread; every sum is compared with the one taken from the source before, and must be
equal to the last bit. Default options, torch's DataLoader and ours taking turns. Beside it, in every round, what
the machine can do: "memcpy" copies the 2 GB batch by batch with one thread, "memcpy, 2 threads" with two, and "no
loader" collates each batch into one and the same buffer and sums it, with one thread. A batch's bytes are read and
written once by the worker and read once by the consumer: three times through memory, where memcpy counts one read
and one write as once. Peak memory is that of a fresh process per side, the samples included.

Target: at least 3 times torch's with 1 and with 2 workers.

Not profiled yet.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds, drain

BATCH = 64
SAMPLE = (3, 224, 224)
BATCH_BYTES = BATCH * 3 * 224 * 224 * 4
GB = 1e9


class Distinct(Dataset[torch.Tensor]):
    """Samples that are all different, in one tensor."""

    def __init__(self, batches: int) -> None:
        self.data = torch.empty(batches * BATCH, *SAMPLE)
        generator = torch.Generator().manual_seed(3)
        for batch in self.batches():
            batch.uniform_(generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]

    def batches(self) -> list[torch.Tensor]:
        return [self.data[start : start + BATCH] for start in range(0, len(self.data), BATCH)]


class Again(Sampler[int]):
    """The whole data in order, several times over."""

    def __init__(self, length: int, times: int) -> None:
        self.length, self.times = length, times

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.times):
            yield from range(self.length)

    def __len__(self) -> int:
        return self.length * self.times


class Whole:
    """The data, their sums, and the ways to go through them."""

    def __init__(self, quick: bool) -> None:
        self.times = 2 if quick else 3
        self.dataset = Distinct(8 if quick else 52)
        torch.set_num_threads(1)  # the sums of the consumer; one order of adding, so that they are equal to the bit
        self.sums = [float(batch.sum()) for batch in self.dataset.batches()]
        self.buffer = torch.empty(BATCH, *SAMPLE)
        self.copy = torch.ones_like(self.dataset.data[: BATCH * 4])

    def through(self, loader: Callable[..., Any], workers: int) -> Run:
        sampler = Again(len(self.dataset), self.times)
        sums: list[float] = []
        made = loader(self.dataset, BATCH, sampler=sampler, num_workers=workers)
        run = drain(made, lambda batch: sums.append(float(batch.sum())), BATCH_BYTES / GB)
        if sums != self.sums * self.times:
            raise RuntimeError("sums differ from those of the source")
        return run

    def no_loader(self) -> Run:
        def step(batch: torch.Tensor) -> None:
            torch.stack([*batch], out=self.buffer)
            self.buffer.sum()

        return self._each(step)

    def memcpy(self, threads: int) -> Run:
        """Copy each batch to one of four places, in one part per thread."""
        part = BATCH_BYTES // threads
        places = [self.copy[BATCH * place :].data_ptr() for place in range(4)]
        turn = 0
        with ThreadPoolExecutor(threads) as pool:

            def step(batch: torch.Tensor) -> None:
                nonlocal turn
                turn += 1
                starts = range(0, BATCH_BYTES, part)
                to, source = places[turn % 4], batch.data_ptr()
                list(pool.map(lambda start: ctypes.memmove(to + start, source + start, part), starts))

            return self._each(step)

    def _each(self, step: Callable[[torch.Tensor], None]) -> Run:
        batches = self.dataset.batches()
        cpu, began = cpu_seconds(), time.perf_counter()
        for batch in batches:
            step(batch)
        seconds = time.perf_counter() - began
        cpu = cpu_seconds() - cpu
        return Run(len(batches) * BATCH_BYTES / GB / seconds, {"cpu us/batch": cpu / len(batches) * 1e6})


def measure(bench: Bench) -> None:
    whole = Whole(bench.quick)
    for workers in (1, 2):
        sides: dict[str, Callable[[], Run]] = {
            **{name: partial(whole.through, loader, workers) for name, loader in bench.loaders.items()},
            "no loader": whole.no_loader,
            "memcpy": partial(whole.memcpy, 1),
            "memcpy, 2 threads": partial(whole.memcpy, 2),
        }
        title = f"{workers} worker{'s' * (workers > 1)}"
        targets = {"ours": Target(">=", 3)}
        found = bench.compare(title, "GB/s", sides, rounds=2 if bench.quick else 7, targets=targets)
        rounds = zip(found["ours"], found["memcpy"], found["memcpy, 2 threads"], strict=True)
        shares = [ours.value / max(one.value, two.value) for ours, one, two in rounds]
        bench.note(f"{title}: ours as a share of the faster memcpy", median=statistics.median(shares))
    for name in bench.loaders:
        said, peak = bench.alone("memory", name)
        bench.note(f"peak memory, 2 workers, {name}", MB=peak / 1e6, **said)


def memory(bench: Bench, name: str) -> dict[str, float]:
    """Go through the data once in a process of its own, to be watched."""
    whole = Whole(bench.quick)
    run = whole.through(bench.loaders[name], 2)
    return {"samples_MB": whole.dataset.data.nbytes / 1e6, "batches": run.extras["batches"]}


if __name__ == "__main__":
    main(__doc__ or "", measure, memory=memory)
