"""Make the picture of docs/guides/memory.md of what tests/benchmarks/memory.py wrote.

python docs/draw_memory.py memory.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

PICTURE = Path(__file__).resolve().parent / "images" / "memory.png"
LIST, SHARED, NOTHING = "#a3b1c4", "#3b82f6", "#ffffff"
TORCH, OURS = "", "////"
SIDES = {
    "torch, list": ("torch's loader, a list", LIST, TORCH),
    "ours, list": ("asyncloader, a list", LIST, OURS),
    "torch, SharedList": ("torch's loader, SharedList", SHARED, TORCH),
    "ours, SharedList": ("asyncloader, SharedList", SHARED, OURS),
    "ours, no rows": ("asyncloader, no rows at all", NOTHING, OURS),
}
TITLE = re.compile(r"([\d,]+) dicts, (\d+) workers, (\w+): (.+)")


def read(report: dict[str, Any]) -> tuple[str, dict[str, dict[int, dict[str, float]]]]:
    """Return how many rows there were, and by start method, workers and side by how many MB memory grew."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    rows = ""
    for title, figures in report["found"].items():
        match = TITLE.fullmatch(title)
        if match and match[4] in SIDES:
            rows = match[1]
            found.setdefault(match[3], {}).setdefault(int(match[2]), {})[match[4]] = figures["growth MB"]
    return rows, found


def main() -> None:
    """Draw one panel for each way to start workers: a group of bars for each number of them."""
    rows, found = read(json.loads(Path(sys.argv[1]).read_text()))
    figure, axes = pyplot.subplots(1, len(found), figsize=(9, 3.9), layout="constrained")
    width = 0.92 / len(SIDES)
    for axis, (method, of_workers) in zip(axes, found.items(), strict=True):
        for place, (side, (label, color, hatch)) in enumerate(SIDES.items()):
            heights = [sides[side] for sides in of_workers.values()]
            spots = [group + (place - (len(SIDES) - 1) / 2) * width for group in range(len(heights))]
            bars = axis.bar(
                spots, heights, width, label=label, color=color, hatch=hatch, edgecolor="#1e293b", linewidth=0.6
            )
            axis.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7.5, padding=1)
        axis.set_xticks(range(len(of_workers)), [f"{number} workers" for number in of_workers])
        axis.set_title(f"{method}: MB more in an epoch over {rows} dicts", fontsize=9.5, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(labelsize=8.5)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5, frameon=False
    )
    figure.savefig(PICTURE, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
