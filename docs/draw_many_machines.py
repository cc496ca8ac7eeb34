"""Draw the picture of docs/other-machines.md of what tests/benchmarks/many_machines.py wrote.

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
FAST = ("#1e3a8a", "-")
STYLES = {1: ("#0284c7", ":"), 10: ("#2563eb", "--")}
MARKS = {"workers": "o", "network": "s", "thread": "^", "order": "D", "training": "v"}
SAME = 0.03  # lines nowhere further apart than this share are one to the eye

Curve = dict[int, tuple[float, str]]
"""By workers, batches a second and what was the bound."""


def curves(found: dict[str, Any]) -> dict[int, Curve]:
    """Return the curve of each link, by its Gbit/s."""
    by_link: dict[int, Curve] = {}
    for name, cell in found.items():
        count, gbit = map(int, name.split(", "))
        by_link.setdefault(gbit, {})[count] = cell["batches/s"], cell["limit"]
    return {gbit: dict(sorted(by_link[gbit].items())) for gbit in sorted(by_link)}


def coincide(one: Curve, other: Curve) -> bool:
    """Say whether two curves look like one."""
    return all(abs(rate / other[count][0] - 1) < SAME for count, (rate, _) in one.items())


def together(by_link: dict[int, Curve]) -> list[list[int]]:
    """Return the links in groups whose curves look like one."""
    groups: list[list[int]] = []
    for gbit, curve in by_link.items():
        group = next((group for group in groups if coincide(by_link[group[0]], curve)), None)
        if group is None:
            groups.append([gbit])
        else:
            group.append(gbit)
    return groups


def names(group: list[int]) -> str:
    """Return "25, 100 and 400 Gbit/s"."""
    *most, last = map(str, group)
    return (f"{', '.join(most)} and " if most else "") + f"{last} Gbit/s"


def draw_group(axis: Axes, group: list[int], by_link: dict[int, Curve]) -> None:
    """Lines that look like one, with their names at the end; where their bounds differ, one mark around the other."""
    color, dashes = STYLES.get(group[-1], FAST)
    for gbit in group:
        axis.plot(list(by_link[gbit]), [rate for rate, _ in by_link[gbit].values()], dashes, color=color, linewidth=1.4)
    for count, (rate, limit) in by_link[group[-1]].items():
        others = dict.fromkeys(by_link[gbit][count][1] for gbit in group)
        others.pop(limit)
        axis.plot(count, rate, MARKS[limit], color=color, markersize=5)
        for size, other in enumerate(others):
            axis.plot(count, rate, MARKS[other], color=color, markerfacecolor="none", markersize=11 + 4 * size)
    count, (rate, _) = max(by_link[group[-1]].items())
    axis.annotate(
        names(group), (count, rate), (4, 8), textcoords="offset points", fontsize=8.5, ha="right", color=color
    )


def draw(axis: Axes, title: str, found: dict[str, Any]) -> None:
    """Rate against workers: a line for each link, whose marks say what was the bound."""
    by_link = curves(found)
    for group in together(by_link):
        draw_group(axis, group, by_link)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.08)  # room for the name of the topmost line
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    counts = list(next(iter(by_link.values())))
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.set_title(f"{title} a batch", fontsize=9.5, loc="left")
    axis.set_xlabel("workers on other machines", fontsize=9)
    axis.set_ylabel("batches a second", fontsize=9)
    axis.tick_params(labelsize=8.5)
    axis.grid(color="#e2e8f0", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw both side by side."""
    found = json.loads(Path(sys.argv[1]).read_text())["found"]
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.9), layout="constrained")
    for axis, (name, title) in zip(axes.flat, PICTURES.items(), strict=True):
        draw(axis, title, found[name])
    shown = {cell["limit"] for name in PICTURES for cell in found[name].values()}
    for limit, mark in MARKS.items():
        if limit in shown:
            words = {"thread": "the trainer's thread", "network": "the link"}.get(limit, limit)
            axes[1].plot([], [], mark, color="#334155", markersize=5, label=f"bound: {words}")
    figure.legend(fontsize=8.5, frameon=False, loc="outside lower center", ncols=len(shown))
    # Without a date and with ids that stay, so that the file changes only with what it shows.
    matplotlib.rcParams["svg.hashsalt"] = "asyncloader"
    figure.savefig(DOCS / "images" / "many-machines.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
