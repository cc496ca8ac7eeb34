"""The same batches by way of Ray: actors whose results are objects of Ray, and Ray Data; for the benchmark `remote`.

A cluster of two raylets on this machine: the trainer's, without CPUs, and one where two actors, two tasks of Ray Data
at a time, and our agent with two workers run. So objects go from one object store to the other over the loopback, as
ours do from agent to trainer.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.benchmarks.measure import Run
from tests.clusters.clusters import make_cluster

STORE_BYTES = 1 << 30
IN_FLIGHT = 4
"""Batches that are asked for ahead, as our window has them: 2 for each of 2 workers."""


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Have a cluster while this is active."""
    with make_cluster(object_store_memory=STORE_BYTES) as made:
        import ray.data

        made.add_node(num_cpus=6, object_store_memory=STORE_BYTES)  # 2 for each side, and all sides are there
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield


class Maker:
    """An actor that makes batches."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def batch(self, number: int) -> Any:
        """Make one."""
        return self.make(number)


def ints(number: int) -> Any:
    """A tiny batch."""
    return np.arange(8 * number, 8 * number + 8)


class Images:
    """Large batches, copied from this process's own memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.images: Any = None

    def __call__(self, number: int) -> Any:
        if self.images is None:
            self.images = np.random.default_rng(0).random(self.shape, np.float32)
        return self.images


class Objects:
    """Two actors, asked in turns; what they return is an object of Ray each."""

    def __init__(self, make: Callable[[int], Any], count: int, unit: float) -> None:
        import ray

        actor: Any = ray.remote(Maker)
        self.actors = [actor.options(num_cpus=1).remote(make) for _ in range(2)]
        self.count, self.unit = count, unit

    def run(self) -> Run:
        """Return so many units a second."""
        import ray

        began, asked = time.perf_counter(), []
        for number in range(self.count + IN_FLIGHT):
            if number < self.count:
                asked.append(self.actors[number % 2].batch.remote(number))
            if number >= IN_FLIGHT:
                torch.as_tensor(np.asarray(ray.get(asked[number - IN_FLIGHT])))
                asked[number - IN_FLIGHT] = None
        return Run(self.count * self.unit / (time.perf_counter() - began), {})


class Data:
    """Ray Data: a range, `map_batches`, `iter_torch_batches`.

    Args:
        make: Makes a whole batch, of a block of one row; None to leave rows, of blocks as Ray likes them.
        count: Of batches.
        batch_size: Rows of each.
        unit: What a batch is.
    """

    def __init__(self, make: Callable[[int], Any] | None, count: int, batch_size: int, unit: float) -> None:
        import ray.data

        def made(rows: dict[str, Any]) -> dict[str, Any]:
            return {"x": rows["id"] if make is None else make(int(rows["id"][0]))}

        rows = ray.data.range(count * batch_size) if make is None else ray.data.range(count, override_num_blocks=count)
        self.data = rows.map_batches(made)
        self.batch_size, self.count, self.unit = batch_size, count, unit

    def run(self) -> Run:
        """Return so many units a second, the start of its tasks included."""
        began, seen = time.perf_counter(), 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in self.data.iter_torch_batches(batch_size=self.batch_size, prefetch_batches=IN_FLIGHT):
                seen += 1
        if seen != self.count:
            raise RuntimeError(f"{seen} batches in place of {self.count}")
        return Run(self.count * self.unit / (time.perf_counter() - began), {})
