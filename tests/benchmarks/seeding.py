"""seeding: what seeds of batches and of samples cost, and turns of samples with the global generators.

CPU time of the calling thread, the least of many rounds of 64: a `Seeder`, which seeds Python's, numpy's and torch's
global generators; fetching 64 samples of a list, of which each is seeded, less fetching them without; a `sample_seed`
block, and one where nothing is seeded.

Targets: a sample seeded in 10 us.

Found on two cores at 2.5 GHz: `random.seed` takes 5.0 us, numpy's 2.2, torch's 1.4, and the numbers themselves 2; all
of it 9.1 for a sample, while other jobs had the cores. Nothing of that can be put off: what a sample will draw from is
not known before it does, and what it has drawn from cannot be put right later.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import thread_time

from asyncloader.messages.messages import WorkerSpec
from asyncloader.seeding import turns
from asyncloader.seeding.sample_context import SampleContext, current
from asyncloader.seeding.seeder import Seeder
from asyncloader.worker.fetch import MapFetcher
from tests.benchmarks.bench import Bench, Target, main

KEY = (1, 2, 3)
SAMPLES = 64


def measure(bench: Bench) -> None:
    rounds = 100 if bench.quick else 1000
    seed, numbers = Seeder(KEY), count()
    dataset = keys = list(range(SAMPLES))
    fetch = MapFetcher(dataset, WorkerSpec(None, False, True, None, False, None, 1, 0, False, knows_places=True))

    def fetched(*, is_seeded: bool) -> None:
        here = SampleContext.of_sample(seed, 0, first=0)
        current.set(here)
        if is_seeded:
            here.seed_each()
        fetch(keys, here)

    def block() -> None:
        for position in keys:
            current.set(SampleContext.of_sample(seed, 0, position, first))
            with turns.sample_seed():
                pass

    def of(job: Callable[[], object], per: int) -> float:
        spent = []
        for _ in range(rounds):
            began = thread_time()
            job()
            spent.append((thread_time() - began) / per * 1e6)
        return min(spent)

    bench.note("a seed, us", seconds=of(lambda: [seed(next(numbers)) for _ in keys], SAMPLES))
    plain = of(lambda: fetched(is_seeded=False), SAMPLES)
    seeded = of(lambda: fetched(is_seeded=True), SAMPLES)
    bench.check("a sample seeded, us", seeded - plain, Target("<=", 10))
    first: int | None = None
    bench.note("a block that seeds nothing, us", seconds=of(block, SAMPLES))
    first = 0
    bench.note("a block, us", seconds=of(block, SAMPLES))


if __name__ == "__main__":
    main(__doc__ or "", measure)
