"""SPDL's benchmark of what it costs to bring a large dataset to spawned workers: the seconds to the first batch."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting, loader_class

MIB = 1 << 20
STRING_BYTES = 64


class Strings(Dataset[int]):
    """A list of byte strings like paths, all different, of which samples tell the length."""

    def __init__(self, mib: int, keep: Callable[[list[bytes]], Any] = list) -> None:
        count = mib * MIB // STRING_BYTES
        strings = [(b"/data/imagenet/train/%012d.jpg" % number).ljust(STRING_BYTES, b"\0") for number in range(count)]
        self._strings = keep(strings)

    def __len__(self) -> int:
        return len(self._strings)

    def __getitem__(self, index: int) -> int:
        return len(self._strings[index])


def first_batch(make: Callable[[Strings, int], Iterable[Any]], mib: int, workers: int, setting: Setting) -> Run:
    """One pass that does not count, then some that do; each ends after its first batch."""
    dataset = strings_in_shared_memory(mib) if make is shared else Strings(mib)
    seconds = []
    for _ in range(2 if setting.quick else 4):
        loader = make(dataset, workers)
        began = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds.append(time.perf_counter() - began)
        del iterator, loader
        gc.collect()
    return Run(statistics.mean(seconds[1:]))


def strings_in_shared_memory(mib: int) -> Strings:
    from asyncloader.datasets import SharedList

    return Strings(mib, SharedList)


def process_loader(name: str, dataset: Strings, workers: int) -> Iterable[Any]:
    made: Iterable[Any] = loader_class(name)(
        dataset, batch_size=256, num_workers=workers, multiprocessing_context="spawn"
    )
    return made


def shared(dataset: Strings, workers: int) -> Iterable[Any]:
    return process_loader("asyncloader", dataset, workers)


def spdl_drop_in(dataset: Strings, workers: int) -> Iterable[Any]:
    from spdl.dataloader import get_pytorch_dataloader

    made: Iterable[Any] = get_pytorch_dataloader(
        dataset, batch_size=256, num_workers=workers, multiprocessing_context="spawn", in_order=True
    )
    return made


def spdl_threads(dataset: Strings, workers: int) -> Iterable[Any]:
    from tests.benchmarks.peers import spdl_threads as threads

    made: Iterable[Any] = threads(dataset, 256, workers)
    return made


def benchmark(mib: int, workers: int) -> Benchmark:
    makers = {
        "torch": partial(process_loader, "torch"),
        "SPDL, drop-in": spdl_drop_in,
        "SPDL, threads": spdl_threads,
        "asyncloader": partial(process_loader, "asyncloader"),
        "asyncloader, SharedList": shared,
    }
    return Benchmark(
        title=f"{mib} MiB, {workers} spawned",
        unit="s",
        whose="SPDL's large dataset",
        link="https://github.com/facebookresearch/spdl/blob/main/examples/benchmark_ipc_dataloader.py",
        rules="A list of byte strings of 64 bytes, spawned workers, batches of 256: seconds from `iter()` to the "
        "first batch, the mean of three passes after one that does not count. To SPDL's threads nothing has "
        "to be sent.",
        sides={name: partial(first_batch, make, mib, workers) for name, make in makers.items()},
        needs={"SPDL, drop-in": "spdl.dataloader", "SPDL, threads": "spdl.dataloader"},
    )


BENCHMARKS = [benchmark(16, 1), benchmark(64, 2)]
