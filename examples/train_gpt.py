"""Train a small GPT on two ranks, stop in the middle, resume on one: the losses are those of the run without a stop.

    python examples/train_gpt.py [--steps 36] [--stop-after 15]

The text is what comes with installed packages: their licences and their descriptions, two sources of which 3 and 7 of
10 documents are. Documents are packed into blocks of 256 bytes, 8 blocks a step over all ranks, and attention does not
look from one document into another. Exits with 1 if any loss differs by more than what the order of additions makes.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset

from asyncloader import DataLoader
from asyncloader.samplers import MixtureSampler, PackingBatchSampler, packed

BLOCK = 256
BLOCKS_PER_STEP = 8
VOCABULARY = 257  # bytes, and the end of a text
END = 256
MOST_TEXTS = 200


class Texts(Dataset[Tensor]):
    """Texts as rows of bytes, none longer than a block."""

    def __init__(self, texts: list[str]) -> None:
        rows = (torch.tensor([*text.encode(), END], dtype=torch.uint16) for text in texts)
        self.rows = [part for row in rows for part in torch.split(row, BLOCK)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def texts_of_packages() -> tuple[list[str], list[str]]:
    """Return licences and descriptions of installed packages, a text for each paragraph of 80 characters and more."""
    licences: set[str] = set()
    descriptions: set[str] = set()
    for package in importlib.metadata.distributions():
        for file in package.files or ():
            if ".dist-info/" in str(file) and ("LICENSE" in file.name.upper() or "COPYING" in file.name.upper()):
                licences.update(Path(str(file.locate())).read_text(errors="replace").split("\n\n"))
        _, _, description = (package.read_text("METADATA") or "").partition("\n\n")
        descriptions.update(description.split("\n\n"))
    long_ones = ([text.strip() for text in sorted(texts) if len(text) >= 80] for texts in (licences, descriptions))
    some_licences, some_descriptions = (texts[:: max(1, len(texts) // MOST_TEXTS)] for texts in long_ones)
    return some_licences, some_descriptions


class Layer(nn.Module):
    """Attention within documents, then two linear maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_maps = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.maps = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.maps(self.before_maps(x))
        return result


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 48, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        documents = batch["document_ids"]
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_loader(texts: tuple[list[str], list[str]], rank: int, ranks: int) -> DataLoader[Any]:
    """Return the loader of one rank: a mixture, packed. However many ranks there are, a step has the same blocks."""
    sources = [Texts(own) for own in texts]
    dataset: ConcatDataset[Tensor] = ConcatDataset(sources)
    sampler = PackingBatchSampler(
        [len(row) for source in sources for row in source.rows],
        block_size=BLOCK,
        batch_size=BLOCKS_PER_STEP // ranks,
        sampler=MixtureSampler(dataset, [3, 7]),
        num_replicas=ranks,
        rank=rank,
    )
    if rank == 0:
        sizes = " and ".join(str(len(source)) for source in sources)
        print(f"{ranks} rank{'s' * (ranks > 1)}: {sizes} texts, blocks are {sampler.fill:.1%} full", flush=True)
    return DataLoader(**packed(dataset, sampler, shift_labels=True), num_workers=1)


def train(
    rank: int,
    ranks: int,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    texts: tuple[list[str], list[str]],
    steps: int,
    folder: Path,
    save_to: str,
    load_from: str,
) -> None:
    """Train up to a step on one of the ranks; begin with a checkpoint, if one is named. The first rank saves one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{save_to}", rank=rank, world_size=ranks)
    loader = make_loader(texts, rank, ranks)
    losses: list[float] = []
    if load_from:
        saved = torch.load(folder / load_from, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))  # of rank 0, on however many ranks: it serves all
        losses = saved["losses"]
    with iter(loader) as batches:
        while len(losses) < steps:
            losses.append(step(model, optimizer, next(batches)))
    if rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "loader": json.dumps(loader.state_dict()), "losses": losses}, folder / save_to)
    dist.barrier()
    dist.destroy_process_group()


def step(model: GPT, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """Take one step; return the mean loss of all ranks' labels, whichever rank has how many of them."""
    labels = batch["labels"]
    loss = functional.cross_entropy(model(batch).flatten(0, 1), labels.flatten(), reduction="sum")
    total = torch.stack([loss.detach(), (labels >= 0).sum()])
    dist.all_reduce(total)
    optimizer.zero_grad()
    (loss / total[1]).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return float(total[0] / total[1])


def run(ranks: int, *arguments: Any) -> None:
    """Train on so many ranks, each a process that is forked from this one."""
    mp.start_processes(train, (ranks, *arguments), nprocs=ranks, start_method="fork")  # type: ignore[attr-defined, no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--stop-after", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begun = (model, optimizer, texts_of_packages())  # each process begins with a copy of these
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(2, *begun, args.steps, folder, "whole", "")
        run(2, *begun, args.stop_after, folder, "stopped", "")
        run(1, *begun, args.steps, folder, "resumed", "stopped")
        whole, resumed = (torch.load(folder / of, weights_only=True)["losses"] for of in ("whole", "resumed"))

    print(f"\n step   without a stop   stopped after {args.stop_after}, then one rank")
    for number, losses in enumerate(zip(whole, resumed, strict=True), 1):
        if number % 5 == 0 or number in (1, args.stop_after, args.stop_after + 1, args.steps):
            print(
                f"{number:5} {losses[0]:16.4f} {losses[1]:16.4f}{'   two ranks' if number <= args.stop_after else ''}"
            )
    difference = max(abs(one - other) for one, other in zip(whole, resumed, strict=True))
    print(f"largest difference of {len(whole)} losses: {difference:.6f}")
    if difference > 1e-3:
        sys.exit("the losses are not the same")


if __name__ == "__main__":
    main()
