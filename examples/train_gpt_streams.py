"""Train a small GPT from JSON lines on two ranks, kill them, go on with three, kill these, and end the epoch with one.

    python examples/train_gpt_streams.py [--checkpoint-every 2]

Two sources of shards are mixed by their bytes, shuffled and packed into blocks. Every few steps, all ranks' states go
into one checkpoint (`asyncloader.streams.merge`), from which any number of ranks resumes. Exits with 1 unless each
document is in the steps of the run exactly once, and the losses equal, bit for bit, those of a run on the same numbers
of ranks that nobody kills.
"""

import argparse
import itertools
import json
import multiprocessing as mp
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncloader import DataLoader
from asyncloader.samplers import pack_collate
from asyncloader.streams import Map, Mix, Pack, ShardedStream, Shuffle, Stream, merge
from asyncloader.streams.reading import json_lines
from train_gpt import BLOCK, END, GPT, step, texts_of_packages

SHARDS = 6
MOST_TEXTS = 60
"""Of a source."""
BLOCKS_PER_RANK = 2
PHASES = (2, 3, 1)
"""Numbers of ranks, one after the other; the last ones go on to the end of the epoch."""
Batch = dict[str, Any]


def write_shards(folder: Path) -> list[str]:
    """Write two sources as shards of JSON lines, and return the names of their documents."""
    names = []
    for source, texts in zip(("licences", "descriptions"), texts_of_packages(), strict=True):
        some = texts[:: -(-len(texts) // MOST_TEXTS)]
        for shard in range(SHARDS):
            documents = [{"name": f"{source} {n}", "text": some[n]} for n in range(shard, len(some), SHARDS)]
            lines = "".join(f"{json.dumps(document)}\n" for document in documents)
            (folder / f"{source}-{shard}.jsonl").write_text(lines)
            names += [document["name"] for document in documents]
    return names


def tokens_of(document: dict[str, str]) -> Batch:
    """Return a document as bytes: as many as fit into a block, with its end."""
    return {"name": document["name"], "input_ids": [*document["text"].encode()[: BLOCK - 1], END]}


def length(document: Batch) -> int:
    """Return how many tokens a document has."""
    return len(document["input_ids"])


def collate(blocks: list[Any]) -> Batch:
    """Lay blocks out as tensors, with the names of the documents in them."""
    names = [document["name"] for block in blocks for document in block]
    return {**pack_collate(blocks, block_size=BLOCK, batch_size=BLOCKS_PER_RANK, shift_labels=True), "names": names}


def make_loader(folder: Path) -> DataLoader[Any]:
    """Return the loader of this rank of the process group."""

    def source(name: str) -> Stream[Batch]:
        return Map(ShardedStream(sorted(folder.glob(f"{name}-*.jsonl")), json_lines), tokens_of)

    mixed = Mix([source("licences"), source("descriptions")], [3, 7], by=length)
    packed = Pack(Shuffle(mixed, size=40), {"bytes": BLOCK}, length, window=40)
    return DataLoader(packed, BLOCKS_PER_RANK, collate_fn=collate, num_workers=1)


def batches_of_all(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Yield batches as long as any rank has some; ranks that have none take part with one of padding."""
    padding = collate([])
    with iter(loader) as batches:
        while True:
            batch = next(batches, None)
            left = torch.tensor(batch is not None, dtype=torch.int32)
            dist.all_reduce(left)
            if not left:
                return
            yield padding if batch is None else batch


def train(
    rank: int, ranks: int, folder: Path, name: str, every: int, last: int | None, dies_at: int | None, killer: Any
) -> None:
    """Train on one of the ranks, from the newest checkpoint of this name on, if there is one.

    Args:
        rank: Which it is.
        ranks: How many there are.
        folder: Of the shards and the checkpoint.
        name: Of the checkpoint.
        every: After so many steps a checkpoint is saved.
        last: The step to stop after; None for the end of the epoch.
        dies_at: The step after which the ranks are killed.
        killer: A barrier, at which they meet whoever does it.
    """
    torch.set_num_threads(1)
    group = folder / f"group-{name}-{ranks}"
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    loader, model = make_loader(folder), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    names: list[str] = []
    if (checkpoint := folder / name).exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        losses, names = saved["losses"], saved["names"]
    since: list[str] = []  # documents of this rank since the checkpoint
    for batch in batches_of_all(loader):
        since += batch.pop("names")
        losses.append(step(model, optimizer, batch))
        if len(losses) == dies_at:
            killer.wait()
            signal.pause()
        if len(losses) % every == 0 or len(losses) == last:
            names += save(checkpoint, loader, since, model, optimizer, losses, names)
            since = []
        if len(losses) == last:
            break
    if last is None:
        save(checkpoint, loader, since, model, optimizer, losses, names)
    dist.destroy_process_group()


def save(
    checkpoint: Path,
    loader: DataLoader[Any],
    since: list[str],
    model: GPT,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    names: list[str],
) -> list[str]:
    """Save a checkpoint of all ranks, whole or not at all; return the documents in it that the last one had not."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (loader.state_dict(), since))
    states, documents = zip(*gathered, strict=True)
    new = [*itertools.chain(*documents)]
    if dist.get_rank() == 0:
        trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        progress = {"loader": merge(states), "losses": losses, "names": names + new}
        torch.save({**trained, **progress}, half := checkpoint.with_suffix(".part"))
        half.replace(checkpoint)
    dist.barrier()
    return new


def run(folder: Path, name: str, every: int, *, is_killed: bool) -> Any:
    """Run all phases, of which each is stopped by a kill or after its last step; return the last checkpoint."""
    for phase, ranks in enumerate(PHASES):
        last = 2 * every * (phase + 1) if phase + 1 < len(PHASES) else None
        dies_at = last + 2 if is_killed and last else None  # what comes after the checkpoint at `last` is lost
        fork = mp.get_context("fork")
        killer = fork.Barrier(ranks + 1, timeout=120)
        rest = (ranks, folder, name, every, None if dies_at else last, dies_at, killer)
        processes = [fork.Process(target=train, args=(rank, *rest)) for rank in range(ranks)]
        for process in processes:
            process.start()
        if dies_at:
            killer.wait()
            for process in processes:
                process.kill()
            print(f"{ranks} ranks were killed after step {dies_at}, two steps after a checkpoint", flush=True)
        for process in processes:
            process.join()
            if process.exitcode != (-signal.SIGKILL if dies_at else 0):
                sys.exit(f"a rank ended with exit code {process.exitcode}")
    return torch.load(folder / name, weights_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint-every", type=int, default=2)
    every = parser.parse_args().checkpoint_every
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        documents = write_shards(folder)
        whole, killed = (run(folder, name, every, is_killed=name == "killed") for name in ("whole", "killed"))
    print(f"{len(killed['losses'])} steps, losses from {killed['losses'][0]:.3f} to {killed['losses'][-1]:.3f}")
    for found in (whole, killed):
        if sorted(found["names"]) != sorted(documents):
            sys.exit(f"{len(found['names'])} documents of {len(documents)}, {len({*found['names']})} different ones")
    print(f"{len(documents)} documents, each once")
    if whole["losses"] != killed["losses"]:
        sys.exit("the losses are not those of the run that nobody has killed")
    print("the losses equal those of the run that nobody has killed, bit for bit")


if __name__ == "__main__":
    main()
