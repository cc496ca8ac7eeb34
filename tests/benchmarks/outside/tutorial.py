"""torch's tutorial on data loading: 512 samples of 5 ms, ten epochs, and a small model that is trained meanwhile."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting, loader_class


class Images(Dataset[tuple[Tensor, int]]):
    """Noise in the shape of an image, and 5 ms of sleep in place of a transform."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = torch.randn(3, 224, 224), int(torch.randint(0, 10, (1,)))
        time.sleep(0.005)
        return pixels, label


class Model(nn.Module):
    """The layers of the tutorial: two convolutions, 49 places of 64 channels, two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=4, padding=3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(7), nn.Flatten(2),
        )  # fmt: skip
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.places = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        places: Tensor = self.places(self.features(pixels).transpose(1, 2))
        scores: Tensor = self.head(places.mean(1))
        return scores


def train(name: str, options: dict[str, Any], setting: Setting) -> Run:
    """Train ten epochs; the seconds of all, the starts of workers and of epochs included."""
    torch.manual_seed(42)
    loader = loader_class(name)(Images(96 if setting.quick else 512), batch_size=32, shuffle=True, **options)
    model = Model()
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    began, waited = time.perf_counter(), 0.0
    for _ in range(2 if setting.quick else 10):
        ended = time.perf_counter()
        for pixels, labels in loader:
            waited += time.perf_counter() - ended
            loss = criterion(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            ended = time.perf_counter()
        waited += time.perf_counter() - ended
    return Run(time.perf_counter() - began, {"training waited, s": waited})


FOUR = {"num_workers": 4, "prefetch_factor": 2}
STAY = {**FOUR, "persistent_workers": True}
BENCHMARKS = [
    Benchmark(
        title="ten epochs",
        unit="s",
        whose="torch's tutorial",
        link="https://docs.pytorch.org/tutorials/intermediate/intermediate_data_loading_tutorial.html",
        rules="512 samples, each a tensor of (3, 224, 224) and 5 ms of sleep, batches of 32, four workers; a "
        "small model is trained on the CPU. Seconds for all, starts included.",
        sides={
            "torch": partial(train, "torch", FOUR),
            "torch, persistent workers": partial(train, "torch", STAY),
            "asyncloader": partial(train, "asyncloader", FOUR),
            "asyncloader, persistent workers": partial(train, "asyncloader", STAY),
        },
    )
]
