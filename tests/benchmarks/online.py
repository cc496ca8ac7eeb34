"""online: samples that are made while they are trained.

Small samples from a task of the trainer's own loop, put one by one, to batches of 512. Arrays of 1 MB likewise, in
batches of 32. Small samples from four other processes, in messages of 100 and one by one. 10,000 leases in flight: what
one costs beside a task that only waits. `examples/async_rl.py` measures what overlap gains.

Targets: 50,000 samples/s; 2 GB/s; 20,000 samples/s from four other processes, by `put_many`; 90,000 from one process
with 64 tasks; 30,000 from one task that awaits each put; 20 us a lease.

Found on 29 November 2026 (two quiet cores, torch 2.13): 37,833 samples/s; 5.9 GB/s; 75,239 and 8,963 samples/s from
four other processes; 86,577 from one task that awaits each put, 80,967 from 64; 117.7 us a lease. Missed: small
samples, one by one; from a process with 64 tasks; a lease, 10,000 in flight.

On 26 November it was 65,700 samples/s, 7.7 GB/s, 109,900 and 7,200 samples/s from other processes, and 28.5 us a lease,
18 of them the feed's; the others were the garbage collector's, which looks at all objects of the process once more for
the three that a lease adds. What has made a lease four times as dear since then is not known.

Since a feed is one server, whose calls are futures, a sample that is put one by one takes half as much CPU time again:
34 us, and 22 us with the code of 26 November in the same minutes (28 November, a dozen busy processes beside it; 10,600
samples/s and 1.7 GB/s came through there).

Found on 29 November 2026 (two quiet cores, torch 2.13): 37,800 samples/s; 5.9 GB/s; 75,200 and 9,000 samples/s from
four other processes; 86,600 from a process whose one task awaits each put, and 81,000 from one with 64 tasks, which
misses the target; 118 us a lease. Producer (5.7 us of CPU a put) and trainer (6.6) worked in turn then. Since a process
writes messages into the socket itself, they work at the same time: 108,000 to 114,000 from either, by a program like
this one in the same hour. Of a lease, 105 of 145 us were the garbage collector's (beside 20 busy processes): for 10,000
tasks that wait, some 30 objects each. By a future that is awaited as it is, 64 to 85 us in the same minutes.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedHandle
from tests.benchmarks.bench import Bench, Target, main


async def one_by_one(count: int, batch_size: int, sample: Any) -> float:
    """Return how many samples come through in a second."""
    feed = Feed(batch_size=batch_size, max_staleness=2)

    async def put() -> None:
        for _ in range(count):
            await feed.put(sample)
        feed.close()

    began = time.perf_counter()
    task = asyncio.create_task(put())
    async for _ in DataLoader(feed):
        pass
    await task
    return count / (time.perf_counter() - began)


def put_many(handle: FeedHandle, count: int, at_once: int) -> None:
    """Put samples from another process."""

    async def put() -> None:
        for _ in range(0, count, at_once):
            await handle.put_many(range(at_once))

    asyncio.run(put())


def put_in_tasks(handle: FeedHandle, count: int, at_once: int) -> None:
    """Put samples from another process, in so many tasks, each of which awaits its puts."""

    async def put() -> None:
        for _ in range(count // at_once):
            await handle.put(0)

    async def put_all() -> None:
        await asyncio.gather(*(put() for _ in range(at_once)))

    asyncio.run(put_all())


def from_processes(count: int, at_once: int, target: Any = put_many, number: int = 4) -> float:
    """Return how many samples come from processes in a second, from the first batch on to the last but one."""
    feed = Feed(batch_size=256, max_staleness=3)
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(feed.handle(), count, at_once)) for _ in range(number)]
    for process in processes:
        process.start()
    with feed:
        loader = iter(DataLoader(feed))
        next(loader)
        began, batches = time.perf_counter(), number * count // 256 - 2
        for _ in range(batches):
            next(loader)
        took = time.perf_counter() - began
        for process in processes:
            process.join()
    return batches * 256 / took


async def in_flight(count: int) -> float:
    """Return what a lease costs beside a task that waits, with all of them in flight. Microseconds of CPU."""
    feed, done = Feed(range(count), batch_size=count), asyncio.Event()

    async def lease() -> None:
        async with feed.lease() as item:
            await done.wait()
            await item.put(item.value)

    async def wait() -> None:
        await done.wait()

    async def cpu_us(work: Callable[[], Any]) -> float:
        done.clear()
        began = time.process_time()
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        await asyncio.sleep(0)
        done.set()
        await asyncio.gather(*tasks)
        return (time.process_time() - began) / count * 1e6

    waiting = await cpu_us(wait)
    leasing = await cpu_us(lease)
    feed.close()
    return leasing - waiting


async def longest_stop(size: int, total: int = 300 << 20) -> float:
    """Return how long a loop stood still, at most, while a thread took the state of a feed: milliseconds.

    The loop turns each millisecond, and puts a sample each time, for which it needs the feed's lock.
    """
    feed = Feed(batch_size=1, max_samples=1 << 20)
    for _ in range(total // size):
        feed.put_nowait(np.zeros(size, np.uint8))
    gc.collect()
    state, longest, last = asyncio.create_task(asyncio.to_thread(feed.state_dict)), 0.0, time.perf_counter()
    while not state.done():
        await asyncio.sleep(0.001)
        feed.put_nowait(0)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    await state
    feed.close()
    return longest * 1e3


def measure(bench: Bench) -> None:
    rounds = 3 if bench.quick else 7

    def median(run: Callable[[], float]) -> float:
        return sorted(run() for _ in range(rounds))[rounds // 2]

    small = median(lambda: asyncio.run(one_by_one(50_000, 512, 0)))
    bench.check("small samples, one by one, samples/s", small, Target(">=", 50_000))
    large = median(lambda: asyncio.run(one_by_one(1_000, 32, np.zeros(1 << 18, np.float32))) * (1 << 20) / 1e9)
    bench.check("samples of 1 MB, GB/s", large, Target(">=", 2))
    many = median(partial(from_processes, 20_000, 100))
    bench.check("from 4 processes, 100 in a message, samples/s", many, Target(">=", 20_000))
    single = median(partial(from_processes, 2_000, 1))
    bench.note("from 4 processes, one after the other", **{"samples/s": single})
    awaited = median(partial(from_processes, 128_000, 1, put_in_tasks, 1))
    bench.check("from a process with a task that awaits each put, samples/s", awaited, Target(">=", 30_000))
    tasks = median(partial(from_processes, 128_000, 64, put_in_tasks, 1))
    bench.check("from a process with 64 tasks, samples/s", tasks, Target(">=", 90_000))
    lease = median(lambda: asyncio.run(in_flight(10_000)))
    bench.check("a lease, 10,000 in flight, us of CPU", lease, Target("<=", 20))
    large = median(lambda: asyncio.run(longest_stop(1 << 20)))
    bench.check("a state of 300 MB, samples of 1 MB, longest stop of the loop, ms", large, Target("<=", 20))
    small = median(lambda: asyncio.run(longest_stop(1 << 14)))
    bench.check("a state of 300 MB, samples of 16 kB, longest stop of the loop, ms", small, Target("<=", 20))


if __name__ == "__main__":
    main(__doc__ or "", measure)
