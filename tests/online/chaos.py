"""Feeds under random disturbances: the feed's process, those of the training and producers are killed at any moment.

    python -m tests.online.chaos --runs 100 [--seed 7] [--actor]

The feed is in the trainer's process, in one beside the training, or in an actor of Ray's (`--actor`). A training has
one or two ranks of one or two peers, and writes states. Whenever a process of it is killed, all begin again from the
last state, with other numbers of these, and with the same feed if that is left. Most deaths come a moment after some
steps, so that states have batches in flight. Each process writes down by name what was trained, put, and not put.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedClosedError, FeedHandle, Lease, LeaseLostError, Sample
from tests.online.history import IN_PARTS, ITEMS, check, is_dropped, names_of, note, read
from tests.support.patience import wait_until

LONGEST_S = 120.0
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks, and peers of each."""


class Play(NamedTuple):
    """What one run is played with."""

    folder: Path
    is_beside: bool  # the feed is in no process of the training
    group: int
    max_staleness: int | None
    on_stale: Any
    num_workers: int
    tasks: int  # producers beside the feed
    processes: int
    putters: int  # processes that put without leases
    save_every: int
    pace_s: float
    step_s: float
    jump: int  # of the version
    is_large: bool
    producers_die: bool
    workers_die: bool


class Fragile(NamedTuple):
    """Returns the names of samples, and kills the worker that makes some of them for the first time."""

    play: Play
    trainer: int

    def __call__(self, sample: Sample[Any]) -> str:
        """Return the name of what was put."""
        name, data = sample.value
        number = zlib.crc32(name.encode())
        assert data is None or (data == number % 1000).all()
        if self.play.workers_die and number % 50 == 7 and os.getpid() != self.trainer:
            with suppress(FileExistsError):
                (self.play.folder / f"died at {name}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return str(name)


# ---------------------------------------------------------------------------------------------------------- producers


def samples_of(unit: str, play: Play) -> list[Any]:
    """Return the samples of a unit: names, with arrays that travel beside the pickles."""
    names = names_of(unit, play.group)
    data = [np.full(20_000, zlib.crc32(name.encode()) % 1000, np.float32) if play.is_large else None for name in names]
    return [*zip(names, data, strict=True)]


async def produce(source: Any, play: Play, seed: int) -> None:
    """Lease and put, at some pace, until the feed has ended; fail now and then, or give back what is made so far."""
    draws = random.Random(seed)
    with suppress(FeedClosedError):
        async for item in source.leases():
            with suppress(ZeroDivisionError, LeaseLostError):
                async with item:
                    await make(item, play, draws)


async def make(item: Lease, play: Play, draws: random.Random) -> None:
    """Make the samples of an item, at once or in parts, or some of them."""
    number, made = item.value if isinstance(item.value, tuple) else (item.value, [])
    work = asyncio.create_task(asyncio.sleep(draws.expovariate(1) * play.pace_s))
    if draws.random() < 0.3:  # nobody works on what is lost
        lost = asyncio.create_task(item.lost())
        await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not work.done():
            work.cancel()
            return
    await work
    made = [*made, *samples_of(str(number), play)[len(made) :][: draws.randint(1, 3)]]
    rest = samples_of(str(number), play)[len(made) :]
    if (drawn := draws.random()) < 0.1:
        raise ZeroDivisionError
    if drawn < 0.25:
        item.retry(value=(number, made))
    elif is_dropped(number):
        item.drop()
    elif play.group == IN_PARTS or (play.group > 1 and drawn < 0.5):
        for sample in [*made, *rest]:
            item.add(sample)
            await asyncio.sleep(0)
        await item.done()
    else:
        samples = [*made, *rest]
        await item.put(samples if play.group > 1 else samples[0], priority=draws.choice([0.0, 0.0, 1.0]))


async def until_loaded(handle: FeedHandle, play: Play) -> None:
    """Wait until the training has begun to read."""
    while not (play.folder / "loaded").exists():
        handle.stats()  # the feed may have died before
        await asyncio.sleep(0.01)


async def produce_again(handle: FeedHandle, play: Play, seed: int) -> None:
    """Make what a state leaves to be made, which was made before, so that other producers have come to the end."""
    await until_loaded(handle, play)
    await produce(handle, play, seed)


async def put_without_leases(handle: FeedHandle, play: Play, seed: int) -> None:
    """Put from several tasks; some are too new, and some given up. Note which are in, and which are not put."""
    draws, tasks = random.Random(seed), random.Random(seed).choice([1, 4, 16])
    await until_loaded(handle, play)  # otherwise they would not be in the state

    async def put(unit: str) -> str:
        samples, drawn = samples_of(unit, play), draws.random()
        value = samples if play.group > 1 else samples[0]
        try:
            if drawn < 0.2:
                await asyncio.wait_for(handle.put(value), draws.choice([0.0, 0.001, 0.01]))
            else:
                await handle.put(value, version=1 << 40 if drawn < 0.3 else None)
        except (TimeoutError, ValueError):  # the error may be that of another one; this one is not put either
            return ""
        return unit if not 0.2 <= drawn < 0.3 else ""

    with suppress(FeedClosedError):
        async with handle:
            for turn in range(6):
                units = [f"f{seed}-{turn}-{number}" for number in range(tasks)]
                put_ones = await asyncio.gather(*map(put, units))
                while True:
                    with suppress(ValueError):
                        await handle.flush()
                        break
                note(play.folder, "in", *[unit for unit in put_ones if unit])
                note(play.folder, "not", *[unit for unit in units if unit not in put_ones])


def be_producer(work: Any, handle: FeedHandle, play: Play, seed: int, dies_after_s: float | None) -> None:
    """Be a producer's process, which ends with the feed, or dies."""
    if dies_after_s is not None:
        kill_later(os.getpid(), dies_after_s)
    with suppress(FeedClosedError):
        asyncio.run(work(handle, play, seed))


def kill_later(pid: int, after_s: float) -> None:
    """Kill a process from a thread."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(after_s, kill)
    timer.daemon = True
    timer.start()


# ----------------------------------------------------------------------------------------------------------- training


class Try(NamedTuple):
    """One try of a training, from a state until somebody dies, or to the end."""

    seed: int
    shape: tuple[int, int]
    step: int
    states: dict[tuple[int, int], Path]
    victim: str  # the file with its pid
    die_after: int | None  # steps; a moment after the beginning

    @property
    def seats(self) -> list[tuple[int, int]]:
        """Rank and peer of each process."""
        return [(rank, peer) for rank in range(self.shape[0]) for peer in range(self.shape[1])]


def be_seat(play: Play, this: Try, handle: FeedHandle, rank: int, peer: int) -> None:
    """Be a process of the training."""
    asyncio.run(train_on(play, this, handle, rank, peer))


async def train_on(play: Play, this: Try, feed: Any, rank: int = 0, peer: int = 0) -> None:
    """Train until the end of the data, or until another process has died."""
    write_pid(play, f"seat {rank} {peer}")
    fn, (ranks, peers) = Fragile(play, os.getpid()), this.shape
    dataset = feed.for_rank(rank, ranks, peer, peers, fn=fn) if play.is_beside else feed
    try:
        await train(play, this, feed, DataLoader(dataset, num_workers=play.num_workers, collate_fn=list), (rank, peer))
    except (LoaderClosedError, FeedClosedError) as error:
        note(play.folder, "told", rank, peer, type(error).__name__)


async def train(play: Play, this: Try, feed: Any, loader: Any, seat: tuple[int, int]) -> None:
    """Train; the first peer of rank 0 sets the version, and may kill somebody."""
    step, is_first = this.step, seat == (0, 0)
    if this.states:
        loader.load_state_dict(pickle.loads(this.states.get(seat, this.states[0, 0]).read_bytes()))
    elif is_first:
        save(play, this, loader, step, seat)
    if is_first:
        feed.resume()  # who has paused it may be dead
        (play.folder / "loaded").touch()
    async for names in loader:
        note(play.folder, "trained", step, *seat, *names)
        step += 1
        if is_first and step - this.step == this.die_after:
            kill_later(int((play.folder / this.victim).read_text()), random.Random(this.seed).uniform(0, 0.03))
        await asyncio.sleep(play.step_s)  # batches are in flight meanwhile
        if is_first:
            feed.pause()  # while the weights are on their way
            await asyncio.sleep(0)
            feed.version = max(step, feed.version + play.jump)
            feed.resume()
        if step % play.save_every == 0:
            save(play, this, loader, step, seat)
    note(play.folder, "end", *seat, feed.stats().ready)


def save(play: Play, this: Try, loader: Any, step: int, seat: tuple[int, int]) -> None:
    """Save the state of a loader, whole or not at all."""
    if seat == (0, 0):
        note(play.folder, "saving", step)
    shape, new = "x".join(map(str, this.shape)), play.folder / f"new {seat[0]} {seat[1]}"
    new.write_bytes(pickle.dumps(loader.state_dict()))
    new.replace(play.folder / f"state {step} {shape} {seat[0]} {seat[1]}")


def last_states(play: Play) -> tuple[int, dict[tuple[int, int], Path]]:
    """Return the last step whose states all have saved, and these; later ones are deleted."""
    found: dict[tuple[int, str], dict[tuple[int, int], Path]] = {}
    for path in play.folder.glob("state *"):
        _, at, shape, rank, peer = path.name.split()
        found.setdefault((int(at), shape), {})[int(rank), int(peer)] = path
    for (step, shape), states in sorted(found.items(), reverse=True):
        ranks, peers = map(int, shape.split("x"))
        if len(states) == ranks * peers or step == 0:
            return step, states
        for path in states.values():
            path.unlink()
    return 0, {}


# ------------------------------------------------------------------------------------------------------- the processes


def make_feed(play: Play) -> Feed[Any]:
    """Make the feed."""
    write_pid(play, "feed")
    return Feed(
        range(ITEMS), batch_size=4 * max(1, play.group), group_size=play.group if play.group > 1 else None,
        max_samples=24 * max(1, play.group), max_staleness=play.max_staleness, on_stale=play.on_stale,
        max_retries=10**6, fn=Fragile(play, os.getpid()),
    )  # fmt: skip


def write_pid(play: Play, name: str) -> None:
    """Say which process to kill."""
    (play.folder / f"new {name}").write_text(str(os.getpid()))
    (play.folder / f"new {name}").replace(play.folder / f"pid {name}")


def be_feed(play: Play, this: Try, pipe: Any) -> None:
    """Have the feed, and producers beside it; train if nobody else does, or wait for the end."""

    async def be() -> None:
        feed = make_feed(play)
        pipe.send(feed.handle())
        tasks = [asyncio.create_task(produce(feed, play, this.seed - number)) for number in range(1, play.tasks + 1)]
        if not play.is_beside:
            await train_on(play, this, feed)
        else:
            await asyncio.to_thread(pipe.recv)
            feed.close()
        await asyncio.gather(*tasks)

    asyncio.run(be())


class Forks:
    """Processes of this machine, and a feed in one of them."""

    def __init__(self) -> None:
        self._context = mp.get_context("fork")
        self._launched: list[Any] = []

    def launch(self, target: Any, *arguments: Any) -> Any:
        """Start a process."""
        process = self._context.Process(target=target, args=arguments)
        process.start()
        self._launched.append(process)
        return process

    def end_of(self, process: Any) -> str:
        """Return how a process has ended: "ended", "killed", "failed"; or "hangs"."""
        process.join(LONGEST_S)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGABRT)  # which prints its stacks
            return "hangs"
        return {0: "ended", -signal.SIGKILL: "killed"}.get(process.exitcode, "failed")

    def clear(self) -> None:
        """End what is left."""
        for process in self._launched:
            process.kill()
            process.join()
        self._launched.clear()

    @contextmanager
    def feed(self, play: Play, this: Try) -> Iterator[tuple[FeedHandle, Any]]:
        """Have a feed: its handle, and its process."""
        ours, theirs = self._context.Pipe()
        process = self.launch(be_feed, play, this, theirs)
        theirs.close()
        try:
            yield ours.recv(), process
        finally:
            with suppress(OSError):
                ours.send("end")


class Cluster:
    """Processes of Ray's, and a feed in an actor."""

    def __init__(self) -> None:
        self._launched: list[Any] = []

    @staticmethod
    @functools.cache
    def _remote(target: Any) -> Any:
        """Return a function that runs in a process of Ray's, once."""
        import ray

        return ray.remote(num_cpus=0, max_retries=0)(target)

    def launch(self, target: Any, *arguments: Any) -> Any:
        """Start a process."""
        process = self._remote(target).remote(*arguments)
        self._launched.append(process)
        return process

    def clear(self) -> None:
        """See `Forks`."""
        import ray

        for process in self._launched:
            ray.cancel(process, force=True)
        self._launched.clear()

    def end_of(self, process: Any) -> str:
        """See `Forks`."""
        import ray

        if not ray.wait([process], timeout=LONGEST_S)[0]:
            return "hangs"
        try:
            ray.get(process)
        except ray.exceptions.WorkerCrashedError:
            return "killed"
        except ray.exceptions.RayError as error:
            print(error)
            return "failed"
        return "ended"

    @contextmanager
    def feed(self, play: Play, this: Try) -> Iterator[tuple[FeedHandle, None]]:
        """See `Forks`."""
        from asyncloader.ray import FeedActor

        handle = FeedActor.start(partial(make_feed, play), num_cpus=0)
        try:
            yield handle, None
        finally:
            with suppress(FeedClosedError):
                handle.close_feed()
            handle.close()


# --------------------------------------------------------------------------------------------------------------- runs


def drawn_play(draws: random.Random, folder: Path, in_actor: bool) -> Play:
    """Draw what a run is played with."""
    max_staleness = draws.choice([None, None, 0, 2, 4])
    on_stale = draws.choice(["keep", "recycle"])
    is_beside = in_actor or draws.random() < 0.6
    return Play(
        folder,
        is_beside,
        group=draws.choice([1, 1, 2, IN_PARTS]),
        max_staleness=max_staleness,
        on_stale=on_stale,
        num_workers=0 if in_actor else draws.choice([0, 0, 1] if is_beside else [0, 1, 2, 2]),
        tasks=0 if in_actor else draws.randint(0, 3),
        processes=draws.randint(1, 2),
        putters=draws.randint(0, 2) if on_stale == "keep" else 0,  # nobody would make them again
        save_every=draws.randint(1, 4),
        pace_s=draws.choice([0.0, 0.0, 0.002, 0.01]),
        step_s=draws.choice([0.0, 0.005, 0.01]),
        jump=draws.choice([0, 0, 3]),
        is_large=draws.random() < 0.2,
        producers_die=draws.random() < 0.5,
        workers_die=draws.random() < 0.3,
    )


def begin(play: Play, seed: int, number: int, deaths: list[int | None], draws: random.Random) -> Try:
    """Draw a try that goes on from the last state."""
    for path in [*play.folder.glob("pid seat *"), play.folder / "loaded"]:
        path.unlink(missing_ok=True)
    step, states = last_states(play)
    ranks, peers = draws.choice(SHAPES) if play.is_beside else (1, 1)
    victim = ""
    if number < len(deaths):
        # Only another feed may go on from a state that does not have all that was put without leases.
        is_feed = not play.is_beside or play.putters or draws.random() < 0.4
        victim = "pid feed" if is_feed else f"pid seat {draws.randrange(ranks)} {draws.randrange(peers)}"
    note(play.folder, "begin", step, ranks, peers)
    die_after = deaths[number] if victim else None
    return Try(seed * 1000 + number * 20, (ranks, peers), step, states, victim, die_after)


def play_one(seed: int, folder: Path, place: Any = None) -> str:
    """Play one run; return what does not hold."""
    place, draws = place or Forks(), random.Random(seed)
    play = drawn_play(draws, folder, isinstance(place, Cluster))
    deaths = [None if draws.random() < 0.2 else draws.randint(1, 20) for _ in range(draws.randint(1, 4))]
    found, number = "", 0
    while not found:
        found, number = play_life(play, place, seed, number, deaths, draws)
    place.clear()
    found = check(read(folder), play.group) if found == "ended" else found
    return f"{found}: {play}, {deaths}, {read(folder)[-5:]}" if found else ""


def play_life(
    play: Play, place: Any, seed: int, number: int, deaths: list[int | None], draws: random.Random
) -> tuple[str, int]:
    """Play tries with one feed, until it dies; return "ended", what is wrong, or "", and the number of the next try."""
    (play.folder / "pid feed").unlink(missing_ok=True)
    this = begin(play, seed, number, deaths, draws)
    with place.feed(play, this) as (handle, feed):
        dies = [draws.uniform(0, 1) if play.producers_die and each else None for each in range(play.processes)]
        works = [(produce, die) for die in dies] + [(put_without_leases, dies[-1])] * play.putters
        producers = [
            place.launch(be_producer, work, handle, play, this.seed + at, die) for at, (work, die) in enumerate(works)
        ]
        while True:
            trainers = [feed]
            if play.is_beside:
                trainers = [place.launch(be_seat, play, this, handle, *seat) for seat in this.seats]
            if this.victim and this.die_after is None:
                kill_early(play, this, draws.uniform(0, 0.5))
            ends = [place.end_of(process) for process in trainers]
            has_ended = sum(kind == "end" for kind, *_ in since_begin(play)) == len(trainers)
            if {*ends} & {"hangs", "failed"} or not (this.victim or has_ended):
                return f"the trainers' ends: {ends}, {this}", number
            number += 1
            if has_ended or this.victim == "pid feed":
                break
            this = begin(play, seed, number, deaths, draws)
            producers.append(place.launch(be_producer, produce_again, handle, play, this.seed, None))
    ends = [place.end_of(process) for process in [*producers, *([feed] if feed else [])]]
    if {*ends} & {"hangs", "failed"}:
        return f"the producers' ends, and the feed's: {ends}, {this}", number
    return "ended" if has_ended else "", number


def kill_early(play: Play, this: Try, after_s: float) -> None:
    """Kill the feed's process, or all of the training, as a launcher does: those that have begun wait for others."""
    victims = [this.victim] if this.victim == "pid feed" else [f"pid seat {rank} {peer}" for rank, peer in this.seats]
    wait_until(lambda: all((play.folder / name).exists() for name in victims))
    time.sleep(after_s)
    for name in victims:
        with suppress(ProcessLookupError):
            os.kill(int((play.folder / name).read_text()), signal.SIGKILL)


def since_begin(play: Play) -> list[list[str]]:
    """Return what was written down in this try."""
    lines = read(play.folder)
    return lines[max(number for number, (kind, *_) in enumerate(lines) if kind == "begin") :]


@contextmanager
def in_cluster() -> Iterator[Cluster]:
    """Have a cluster of Ray's."""
    from tests.clusters.clusters import make_cluster

    with make_cluster(num_cpus=2, object_store_memory=100 << 20):
        yield Cluster()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; without one a fresh one")
    parser.add_argument("--actor", action="store_true", help="the feed is in an actor of Ray's")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    began, failed = time.monotonic(), 0
    DataLoader([0], num_workers=1)  # imports what all forks need
    gc.freeze()
    faulthandler.enable()
    with in_cluster() if arguments.actor else nullcontext() as place:
        for seed in range(first, first + arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                found = play_one(seed, Path(folder), place)
            if found:
                failed += 1
                print(f"seed {seed}: {found}", flush=True)
    print(f"{arguments.runs} runs from seed {first} in {time.monotonic() - began:.0f} s, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    from tests.online import chaos  # whose classes and functions other processes know by this name

    chaos.main()
