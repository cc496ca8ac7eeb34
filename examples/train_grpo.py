"""Async GRPO: two producers, two data-parallel ranks of two tensor-parallel peers each, and a staleness of 2 at most.

    python examples/train_grpo.py [--kills 10]

A tiny policy learns to add two digits. Producers lease prompts, answer each as often as a group has samples, and put
the group in parts. A group whose answers are all right, or all wrong, teaches nothing: its prompt is dropped, by name.
With ``--kills``, a producer or a process of the training is killed now and then. Another producer takes its place, or
the training begins again from its last state. At the end each prompt was trained once, or is known by name: it was
dropped, or is left because two ranks cannot share it. OpenRLHF#1322 is about prompts lost at restarts.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError, FeedHandle, LeaseLostError, Sample

DIGITS, HIDDEN, GROUP, PROMPTS, BATCH, STALENESS = 6, 256, 8, 120, 8, 2
SEATS = [(rank, peer) for rank in range(2) for peer in range(2)]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "torch.multiprocessing", "asyncloader.online"])


class Policy(nn.Module):
    """Gives the logits of all sums for two digits. A peer has a slice of the hidden layer."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.inward = nn.Linear(2 * DIGITS, hidden)
        self.outward = nn.Linear(hidden, 2 * DIGITS - 1, bias=False)

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (prompts, sums); those of all peers are to be added."""
        logits: torch.Tensor = self.outward(self.inward(functional.one_hot(prompts, DIGITS).flatten(1).float()).relu())
        return logits

    def slices(self, peer: int) -> list[torch.Tensor]:
        """Return views of the parameters that a peer has."""
        at = slice(peer * HIDDEN // 2, (peer + 1) * HIDDEN // 2)
        return [self.inward.weight[at], self.inward.bias[at], self.outward.weight[:, at]]


# ---------------------------------------------------------------------------------------------------------- producers


async def answer(handle: FeedHandle, policy: Policy, folder: Path) -> None:
    """Answer prompts until there are no more. Weights change meanwhile."""
    async for item in handle.leases():
        with suppress(LeaseLostError):
            async with item:
                await asyncio.sleep(random.expovariate(50))  # a long answer
                prompt = torch.tensor(divmod(item.value * 7 % DIGITS**2, DIGITS))
                with torch.no_grad():
                    log_p = policy(prompt[None])[0].log_softmax(0)
                answers = torch.multinomial(log_p.exp(), GROUP, replacement=True)
                rewards = (answers == prompt.sum()).float()
                if rewards.std() == 0:
                    write(folder / "dropped", item.value)
                    item.drop()
                    continue
                for each, advantage in zip(answers, (rewards - rewards.mean()) / rewards.std(), strict=True):
                    item.add({"prompt": prompt, "answer": each, "log_p": log_p[each], "advantage": advantage})
                await item.done()


def produce(handle: FeedHandle, policy: Policy, folder: Path) -> None:
    """Be a producer's process: several prompts at once."""
    torch.set_num_threads(1)

    async def produce_all() -> None:
        await asyncio.gather(*(answer(handle, policy, folder) for _ in range(8)))

    with suppress(FeedClosedError):  # the training was killed
        asyncio.run(produce_all())


# ----------------------------------------------------------------------------------------------------------- training


def with_version(sample: Sample[Any]) -> dict[str, Any]:
    """Return a row, with the number of its prompt and the version of the weights."""
    return {**sample.value, "id": sample.id, "version": sample.version}


