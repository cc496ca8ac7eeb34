"""How long does a training step take with 0 to 8 workers? The experiment of the tinyloader blog post, on more loaders.

    python examples/tinyloader_experiment.py [--epochs 10] [--workers 0 1 2 ...] [--step-s 0.1 0.01] [--out FILE.png]

The experiment and its figures (2,048 samples of 0.5 ms, batches of 64, steps of 0.1 s, 10 epochs) are Teddy Koker's:
"Building a Simple PyTorch DataLoader", https://teddykoker.com/2020/12/dataloader/. Samples and steps only sleep, so it
shows how well a loader keeps its work out of the way of training, not how fast a machine is. The loaders take turns at
each number of workers. What exceeds the length of the step is waiting for data, the start of workers in each epoch
included. Shown are the median epoch, and the shortest and the longest. torchdata's StatefulDataLoader and SPDL's
drop-in for torch's loader take part where they are installed (`pip install torchdata spdl-core`).
"""

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
import torch.utils.data
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from asyncloader import DataLoader

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "tinyloader.png"
BATCH_SIZE = 64

Sample = tuple[npt.NDArray[np.float64], int]
Batches = Iterable[list[Tensor]]


class SleepingDataset(Dataset[Sample]):
    """Samples of the size of a small picture that each take a while to read."""

    def __init__(self, size: int, sample_s: float) -> None:
        self.size = size
        self.sample_s = sample_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.sample_s)
        return np.zeros((3, 32, 32)), 1


class NaiveLoader:
    """The loop one would write first: fetch, collate, hand over."""

    def __init__(self, dataset: SleepingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[list[Tensor]]:
        for start in range(0, len(self.dataset), BATCH_SIZE):
            indices = range(start, min(start + BATCH_SIZE, len(self.dataset)))
            yield default_collate([self.dataset[index] for index in indices])


class StepTime(NamedTuple):
    """Seconds from one step to the next: of the median epoch, the shortest and the longest."""

    median: float
    least: float
    most: float


# By loader, the time per step with each number of workers.
Measured = dict[str, dict[int, StepTime]]


def stateful(dataset: SleepingDataset, workers: int) -> Batches:
    """Make torchdata's loader."""
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torch, which torchdata has not heard of
        made: Batches = loader(dataset, BATCH_SIZE, num_workers=workers)
    return made


def spdl(dataset: SleepingDataset, workers: int) -> Batches:
    """Make SPDL's drop-in for torch's loader."""
    make = importlib.import_module("spdl.dataloader").get_pytorch_dataloader
    made: Batches = make(dataset, BATCH_SIZE, num_workers=workers, in_order=True)
    return made


# Makes a loader with a number of workers; the package that it needs.
LOADERS: dict[str, tuple[Callable[[SleepingDataset, int], Batches], str]] = {
    "naive loop": (lambda dataset, _: NaiveLoader(dataset), "torch"),
    "torch": (lambda dataset, workers: torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=workers), "torch"),
    "StatefulDataLoader": (stateful, "torchdata"),
    "SPDL": (spdl, "spdl"),
    "asyncloader": (lambda dataset, workers: DataLoader(dataset, BATCH_SIZE, num_workers=workers), "asyncloader"),
}
STYLES = {
    "naive loop": ("tab:gray", ""),
    "torch": ("tab:orange", "s"),
    "StatefulDataLoader": ("tab:brown", "^"),
    "SPDL": ("tab:green", "v"),
    "asyncloader": ("tab:blue", "o"),
}


def seconds_per_step(batches: Batches, epochs: int, step_s: float) -> StepTime:
    """Train by sleeping; each epoch has the start of its workers in it."""
    means = []
    for _ in range(epochs):
        started, steps = time.perf_counter(), 0
        for _ in batches:
            time.sleep(step_s)
            steps += 1
        means.append((time.perf_counter() - started) / steps)
    return StepTime(statistics.median(means), min(means), max(means))


