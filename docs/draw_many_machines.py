"""Draw the picture of docs/guides/many-machines.md of what tests/benchmarks/many_machines.py wrote.

python docs/draw_many_machines.py many_machines.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

DOCS = Path(__file__).resolve().parent
PICTURES = {"photographs": "photographs: 9.6 MB, 0.25 s", "features": "features: 64 KB, 20 ms"}
COLORS = {1: "#bfdbfe", 10: "#93c5fd", 25: "#60a5fa", 100: "#2563eb", 400: "#1e3a8a"}
MARKS = {"workers": "o", "network": "s", "thread": "^", "order": "D", "training": "v"}


def draw(axis: Axes, title: str, found: dict[str, Any]) -> None:
    """Rate against workers: a line for each link, whose marks say what was the bound."""
    played = [(*map(int, name.split(", ")), cell) for name, cell in found.items()]
    for gbit in sorted({link for _, link, _ in played}):
        curve = sorted((count, cell["batches/s"], cell["limit"]) for count, link, cell in played if link == gbit)
        counts, rates, _ = zip(*curve, strict=True)
        axis.plot(counts, rates, color=COLORS[gbit], linewidth=1.4, label=f"{gbit} Gbit/s", zorder=2)
        for count, rate, limit in curve:
            axis.plot(count, rate, MARKS[limit], color=COLORS[gbit], markersize=4.5, zorder=3)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.set_title(f"{title} a batch", fontsize=9)
    axis.set_xlabel("workers on other machines", fontsize=9)
    axis.set_ylabel("batches a second", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(color="#e2e8f0", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw both side by side."""
    found = json.loads(Path(sys.argv[1]).read_text())["found"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9.4, 3.9), layout="constrained")
    for axis, (name, title) in zip(axes.flat, PICTURES.items(), strict=True):
        draw(axis, title, found[name])
    shown = {cell["limit"] for name in PICTURES for cell in found[name].values()}
    for limit, mark in MARKS.items():
        if limit in shown:
            words = {"thread": "the trainer's thread", "network": "the link"}.get(limit, limit)
            axes[1].plot([], [], mark, color="#64748b", markersize=4.5, label=f"bound: {words}")
    axes[1].legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # Without a date and with ids that stay, so that the file changes only with what it shows.
    matplotlib.rcParams["svg.hashsalt"] = "asyncloader"
    figure.savefig(DOCS / "images" / "many-machines.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
