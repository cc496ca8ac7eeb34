"""online: samples that are made while they are trained.

Small samples from a task of the trainer's own loop, put one by one, to batches of 512. Arrays of 1 MB likewise, in
batches of 32. Small samples from four other processes, in messages of 100 and one by one. 10,000 leases in flight: what
one costs beside a task that only waits. The state of 300 MB that wait, taken in a thread: how long a loop that puts
samples stands still. `examples/async_rl.py` measures what overlap gains.

Targets: 50,000 samples/s; 2 GB/s; 20,000 samples/s from four other processes, by `put_many`; 90,000 from one process
with 64 tasks; 30,000 from one task that awaits each put; 20 us a lease; 20 ms for a loop to stand still.

Found on 29 November 2026 (two quiet cores, torch 2.13, of a machine that adds a million numbers in 18 ms): 65,700
samples/s; 12.0 GB/s; 139,400 and 25,600 samples/s from four other processes; 211,100 from one task that awaits each
put, 204,100 from 64; 66.5 us a lease; the loop stands still for 2.2 ms with samples of 1 MB, 115 with 16 kB.
Missed: a lease, small samples in a state. In the morning, on another machine and before a process put 1,024 samples
ahead: 37,800 samples/s, 86,600 and 81,000 from the one process, 117.7 us a lease. On a busy one 64 tasks come to 44,000
to 85,000. The first 5,000 puts come at half the rate of the others, so runs have 128,000.

A lease takes 76 to 81 us of CPU beside other processes, and 116 to 134 while a request was a future of `concurrent`
(in turn). Without the garbage collector it is 42 us: four full collections, each of which looks at torch's 175,000
objects as well, are the rest.

For 115 to 132 ms the loop stands still with 19,200 samples of 16 kB, and for 24 to 29 ms without the garbage collector:
one full collection comes for the 135,000 objects that a state of so many samples has, takes 123 ms, and stops all
threads. With samples of 64 kB it is 6 to 12 ms. The feed's lock is held for 0.4 ms of CPU.
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
