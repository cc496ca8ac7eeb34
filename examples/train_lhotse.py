"""Train on speech in lhotse's dynamic buckets; stop in the middle of an epoch, and resume with other workers.

    pip install lhotse
    python examples/train_lhotse.py

lhotse's sampler reads cuts lazily, and puts those of like lengths into batches of so many seconds. It is given to the
loader as it is, and workers turn its batches of cuts into tensors. The losses of the resumed training are those of the
training that nobody stopped, to the bit, noise included. The recordings are tones that are made here.
"""

import itertools
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.dataset import DynamicBucketingSampler
from torch import Tensor, nn
from torch.utils.data import Dataset

from asyncloader import DataLoader, sample_rng

RATE, NUM_TONES = 2000, 4
STOP_AT, EPOCHS = 7, 2


def write_cuts(path: Path) -> None:
    """Write 200 cuts of half a second to three seconds, each with the number of its tone."""
    lengths = random.Random(0)
    with CutSet.open_writer(path) as writer:
        for number in range(200):
            samples = lengths.randint(RATE // 2, 3 * RATE)
            name, seconds = f"cut-{number:03}", samples / RATE
            tone = SupervisionSegment(name, name, 0, seconds, text=str(number % NUM_TONES))
            recording = Recording(name, [], RATE, samples, seconds)
            writer.write(MonoCut(name, 0, seconds, 0, [tone], recording=recording))


class Tones(Dataset[dict[str, Tensor]]):
    """A batch of cuts as tensors; the tones are computed where a corpus would be read (`cut.load_audio()`)."""

    def __getitem__(self, batch: Any) -> dict[str, Tensor]:
        tones = torch.tensor([int(cut.supervisions[0].text) for cut in batch])
        audio = torch.zeros(len(tones), max(cut.num_samples for cut in batch))
        for row, tone, cut in zip(audio, tones, batch, strict=True):
            times = torch.arange(cut.num_samples) / RATE
            noise = torch.from_numpy(sample_rng().normal(size=cut.num_samples)).float()  # augmentation
            row[: cut.num_samples] = torch.sin(2 * math.pi * (100 + 60 * tone) * times) + 0.3 * noise
        return {"audio": audio, "tones": tones}


class Training:
    """The objects of one process."""

    def __init__(self, cuts: Path, num_workers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv1d(1, 16, 64, stride=8), nn.ReLU(), nn.Conv1d(16, 16, 9), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
            nn.Flatten(), nn.Linear(16, NUM_TONES),
        )  # fmt: skip
        self.epoch = 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)
        lazy = CutSet.from_jsonl_lazy(cuts)
        sampler = DynamicBucketingSampler(lazy, max_duration=20.0, num_buckets=4, shuffle=True, seed=1)
        self.loader = DataLoader(Tones(), batch_size=None, sampler=sampler, num_workers=num_workers)

    def losses(self) -> Iterator[float]:
        """Train to the end, a step for each loss that is taken."""
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            self.loader.set_epoch(epoch)
            for batch in self.loader:
                loss = nn.functional.cross_entropy(self.model(batch["audio"][:, None]), batch["tones"])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                self.optimizer.step()
                yield loss.item()

    def save(self, path: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "loader")}
        torch.save({"epoch": self.epoch, **parts}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.epoch = saved.pop("epoch")
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cuts, checkpoint = Path(folder, "cuts.jsonl"), Path(folder, "checkpoint.pt")
        write_cuts(cuts)
        expected = list(Training(cuts, num_workers=2).losses())
        stopped = Training(cuts, num_workers=2)
        losses = list(itertools.islice(stopped.losses(), STOP_AT))
        stopped.save(checkpoint)
        for num_workers in (1, 0):
            resumed = Training(cuts, num_workers)
            resumed.load(checkpoint)
            assert losses + list(resumed.losses()) == expected
    first, *_, last = expected
    print(f"loss {first:.2f} to {last:.2f} in {len(expected)} steps of batches of 20 seconds")
    print(f"stopped after {STOP_AT} and resumed with 1 worker and with none in place of 2: the same losses")


if __name__ == "__main__":
    main()