def measure(dataset: SleepingDataset, workers: list[int], epochs: int, step_s: float) -> Measured:
    """Measure each loader with each number of workers; the naive loop has none, and is measured once."""
    here = {name: make for name, (make, package) in LOADERS.items() if importlib.util.find_spec(package)}
    measured: Measured = {name: {} for name in here}
    for count in workers:
        for name, make in here.items():
            # SPDL's has processes or nothing
            if (name == "naive loop" and measured[name]) or (name == "SPDL" and not count):
                continue
            took = measured[name][count] = seconds_per_step(make(dataset, count), epochs, step_s)
            shown = " to ".join(f"{seconds * 1000:.2f}" for seconds in took[1:])
            what = f"step of {step_s * 1000:g} ms, {count} workers, {name}"
            print(f"{what}: {took.median * 1000:.2f} ms ({shown})", flush=True)
    return measured


def print_table(measured: Measured, workers: list[int], step_s: float) -> None:
    """Print milliseconds per step as a table in markdown."""
    print(f"\n| workers, step of {step_s * 1000:g} ms | " + " | ".join(measured) + " |")
    print("|---" * (len(measured) + 1) + "|")
    for count in workers:
        row = (f"{times[count].median * 1000:.2f} ms" if count in times else "" for times in measured.values())
        print(f"| {count} | " + " | ".join(row) + " |")
    print()


def draw(panels: dict[float, Measured], out: Path) -> None:
    """Draw step time against number of workers, one panel for each length of the step."""
    matplotlib.use("Agg")  # a picture on disk needs no display
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="constrained")
    for axes, (step_s, measured) in zip(rows[0], panels.items(), strict=True):
        draw_panel(axes, measured, step_s)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def draw_panel(axes: Any, measured: Measured, step_s: float) -> None:
    """Draw one panel: a line per loader, with its range, above the length of the step itself."""
    counts = [count for times in measured.values() for count in times]
    naive = next(iter(measured["naive loop"].values())).median
    axes.axhline(naive * 1000, color=STYLES["naive loop"][0], linestyle="--", label="naive loop (no workers)")
    shown = [name for name in measured if name != "naive loop"]
    for place, name in enumerate(shown):
        color, marker = STYLES[name]
        beside = 0.08 * (place - (len(shown) - 1) / 2)  # so that bars do not lie on one another
        counts_here, times = [count + beside for count in measured[name]], list(measured[name].values())
        around = [[t.median - t.least for t in times], [t.most - t.median for t in times]]
        ms = [[1000 * seconds for seconds in row] for row in ([t.median for t in times], *around)]
        axes.errorbar(counts_here, ms[0], ms[1:], color=color, marker=marker, label=name, capsize=2, linewidth=1.2)
    axes.axhspan(0, step_s * 1000, color="tab:green", alpha=0.15, label="the step itself")
    axes.set(xlabel="num_workers", ylabel="time per step (ms)", title=f"steps of {step_s * 1000:g} ms")
    axes.set_xlim(min(counts) - 0.3, max(counts) + 0.3)
    axes.set_ylim(0, naive * 1450)  # room for the legend
    axes.legend(loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=list(range(9)), metavar="N")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--sample-s", type=float, default=0.0005, metavar="S", help="seconds a sample takes")
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.1], metavar="S", help="seconds a step takes")
    parser.add_argument("--out", type=Path, default=PICTURE, help="picture to draw (default: %(default)s)")
    args = parser.parse_args()

    # torch advises against more workers than cores; these sleep, so cores are not what they share.
    warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    dataset = SleepingDataset(args.samples, args.sample_s)
    panels = {step_s: measure(dataset, args.workers, args.epochs, step_s) for step_s in args.step_s}
    for step_s, measured in panels.items():
        print_table(measured, args.workers, step_s)
    draw(panels, args.out)
    print(f"drawn to {args.out}")


if __name__ == "__main__":
    main()
