"""Feeds under random disturbances: the trainer, its workers and its producers are killed at random moments.

    python -m tests.online.chaos --runs 100 [--seed 7]

A trainer writes states; whenever it is killed, another one goes on from the last state. Most deaths come a moment after
some steps, so that states have batches in flight. What has to hold:

- in the history that the states make, each item is trained exactly once;
- the trainer comes to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError, FeedHandle, Sample

ITEMS = 200
LONGEST_S = 60.0


class Play(NamedTuple):
    """What one run is played with."""

    folder: Path
    max_staleness: int | None
    num_workers: int
    prefetch_factor: int | None
    tasks: int
    processes: int
    save_every: int
    pace_s: float
    step_s: float
    producers_die: bool
    workers_die: bool


class Fragile(NamedTuple):
    """Makes samples, and kills the worker that makes some of them for the first time."""

    play: Play
    trainer: int

    def __call__(self, sample: Sample[int]) -> int:
        """Return what was put."""
        if self.play.workers_die and sample.value % 50 == 7 and os.getpid() != self.trainer:
            with suppress(FileExistsError):
                (self.play.folder / f"died at {sample.value}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return sample.value


def note(play: Play, *words: object) -> None:
    """Append a line to the history, at once and whole."""
    file = os.open(play.folder / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


async def produce(source: Any, play: Play, seed: int) -> None:
    """Lease and put, at once or in parts, at some pace; fail now and then, or give back what is made so far."""
    draws = random.Random(seed)
    async for item in source.leases():
        with suppress(ZeroDivisionError):
            async with item:
                work = asyncio.create_task(asyncio.sleep(draws.expovariate(1) * play.pace_s))
                if draws.random() < 0.3:  # nobody works on what is lost
                    lost = asyncio.create_task(item.lost())
                    await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
                    lost.cancel()
                    if not work.done():
                        work.cancel()
                        continue
                await work
                drawn = draws.random()
                if drawn < 0.1:
                    raise ZeroDivisionError
                if drawn < 0.2:
                    item.retry(value=item.value)
                elif drawn < 0.5:
                    item.add(item.value)
                    await item.done()
                else:
                    await item.put(item.value)


def produce_elsewhere(handle: FeedHandle, play: Play, seed: int, dies_after_s: float | None) -> None:
    """Be a producer's process, which ends with the feed, or dies."""
    if dies_after_s is not None:
        threading.Timer(dies_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with suppress(FeedClosedError):
        asyncio.run(produce(handle, play, seed))


async def train(play: Play, seed: int, die_after: int | None) -> None:
    """Go on from the last state, to the end, or die a moment after so many steps."""
    feed = Feed(
        range(ITEMS), batch_size=4, max_samples=24, max_staleness=play.max_staleness, on_stale="keep",
        max_retries=10**6, fn=Fragile(play, os.getpid()),
    )  # fmt: skip
    loader, step = DataLoader(feed, num_workers=play.num_workers, prefetch_factor=play.prefetch_factor), 0
    if (play.folder / "state").exists():
        step, state = pickle.loads((play.folder / "state").read_bytes())
        loader.load_state_dict(state)
    note(play, "begin", step)
    deaths = [random.Random(seed).uniform(0, 1) if play.producers_die and number else None for number in range(3)]
    arguments = [(feed.handle(), play, seed + number, deaths[number]) for number in range(play.processes)]
    processes = [mp.get_context("fork").Process(target=produce_elsewhere, args=each) for each in arguments]
    for process in processes:
        process.start()
    tasks = [asyncio.create_task(produce(feed, play, seed - number)) for number in range(1, play.tasks + 1)]
    async for batch in loader:
        note(play, "trained", step, *batch.tolist())
        step += 1
        if die_after is not None and (die_after := die_after - 1) == 0:
            threading.Timer(random.Random(seed).uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGKILL)).start()
        await asyncio.sleep(play.step_s)  # batches are in flight meanwhile
        feed.pause()  # while the weights are on their way
        await asyncio.sleep(0)
        feed.version = max(step, feed.version)
        feed.resume()
        if step % play.save_every == 0:
            state = loader.state_dict()
            (play.folder / "new").write_bytes(pickle.dumps((step, state)))
            (play.folder / "new").replace(play.folder / "state")
    await asyncio.gather(*tasks)
    note(play, "end")


def be_trainer(play: Play, seed: int, die_after: int | None) -> None:
    """Be the trainer's process."""
    asyncio.run(train(play, seed, die_after))


def check(history: list[list[str]]) -> str:
    """Return what does not hold; nothing if all does."""
    trained: dict[int, list[int]] = {}
    for kind, *words in history:
        if kind == "begin":
            trained = {step: values for step, values in trained.items() if step < int(words[0])}
        elif kind == "trained":
            trained[int(words[0])] = [*map(int, words[1:])]
    values = sorted(value for batch in trained.values() for value in batch)
    if values != [*range(ITEMS)]:
        lost, twice = set(range(ITEMS)) - set(values), {value for value in values if values.count(value) > 1}
        return f"lost: {sorted(lost)}; trained twice: {sorted(twice)}"
    return ""


def play_one(seed: int, folder: Path) -> str:
    """Play one run; return what does not hold."""
    draws = random.Random(seed)
    num_workers = draws.choice([0, 1, 2, 2])
    play = Play(
        folder,
        max_staleness=draws.choice([None, None, 0, 2, 4]),
        num_workers=num_workers,
        prefetch_factor=draws.randint(1, 3) if num_workers else None,
        tasks=draws.randint(0, 3),
        processes=draws.randint(1, 2),
        save_every=draws.randint(1, 4),
        pace_s=draws.choice([0.0, 0.0, 0.002, 0.01]),
        step_s=draws.choice([0.0, 0.005, 0.01]),
        producers_die=draws.random() < 0.5,
        workers_die=draws.random() < 0.3,
    )
    deaths = [None if draws.random() < 0.2 else draws.randint(1, 20) for _ in range(draws.randint(1, 4))]
    for life, die_after in enumerate([*deaths, None]):
        arguments = (play, seed * 1000 + life * 10, die_after)
        trainer = mp.get_context("fork").Process(target=be_trainer, args=arguments)
        trainer.start()
        is_early = life < len(deaths) and die_after is None
        trainer.join(draws.uniform(0, 0.5) if is_early else LONGEST_S)
        if trainer.exitcode is None:
            trainer.kill()
            trainer.join()
            if not is_early:
                return f"the trainer did not end: {play}, {read(folder)[-5:]}"
        elif trainer.exitcode == 0:
            break
        elif trainer.exitcode != -signal.SIGKILL or life == len(deaths):
            return f"the trainer has failed: {play}"
    found = check(read(folder))
    return f"{found}: {play}, {deaths}" if found else ""


def read(folder: Path) -> list[list[str]]:
    """Return the history so far."""
    path = folder / "history"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; without one a fresh one")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    began, failed = time.monotonic(), 0
    for seed in range(first, first + arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            found = play_one(seed, Path(folder))
        if found:
            failed += 1
            print(f"seed {seed}: {found}", flush=True)
    print(f"{arguments.runs} runs from seed {first} in {time.monotonic() - began:.0f} s, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
