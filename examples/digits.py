"""Handwritten digits as image files on disk: what train_digits.py and train_async.py train on.

Scikit-learn carries 1,797 handwritten digits of 8 x 8 pixels (the test part of a set at UCI). They are written once as
PNG files, one folder per class, and from then on read file by file, as any folder of images is.
"""

import argparse
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Sample = tuple[Tensor, int]  # an image of shape (1, 8, 8), values 0 to 1, and its class

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "digits"


def training_arguments(description: str) -> argparse.ArgumentParser:
    """Make the parser of the command lines of the examples that train on these files."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit with 1 below this (default: 0.97)")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder for the image files (default: %(default)s)")
    return parser


def write_digits(folder: Path) -> None:
    """Write the digits to ``folder/CLASS/NUMBER.png``, unless the folder is there already."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere and moved into place, so that a folder that exists is complete.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        bunch = load_digits()
        for number, (pixels, label) in enumerate(zip(bunch.images, bunch.target, strict=True)):
            path = unfinished / str(label) / f"{number:04}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)
        with contextlib.suppress(OSError):  # another process has just put it there
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class DigitFiles(Dataset[Sample]):
    """Images of a folder with one folder per class, shifted at random by up to one pixel if asked.

    Args:
        files: image files; the name of a file's folder is its class.
        shift: whether to shift each image by -1, 0 or 1 pixel in both directions whenever it is read.
    """

    def __init__(self, files: list[Path], *, shift: bool = False) -> None:
        self.files = files
        self.shift = shift

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path = self.files[index]
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None]
        if self.shift:
            top, left = random.randint(0, 2), random.randint(0, 2)
            pixels = nn.functional.pad(pixels, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return pixels, int(path.parent.name)


def train_and_test_sets(folder: Path) -> tuple[DigitFiles, DigitFiles]:
    """Split the files of a folder, always in the same way, into four parts for training and one for the test."""
    files = sorted(folder.glob("*/*.png"))
    random.Random(0).shuffle(files)
    fifth = len(files) // 5
    return DigitFiles(files[fifth:], shift=True), DigitFiles(files[:fifth])


def small_cnn() -> nn.Module:
    """Make a network of 57,000 parameters that tells digits of 8 x 8 pixels apart."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


class Trainer:
    """The network, its optimizer and the learning rate's schedule; steps are plain blocking torch calls."""

    def __init__(self, steps: int) -> None:
        self.model = small_cnn()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.01, total_steps=steps)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Take one training step and return its loss."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    @torch.no_grad()
    def count_right(self, images: Tensor, labels: Tensor) -> int:
        """Count the images that the network classifies rightly."""
        self.model.eval()
        return int((self.model(images).argmax(1) == labels).sum())


def make_loader() -> tuple[DataLoader[Sample], Callable[[list[Tensor]], float]]:
    """Make a loader and a step, for `asyncloader bench examples/digits.py:make_loader`."""
    write_digits(FOLDER)
    torch.manual_seed(0)
    training, _ = train_and_test_sets(FOLDER)
    trainer = Trainer(steps=100_000)
    return DataLoader(training, batch_size=64, shuffle=True, num_workers=1), lambda batch: trainer.step(*batch)
