"""Draw docs/images/timelines.png: torch's DataLoader and ours, one above the other, where some samples are slow.

python docs/draw_timelines.py

It makes both runs itself: samples sleep 4 ms, one in 44 of them 250 ms; batches of 4, two workers, steps of 8 ms. Each
sample tells when and where it was made.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, get_worker_info

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from asyncloader import DataLoader

PICTURE = Path(__file__).resolve().parent / "images" / "timelines.png"
BATCH, BATCHES, WORKERS = 4, 72, 2
SAMPLE_S, SLOW_S, STEP_S = 0.004, 0.25, 0.008
EVERY, FIRST_SLOW = 44, 33
COLORS = {"train": "#86efac", "wait": "#ef4444", "batch": "#93c5fd", "slow": "#1d4ed8"}


class Sleeps(Dataset[Tensor]):
    """Each sample is the worker that made it, and from when to when."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        began = time.perf_counter()
        time.sleep(SLOW_S if index % EVERY == FIRST_SLOW else SAMPLE_S)
        info = get_worker_info()
        return torch.tensor([info.id if info else 0, began, time.perf_counter()], dtype=torch.float64)


class Seen(NamedTuple):
    """One run: spans from when to when, in seconds since `iter`."""

    trainer: list[tuple[float, float, str]]
    workers: list[list[tuple[float, float, str]]]

    @property
    def end(self) -> float:
        """When the last step was over."""
        return self.trainer[-1][1]


def run(loader_class: Any) -> Seen:
    """Train on all of it, and note who did what."""
    seen = Seen([], [[] for _ in range(WORKERS)])
    began = asked = time.perf_counter()
    for batch in loader_class(Sleeps(), BATCH, num_workers=WORKERS):
        got = time.perf_counter()
        time.sleep(STEP_S)
        now = time.perf_counter()
        seen.trainer.extend([(asked - began, got - began, "wait"), (got - began, now - began, "train")])
        start, stop = float(batch[:, 1].min()) - began, float(batch[:, 2].max()) - began
        seen.workers[int(batch[0, 0])].append((start, stop, "slow" if stop - start > SLOW_S else "batch"))
        asked = time.perf_counter()
    return seen


def draw(axis: Axes, title: str, seen: Seen) -> None:
    """A row for the trainer, and one for each worker."""
    rows = [seen.trainer, *seen.workers]
    for place, spans in enumerate(rows):
        for start, stop, kind in spans:
            gap = 0 if kind in ("wait", "train") else 0.001
            axis.barh(-place, max(stop - start - gap, 0), left=start, height=0.7, color=COLORS[kind], linewidth=0)
    axis.set_yticks(
        range(0, -len(rows), -1), ["trainer", *(f"worker {number}" for number in range(WORKERS))], fontsize=9
    )
    waited = sum(stop - start for start, stop, kind in seen.trainer if kind == "wait")
    axis.set_title(f"{title}: {seen.end:.2f} s, of which the trainer waits {waited:.2f} s", fontsize=10, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def annotate(axis: Axes, seen: Seen, text: str) -> None:
    """Point at what the other worker does during the first slow sample."""
    slow = [(start, stop, number) for number, spans in enumerate(seen.workers)
            for start, stop, kind in spans if kind == "slow"]  # fmt: skip
    start, stop, number = min(slow)
    place = -1 - (1 - number)
    at = start + 0.75 * (stop - start)
    axis.annotate(text, (at, place - 0.3), (at, -len(seen.workers) - 1.05), fontsize=8.5, ha="left",
                  color="#334155", arrowprops={"arrowstyle": "->", "color": "#334155", "lw": 0.9})  # fmt: skip
    axis.set_ylim(-len(seen.workers) - 1.4, 0.6)


def main() -> None:
    """Run both, warm, and draw them on one axis of time."""
    runs = {}
    for name, loader in (("torch", TorchLoader), ("asyncloader", DataLoader)):
        run(loader)  # imports, and the first start of workers
        runs[name] = run(loader)
    figure, axes = pyplot.subplots(2, 1, figsize=(9.2, 4.6), sharex=True, layout="constrained")
    draw(axes[0], "torch's DataLoader", runs["torch"])
    annotate(axes[0], runs["torch"], "its window is full: the other worker stands idle, and then the trainer waits")
    draw(axes[1], "asyncloader", runs["asyncloader"])
    annotate(axes[1], runs["asyncloader"], "it goes on, so the batches behind the slow one are ready when that is")
    axes[1].set_xlabel("seconds since iter(loader)", fontsize=9)
    axes[1].tick_params(axis="x", labelsize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in COLORS]
    names = ["trains", "waits", "a batch", "a batch with a slow sample"]
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
