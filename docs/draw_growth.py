"""Draw the pictures of docs/benchmarks.md of what tests/benchmarks/growth.py wrote.

python docs/draw_growth.py growth.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent
STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "#0f172a", "marker": "s", "markersize": 7, "markerfacecolor": "white"},
    "ours": {"color": "#2563eb", "marker": "o", "markersize": 4},
    "the bound": {"color": "#64748b", "ls": ":"},
}
OTHER = {"color": "#0891b2", "marker": "^", "markersize": 7, "ls": "--", "markerfacecolor": "white"}
STYLES |= {"ours, 0 workers": STYLES["ours"], "ours, 2 workers": OTHER, "ours, ElasticSampler": OTHER}


class Growing(NamedTuple):
    """What grows, the figure that is shown of it, and how the axes are called."""

    title: str
    figure: str
    x: str
    y: str


PICTURES = (
    Growing("workers", "samples/s", "workers, of samples that sleep 10 ms", "samples a second"),
    Growing("bytes a batch", "GB/s", "bytes of a batch", "GB a second"),
    Growing("samples", "s", "samples of the dataset, shuffled", "seconds to the first batch"),
    Growing("in flight", "samples/s", "samples in flight, each waits 20 ms", "samples a second"),
)


def points(found: dict[str, Any], growing: Growing) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """Return for each side how large it was and what was seen."""
    curves: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for title, sides in found.items():
        what, _, size = title.rpartition(", ")
        if what == growing.title and size.isdigit():
            for name, side in sides.items():
                curves.setdefault(name, []).append((int(size), side[growing.figure]))
    return curves


def draw(axis: Axes, found: dict[str, Any], growing: Growing) -> None:
    """One thing that grows: a line for each side, with its lowest and highest round."""
    for name, curve in points(found, growing).items():
        sizes = [size for size, _ in curve]
        middles = [seen["median"] for _, seen in curve]
        around: Sequence[Any] = [
            [seen["median"] - seen["low"] for _, seen in curve],
            [seen["high"] - seen["median"] for _, seen in curve],
        ]
        look = STYLES[name]
        order = 3 if look is STYLES["ours"] else 2  # small, and in the larger marks where lines coincide
        if name == "the bound":
            axis.plot(sizes, middles, label=name, **look)
            continue
        axis.errorbar(sizes, middles, around, label=name.replace("ours", "asyncloader"), capsize=2, linewidth=1.4,
                      zorder=order, **look)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    if sizes[-1] < 10_000:
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.xaxis.minorticks_off()
    axis.set_xlabel(growing.x, fontsize=9)
    axis.set_ylabel(growing.y, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(color="#e2e8f0", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)


def main() -> None:
    """Draw all four in one picture."""
    found = json.loads(Path(sys.argv[1]).read_text())["found"]
    figure, axes = pyplot.subplots(2, 2, figsize=(8.6, 7), layout="constrained")
    for axis, growing in zip(axes.flat, PICTURES, strict=True):
        draw(axis, found, growing)
    figure.savefig(DOCS / "images" / "growth.png", dpi=130)


if __name__ == "__main__":
    main()