def train(seat: tuple[int, int], life: int, policy: Policy, folder: Path, pipe: Connection) -> None:
    """Be a process of the training, from the last state to the end of the prompts."""
    torch.set_num_threads(1)
    (rank, peer), number = seat, SEATS.index(seat)
    dist.init_process_group("gloo", init_method=f"file://{folder}/life{life}", rank=number, world_size=len(SEATS))
    of_peers = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank]
    of_ranks = [dist.new_group([0, 2]), dist.new_group([1, 3])][peer]
    shard = Policy(HIDDEN // 2)
    with torch.no_grad():
        for mine, part in zip(shard.parameters(), policy.slices(peer), strict=True):
            mine.copy_(part)
    optimizer = torch.optim.Adam(shard.parameters(), lr=3e-3)

    feed: Feed[Any] | None = None
    if number == 0:
        feed = Feed(range(PROMPTS), batch_size=BATCH, max_staleness=STALENESS)
    handles = [None if feed is None else feed.handle()]
    dist.broadcast_object_list(handles)
    handle: Any = handles[0]
    loader = DataLoader((feed or handle).for_rank(rank, 2, peer, 2, fn=with_version))
    step, last = 0, folder / "last"
    if last.exists():
        step = int(last.read_text())
        state = torch.load(folder / f"{step}-{number}.pt")
        shard.load_state_dict(state["shard"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    if number == 0:
        pipe.send(handle)  # producers begin when the state is loaded

    for batch in loader:
        assert step - int(batch["version"].min()) <= STALENESS
        partly = shard(batch["prompt"])
        total = partly.detach().clone()
        dist.all_reduce(total, group=of_peers)
        logits = partly + (total - partly).detach()
        log_p = logits.log_softmax(1).gather(1, batch["answer"][:, None])[:, 0]
        ratio, advantage = (log_p - batch["log_p"]).exp(), batch["advantage"]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in shard.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=of_ranks)
            parameter.grad.div_(2)
        optimizer.step()
        if rank == 0:  # the engines' weights first, and their version afterwards
            with torch.no_grad():
                for mine, part in zip(shard.parameters(), policy.slices(peer), strict=True):
                    part.copy_(mine)
        write(folder / f"trained{number}", step, *batch["id"].unique().tolist())
        step += 1
        dist.barrier()
        if feed is not None:
            feed.version = step
        state = {"shard": shard.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, folder / f"{step}-{number}.pt")
        dist.barrier()
        if number == 0:
            (folder / "new").write_text(str(step))
            (folder / "new").replace(last)
            pipe.send(step)
    dist.barrier()
    if feed is not None:  # one that is left alone at the end is no step of two ranks
        pipe.send((feed.stats(), [unit[0] for unit in feed.state_dict()["units"][0]["units"]]))
    dist.destroy_process_group()


def write(path: Path, *numbers: int) -> None:
    """Append a line, at once."""
    with path.open("a") as file:
        file.write(" ".join(map(str, numbers)) + "\n")


# --------------------------------------------------------------------------------------------------------- the program


def live(life: int, policy: Policy, folder: Path, kills: list[int]) -> Any:
    """Start all processes; return the figures at the end, or None if a process of the training was killed."""
    ours, theirs = context.Pipe(duplex=False)
    training = [context.Process(target=train, args=(seat, life, policy, folder, theirs)) for seat in SEATS]
    for process in training:
        process.start()
    theirs.close()
    handle = ours.recv()

    def start_producer() -> Any:
        process = context.Process(target=produce, args=(handle, policy, folder))
        process.start()
        return process

    producers, told = [start_producer() for _ in range(2)], None
    try:
        while isinstance(told := ours.recv(), int):
            if kills and told >= kills[0]:
                victim = random.choice([*range(-2, 4)])
                del kills[0]
                if victim >= 0:
                    training[victim].kill()
                    return None
                producers[victim].kill()
                producers[victim].join()
                producers[victim] = start_producer()
        return told
    finally:
        for process in [*training, *producers]:
            if told is None or isinstance(told, int):
                process.kill()
            process.join()
        ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    policy, life = Policy().share_memory(), 0
    kills = sorted(random.randint(1, 5) for _ in range(options.kills))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while (end := live(life, policy, folder, kills)) is None:
            life += 1
        stats, left = end
        trained: dict[str, list[int]] = {}
        for rank in range(2):
            lines = [[*map(int, line.split())] for line in (folder / f"trained{2 * rank}").read_text().splitlines()]
            steps = {step: prompts for step, *prompts in lines}  # a step that was made again counts once
            trained[f"rank {rank}"] = [prompt for prompts in steps.values() for prompt in prompts]
        dropped = {int(line) for line in (folder / "dropped").read_text().splitlines()}
    both = sorted(trained["rank 0"] + trained["rank 1"])
    missing = set(range(PROMPTS)) - set(both) - dropped - set(left)
    if missing or len(both) != len(set(both)):
        sys.exit(f"lost: {missing}; trained: {both}")
    print(stats)
    without = PROMPTS - len(both) - len(left)
    print(
        f"{options.kills} kills, {life} restarts: {len(both)} prompts trained once, {without} dropped, {len(left)} left"
    )


if __name__ == "__main__":
    main()
