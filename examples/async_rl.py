"""Train a small policy by reinforcement learning while its rollouts are being made: what `asyncloader.online` is for.

    python examples/async_rl.py [--rollouts tasks|http|processes] [--steps 60] [--staleness 2] [--producers 32]

The task: add two digits; the reward is 1 for the right sum. Each prompt gets a group of 8 answers, whose advantages are
taken within the group (GRPO). An answer takes its time, as one of an inference engine does, and few take much longer.
Rollouts are made by tasks of the event loop, by an HTTP server that is asked as vLLM is, or by four processes.
The same run is made twice: with `max_staleness=0`, where rollouts and training alternate, and with rollouts that may be
some versions old, where they overlap. The second one is stopped in the middle, and resumed from a file. Ends with both
accuracies, the ages of what was trained, and the gain of overlap, from the first batch on.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from async_rl_engines import DIGITS, ENGINES, GROUP, Policy
from asyncloader import DataLoader
from asyncloader.online import Feed, Sample

BATCH = 16 * GROUP
STEP_S = 0.03


class Run(NamedTuple):
    """How long training took from the first batch on, and how old its samples were."""

    seconds: float
    ages: Counter[int]


class Trainer:
    """The policy, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 2e-3)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """Take a few steps on a batch, with PPO's clipped ratio: it may be of older weights."""
        for _ in range(4):
            log_p = self.policy(batch["prompt"]).log_softmax(1)
            ratio = (log_p.gather(1, batch["answer"][:, None])[:, 0] - batch["log_p"]).exp()
            advantage = batch["advantage"]
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(log_p.exp() * log_p).sum(1).mean()
            self.optimizer.zero_grad()
            (-gain - 0.01 * entropy).backward()
            self.optimizer.step()
        time.sleep(STEP_S)  # a larger model's step, on a device

    def accuracy(self) -> float:
        """Return the share of all sums that the most likely answer gets right."""
        prompts = torch.cartesian_prod(torch.arange(DIGITS), torch.arange(DIGITS))
        with torch.no_grad():
            return float((self.policy(prompts).argmax(1) == prompts.sum(1)).float().mean())


def with_version(sample: Sample[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Make a sample of the dataset: what was put, and the version of the weights that made it."""
    return {**sample.value, "version": sample.version}


async def train(trainer: Trainer, options: argparse.Namespace, staleness: int, steps: int, file: Path) -> Run:
    """Train so many steps, from a file if it is there, and write it at the end."""
    ages: Counter[int] = Counter()
    with Feed(itertools.count(), batch_size=BATCH, group_size=GROUP, max_staleness=staleness, fn=with_version) as feed:
        loader = DataLoader(feed)
        if await asyncio.to_thread(file.exists):
            saved = await asyncio.to_thread(torch.load, file)
            trainer.policy.load_state_dict(saved["policy"])
            trainer.optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            print(f"resumed at version {feed.version}, with {feed.stats().ready} groups that wait for training")
        engine = ENGINES[options.rollouts](trainer.policy, options.producers)
        await engine.start(feed)
        step, began = 0, 0.0
        async for batch in loader:
            began = began or time.perf_counter()
            ages.update((feed.version - batch["version"]).tolist())
            await asyncio.to_thread(trainer.step, batch)
            await engine.update(trainer.policy)
            feed.version += 1  # after the engine has the weights: what it makes is of this version, or a newer one
            if (step := step + 1) == steps:
                break
        seconds = time.perf_counter() - began
        states = {"policy": trainer.policy.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        torch.save({**states, "loader": loader.state_dict()}, file)
    await engine.stop()
    return Run(seconds, ages)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", choices=ENGINES, default="tasks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--producers", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times, accuracies = [], []
    with tempfile.TemporaryDirectory() as folder:
        for staleness in (0, options.staleness):
            runs = []
            halves = [options.steps] if staleness == 0 else [options.steps // 2, (options.steps + 1) // 2]
            for steps in halves:
                trainer = Trainer()  # the second half begins as a new process does
                runs.append(asyncio.run(train(trainer, options, staleness, steps, Path(folder) / f"{staleness}.pt")))
            ages = sum((run.ages for run in runs), Counter[int]())
            times.append(sum(run.seconds for run in runs) / options.steps)
            accuracies.append(trainer.accuracy())
            print(f"max_staleness={staleness}: {times[-1]:.3f} s a step, samples by age {dict(sorted(ages.items()))}")
            if max(ages) > staleness:
                sys.exit("samples were older than that")
    print(f"accuracy {accuracies[0]:.0%} with rollouts and training in turn, {accuracies[1]:.0%} with both at once")
    print(f"both at once are {times[0] / times[1]:.2f} times as fast, with rollouts by {options.rollouts}")


if __name__ == "__main__":
    main()
