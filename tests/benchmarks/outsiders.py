"""outsiders: other people's benchmarks of loaders, by their rules, torch's DataLoader and ours in turns.

Measured:

- The experiment of the tinyloader blog post, which torch's forum and tutorials repeat: 512 samples that sleep for 5 ms,
  batches of 64, ten epochs, 4 workers. Seconds for all.
- imread-benchmark's rules for supplying images ("loader-supply"): JPEG bytes that lie in memory (2,048 pixels wide),
  batches of one image, spawned workers, prefetch_factor 1, 0, 2 and 4 workers. Images a second, the start left out.
- SPDL's benchmark of what a large dataset costs on its way: a list of 16 MiB of byte strings, spawned workers. Seconds
  to the first batch.

With --quick: two epochs, 24 images, one round each.

No targets: `make bench-outsiders` writes all rounds, the machine, the versions and the commit into docs/results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, main
from tests.benchmarks.measure import Run, drain
from tests.benchmarks.photos import decode, photographs

WIDE = (2048, 1536)


class Sleeps(Dataset[int]):
    """512 samples of 5 ms."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


class Jpegs(Dataset[Tensor]):
    """JPEG files in memory, decoded when they are asked for."""

    def __init__(self, count: int) -> None:
        self._encoded = photographs(8, WIDE)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return decode(self._encoded[index % len(self._encoded)], size=None)


class Strings(Dataset[int]):
    """A list of 16 MiB of byte strings, of which samples tell the length."""

    def __init__(self) -> None:
        self._strings = [b"%064d" % number for number in range((16 << 20) // 64)]

    def __len__(self) -> int:
        return len(self._strings)

    def __getitem__(self, index: int) -> int:
        return len(self._strings[index])


def ten_epochs(bench: Bench, name: str) -> Run:
    loader = bench.loaders[name](Sleeps(), batch_size=64, shuffle=True, num_workers=4)
    began = time.perf_counter()
    for _ in range(2 if bench.quick else 10):
        for _ in loader:
            pass
    return Run(time.perf_counter() - began)


def images(bench: Bench, name: str, workers: int) -> Run:
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": 1} if workers else {}
    loader = bench.loaders[name](Jpegs(24 if bench.quick else 200), batch_size=1, num_workers=workers, **options)
    return drain(loader, None, warm_up=4)


def first_of_strings(bench: Bench, name: str, workers: int) -> Run:
    loader = bench.loaders[name](Strings(), batch_size=32, num_workers=workers, multiprocessing_context="spawn")
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    return Run(time.perf_counter() - began)


def measure(bench: Bench) -> None:
    def sides(run: Callable[..., Run], *arguments: Any) -> dict[str, Callable[[], Run]]:
        return {name: partial(run, bench, name, *arguments) for name in bench.loaders}

    rounds = 1 if bench.quick else 5
    bench.compare("tinyloader, ten epochs", "s", sides(ten_epochs), rounds=rounds)
    for workers in (0, 2, 4):
        bench.compare(f"loader-supply, {workers} workers", "images/s", sides(images, workers), rounds=rounds)
    for workers in (1, 2):
        title = f"16 MiB of byte strings, {workers} spawned"
        bench.compare(title, "s", sides(first_of_strings, workers), rounds=rounds)


if __name__ == "__main__":
    main(__doc__ or "", measure)
