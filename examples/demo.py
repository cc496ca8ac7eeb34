"""One training beside torch's loader: how long it waits for data, a worker that is killed, a resume on fewer workers.

    python examples/demo.py [--epochs 4]        # or: make demo

Needs nothing but asyncloader. Takes half a minute on two cores; exits with 1 if weights differ that should be the same.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.testing import fingerprint

SIZE, CROP = 40, 32
COUNT, BATCH_SIZE = 1536, 64
BATCHES = COUNT // BATCH_SIZE
SAVED_AFTER = 10  # batches


class Pictures(Dataset[tuple[Tensor, int]]):
    """Compressed pictures of stripes in noise; a random part of each is read. The class is the stripes' direction.

    Args:
        flag: The worker that reads picture 700 first kills itself, and leaves this file behind.
    """

    def __init__(self, flag: Path | None = None) -> None:
        noise = torch.Generator().manual_seed(0)
        rows = torch.arange(SIZE)[:, None].expand(SIZE, SIZE)
        stripes = [(pattern // 4 % 2 * 100).to(torch.uint8) for pattern in (rows, rows.T, rows + rows.T)]
        self.files = [
            zlib.compress(
                (stripes[at % 3] + torch.randint(100, (3, SIZE, SIZE), generator=noise)).byte().numpy().tobytes()
            )
            for at in range(COUNT)
        ]
        self.flag = flag

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 700 and self.flag is not None and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.files[index])), dtype=torch.uint8)
        top, left = torch.randint(SIZE - CROP, (2,)).tolist()
        return pixels.reshape(3, SIZE, SIZE)[:, top : top + CROP, left : left + CROP] / 255, index % 3


class Training:
    """A small network and its optimizer, always with the same weights at the beginning."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.steps = 0
        self.waited_s = 0.0
        torch.manual_seed(2)  # loaders draw the order and the seeds of an epoch from torch's generator

    def train(self, batches: Iterable[list[Tensor]]) -> None:
        """Take a step with each batch, and count the time until each came."""
        asked = time.perf_counter()
        for pictures, classes in batches:
            self.waited_s += time.perf_counter() - asked
            loss = nn.functional.cross_entropy(self.model(pictures), classes)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            self.optimizer.step()
            self.steps += 1
            asked = time.perf_counter()
        self.waited_s += time.perf_counter() - asked

    def weights(self) -> str:
        """Return 16 digits that are the same if all weights are, to the bit."""
        return fingerprint([self.model.state_dict()])


def run_side(name: str, epochs: int) -> None:
    """Train in this process, and print a line of JSON after each epoch."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2, "multiprocessing_context": "forkserver"}
    loader: Iterable[Any]
    if name == "torch":
        loader = TorchLoader(Pictures(), BATCH_SIZE, **options)
    else:  # by default each batch has random numbers of its own, so that workers may die; here, torch's
        loader = DataLoader(Pictures(), BATCH_SIZE, seeding="worker", **options)
    training = Training()
    for _ in range(epochs):
        waited_before, began = training.waited_s, time.perf_counter()
        training.train(loader)
        seconds = training.waited_s - waited_before, time.perf_counter() - began
        print(json.dumps([*seconds, training.weights()]), flush=True)


def compare_waiting(epochs: int) -> bool:
    """Run both sides, each in a process of its own, as a fork server is one for all loaders of a process."""
    print("\n1. The same training with both loaders, two workers from the fork server, Python 3.14's default")
    waited: dict[str, float] = {}
    weights: dict[str, str] = {}
    for name in ("torch", "asyncloader"):
        command = [sys.executable, __file__, "--side", name, "--epochs", str(epochs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as side:
            assert side.stdout is not None
            waited[name] = 0.0
            for epoch, line in enumerate(side.stdout, 1):
                waited_s, took_s, weights[name] = json.loads(line)
                waited[name] += waited_s
                print(f"   {name:12} epoch {epoch}: {took_s:5.2f} s, {waited_s:5.2f} s of it waiting", flush=True)
        if side.returncode:
            return False
    same = weights["torch"] == weights["asyncloader"]
    theirs_s, ours_s = waited["torch"], waited["asyncloader"]
    print(f"   Training waited {theirs_s:.1f} s for torch's loader, {ours_s:.1f} s for ours. {words(same)}")
    print("   (With persistent_workers=True torch's loader, too, starts its workers once.)")
    return same


def words(same: bool) -> str:
    """Say whether weights are the same."""
    return "The weights are the same, to the bit." if same else "THE WEIGHTS DIFFER."


def undisturbed() -> str:
    """Return the weights after an epoch in which nothing happens."""
    training = Training()
    training.train(DataLoader(Pictures(), BATCH_SIZE, shuffle=True, num_workers=2))
    return training.weights()


def kill_a_worker(expected: str, folder: Path) -> bool:
    """Train for an epoch in which a worker is killed, with either loader."""
    print("\n2. One of two workers is killed in the middle of an epoch, as by the kernel when memory runs out")
    theirs = Training()
    try:
        theirs.train(TorchLoader(Pictures(folder / "torch"), BATCH_SIZE, shuffle=True, num_workers=2))
    except (RuntimeError, OSError, EOFError) as error:  # the latter: the process that is gone was to send a tensor
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise the same once more, anywhere
        says = str(error).partition("\n")[0].strip()
        print(f"   torch        {theirs.steps} of {BATCHES} batches, then {type(error).__name__}: {says}")
    ours = Training()
    ours.train(DataLoader(Pictures(folder / "asyncloader"), BATCH_SIZE, shuffle=True, num_workers=2))
    same = ours.weights() == expected
    print(f"   asyncloader  {ours.steps} of {BATCHES} batches. {words(same)}", flush=True)
    return same and (folder / "asyncloader").exists()


def resume(expected: str, folder: Path) -> bool:
    """Save a checkpoint in the middle of an epoch, and go on from it with other objects and one worker less."""
    print(f"\n3. A checkpoint after batch {SAVED_AFTER}, with two workers, is resumed with one")
    before = Training()
    loader = DataLoader(Pictures(), BATCH_SIZE, shuffle=True, num_workers=2)
    with iter(loader) as batches:
        before.train(next(batches) for _ in range(SAVED_AFTER))
        parts = {"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()}
        torch.save({**parts, "loader": loader.state_dict()}, folder / "checkpoint.pt")
    after = Training()
    saved = torch.load(folder / "checkpoint.pt")
    after.model.load_state_dict(saved["model"])
    after.optimizer.load_state_dict(saved["optimizer"])
    other = DataLoader(Pictures(), BATCH_SIZE, shuffle=True, num_workers=1)
    other.load_state_dict(saved["loader"])
    after.train(other)
    same = after.weights() == expected
    print(f"   asyncloader  {after.steps} batches were left. {words(same)}")
    print("   torch        has no state: it begins the epoch again, in another order")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--side", choices=["torch", "asyncloader"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for more, and the workers want the other cores
    if arguments.side:
        run_side(arguments.side, arguments.epochs)
        return
    print(f"{COUNT} pictures, batches of {BATCH_SIZE}, a small network, {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as name:
        well = compare_waiting(arguments.epochs)
        expected = undisturbed()
        well = kill_a_worker(expected, Path(name)) and well
        well = resume(expected, Path(name)) and well
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
