"""Train a small policy by reinforcement learning while its rollouts are being made: what `asyncloader.online` is for.

    python examples/async_rl.py [--steps 60] [--staleness 2] [--producers 32]

The task: add two digits; the reward is 1 for the right sum. Each prompt gets a group of 8 answers, whose advantages are
taken within the group (GRPO). An answer takes its time, as one of an inference engine does, and few take much longer.
Rollouts and training share one event loop. The same run is made twice: with `max_staleness=0`, where rollouts and
training alternate, and with rollouts that may be some versions old, where they overlap. The second one is stopped in
the middle, and resumed from a file. Ends with both accuracies, the ages of what was trained, and the gain of overlap.
"""

import argparse
import asyncio
import copy
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from asyncloader import DataLoader
from asyncloader.online import Feed, Sample

DIGITS = 6
GROUP = 8
BATCH = 16 * GROUP
ANSWER_S = 0.03


class Policy(nn.Module):
    """Gives the logits of all sums for two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * DIGITS, 512), nn.ReLU(), nn.Linear(512, 2 * DIGITS - 1))

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (prompts, sums)."""
        logits: torch.Tensor = self.layers(functional.one_hot(prompts, DIGITS).flatten(1).float())
        return logits


class Trainer:
    """The policy, its optimizer, and the copy of the policy that answers: the engine."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 2e-3)
        self.engine = copy.deepcopy(self.policy)

    async def answer(self, prompt: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Answer a prompt as often as a group has samples."""
        await asyncio.sleep(random.lognormvariate(0, 0.5) * ANSWER_S)
        with torch.no_grad():
            log_p = self.engine(prompt[None])[0].log_softmax(0)
        answers = torch.multinomial(log_p.exp(), GROUP, replacement=True)
        rewards = (answers == prompt.sum()).float()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows = zip(answers, log_p[answers], advantages, strict=True)
        return [{"prompt": prompt, "answer": a, "log_p": p, "advantage": value} for a, p, value in rows]

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
        time.sleep(ANSWER_S)  # a larger model's step, on a device
        self.engine.load_state_dict(self.policy.state_dict())

    def accuracy(self) -> float:
        """Return the share of all sums that the most likely answer gets right."""
        prompts = torch.cartesian_prod(torch.arange(DIGITS), torch.arange(DIGITS))
        with torch.no_grad():
            return float((self.policy(prompts).argmax(1) == prompts.sum(1)).float().mean())


def with_version(sample: Sample[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Make a sample of the dataset: what was put, and the version of the weights that made it."""
    return {**sample.value, "version": sample.version}


async def produce(feed: Feed[Any], trainer: Trainer) -> None:
    """Answer prompts until the feed is closed."""
    async for item in feed.leases():
        async with item:
            first, second = divmod(item.value * 7 % DIGITS**2, DIGITS)
            await item.put(await trainer.answer(torch.tensor([first, second])))


async def train(trainer: Trainer, staleness: int, steps: int, producers: int, file: Path | None) -> Counter[int]:
    """Train so many steps, from a file if there is one, and write it at the end; return the ages of the samples."""
    ages: Counter[int] = Counter()
    with Feed(itertools.count(), batch_size=BATCH, group_size=GROUP, max_staleness=staleness, fn=with_version) as feed:
        loader = DataLoader(feed)
        if file is not None and await asyncio.to_thread(file.exists):
            saved = await asyncio.to_thread(torch.load, file)
            trainer.policy.load_state_dict(saved["policy"])
            trainer.engine.load_state_dict(saved["policy"])
            trainer.optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            print(f"resumed at version {feed.version}, with {feed.stats().ready} groups that wait for training")
        tasks = [asyncio.create_task(produce(feed, trainer)) for _ in range(producers)]
        step = 0
        async for batch in loader:
            ages.update((feed.version - batch["version"]).tolist())
            await asyncio.to_thread(trainer.step, batch)
            feed.version += 1
            if (step := step + 1) == steps:
                break
        if file is not None:
            states = {"policy": trainer.policy.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            torch.save({**states, "loader": loader.state_dict()}, file)
    await asyncio.gather(*tasks)
    return ages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--producers", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds, accuracies = [], []
    with tempfile.TemporaryDirectory() as folder:
        for staleness in (0, arguments.staleness):
            trainer, ages, began = Trainer(), Counter[int](), time.perf_counter()
            halves = [arguments.steps] if staleness == 0 else [arguments.steps // 2, (arguments.steps + 1) // 2]
            for steps in halves:
                file = None if staleness == 0 else Path(folder) / "state.pt"
                ages += asyncio.run(train(trainer, staleness, steps, arguments.producers, file))
                trainer = trainer if steps is halves[-1] else Trainer()  # as in a process that begins
            seconds.append(time.perf_counter() - began)
            accuracies.append(trainer.accuracy())
            print(f"max_staleness={staleness}: {seconds[-1]:.1f} s, samples by age {dict(sorted(ages.items()))}")
            if max(ages) > staleness:
                sys.exit("samples were older than that")
    print(f"accuracy {accuracies[0]:.0%} with rollouts and training in turn, {accuracies[1]:.0%} with both at once")
    print(f"both at once are {seconds[0] / seconds[1]:.2f} times as fast")


if __name__ == "__main__":
    main()
