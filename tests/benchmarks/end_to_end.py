"""end_to_end: whole trainings on the CPU, to the same loss.

Both sides train the same model on the same batches in the same order, so they come to the same losses step by step;
that they do is checked. What differs is the time. It begins before the iterator of the first epoch is made, and ends
with the last step.

- images: JPEG photographs of 500 x 375, decoded with Pillow, a random part of each (drawn from its index, so that both
  sides see the same), resized to 64 x 64; a small convolutional network learns which of two photographs a part is of.
- text: blocks of 128 bytes of what installed packages say of themselves, in random order, and a transformer that
  predicts the next byte.
- remote files: the images, of 160 x 160, each answered after 20 ms by an HTTP server on this machine. torch's side
  reads them with a connection that is kept, a request at a time, as a plain dataset does; ours is `RemoteDataset`, 32
  samples in flight in each worker.

2 workers on each side, which stay, batches of 32, 3 epochs; trainer and workers share the cores. "waited %" is the time
that the trainer spent in `next`. Three rounds; with --quick one, of shorter epochs.

No targets: where the trainer is what takes the time, no loader makes it faster.
"""

from __future__ import annotations

import importlib.metadata
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from asyncloader.datasets import RemoteDataset
from tests.benchmarks.bench import Bench, main
from tests.benchmarks.measure import Run, cpu_seconds
from tests.benchmarks.photos import decode, jpegs, photographs
from tests.benchmarks.photos_http import Blocking
from tests.services.fault_server import FaultServer

WORKERS = 2
BATCH = 32
EPOCHS = 3
BLOCK = 128
LATENCY_S = 0.02


class Parts(Dataset[tuple[Tensor, int]]):
    """A part of each photograph, and which of the two it is of."""

    def __init__(self, count: int) -> None:
        self.encoded = photographs(count, (500, 375))

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        chance = random.Random(index)
        side = chance.randrange(96, 320)
        top, left = chance.randrange(375 - side), chance.randrange(500 - side)
        picture = decode(self.encoded[index])[:, top : top + side, left : left + side]
        small = functional.interpolate(picture[None].float(), (64, 64), mode="bilinear", antialias=True)
        return small[0] / 255, index % 2


def labelled(data: bytes, url: str) -> tuple[Tensor, int]:
    """Decode what came from a url; which of the photographs it is of is in its name."""
    return decode(data)[:, ::2, ::2] / 255, int(url.rpartition("/")[2].split(".")[0].split("?")[0]) % 2


class Remote(Blocking):
    """What one writes for torch's loader, with labels."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        return labelled(self.read(index), self.urls[index])


def network() -> nn.Module:
    """Tell two photographs apart."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 2),
    )  # fmt: skip


class NextByte(nn.Module):
    """A transformer of two layers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))

    def forward(self, blocks: Tensor) -> Tensor:
        x = self.bytes(blocks) + self.places(torch.arange(BLOCK))
        logits: Tensor = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return logits


def blocks(count: int) -> TensorDataset:
    """Cut what packages say of themselves into blocks, each with the byte after it."""
    said = "\n".join(sorted(package.read_text("METADATA") or "" for package in importlib.metadata.distributions()))
    text = np.frombuffer(said.encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - BLOCK - 1, count)
    return TensorDataset(torch.from_numpy(np.stack([text[at : at + BLOCK + 1] for at in starts])))


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    pictures, labels = batch
    return functional.cross_entropy(model(pictures), labels)


def text_loss(model: nn.Module, batch: Any) -> Tensor:
    rows = batch[0].long()
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], loader: Callable[[], Any]) -> Run:
    """Train, and return the seconds that it took."""
    torch.manual_seed(0)
    model, losses, waited = make(), [], 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    cpu, began = cpu_seconds(), time.perf_counter()
    batches = loader()
    for _ in range(EPOCHS):
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    took = time.perf_counter() - began
    extras = {"waited %": 100 * waited / took, "cpu s": cpu_seconds() - cpu, "first loss": losses[0]}
    return Run(took, {**extras, "last loss": losses[-1], "steps": float(len(losses))})


def loaded(loader_class: Any, dataset: Any, **options: Any) -> Any:
    shuffled = torch.Generator().manual_seed(1)
    options = {"num_workers": WORKERS, "persistent_workers": True, **options}
    return loader_class(dataset, BATCH, shuffle=True, generator=shuffled, drop_last=True, **options)


def compare(bench: Bench, title: str, sides: Mapping[str, Callable[[], Run]]) -> None:
    """Let the sides train in turns; they must come to the same loss."""
    runs = bench.compare(title, "s", sides, rounds=1 if bench.quick else 3)
    ends = {run.extras["last loss"] for own in runs.values() for run in own}
    if max(ends) - min(ends) > 1e-4 * max(ends):
        raise RuntimeError(f"{title}: the sides came to different losses, {sorted(ends)}")


def measure(bench: Bench) -> None:
    torch.set_num_threads(1)
    few = 4 if bench.quick else 1
    images, text = Parts(1024 // few), blocks(1536 // few)
    for title, make, loss_of, dataset in (
        ("images", network, image_loss, images),
        ("text", NextByte, text_loss, text),
    ):
        sides = {
            name: partial(train, make, loss_of, partial(loaded, loader, dataset))
            for name, loader in bench.loaders.items()
        }
        compare(bench, title, sides)
    objects = {f"{number}.jpg": data for number, data in enumerate(jpegs(512 // few))}
    with FaultServer(objects, LATENCY_S) as server:
        urls = [server.url(name) for name in objects]
        ours = partial(
            loaded, bench.loaders["ours"], RemoteDataset(server.store(), objects, labelled), concurrency=BATCH
        )
        sides = {
            "torch": partial(train, network, image_loss, partial(loaded, bench.loaders["torch"], Remote(urls))),
            "ours": partial(train, network, image_loss, ours),
        }
        compare(bench, "remote files", sides)


if __name__ == "__main__":
    main(__doc__ or "", measure)
