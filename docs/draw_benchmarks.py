"""Make the pictures and the tables of docs/benchmarks.md of what tests/benchmarks/overview.py wrote.

python docs/draw_benchmarks.py overview.json
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
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- overview: begin -->\n", "<!-- overview: end -->\n"
LOWER_IS_BETTER = {"ms", "s"}
NOT_SHOWN = {"memory", "system", "torch threads"}  # of the machine; they are in the file
IN_FLIGHT = re.compile(r"samples that wait, (\d+) in flight")
WAIT_S = 0.02
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
SIDE_IN = 0.105  # how high a loader's line is, so that no two marks of a load touch
COLORS = {
    "asyncloader": "#2563eb",
    "torch": "#0f172a",
    "StatefulDataLoader": "#78716c",
    "SPDL": "#d97706",
    "turboloader": "#be123c",
    "datago": "#7e22ce",
    "dataloader-rs": "#9a3412",
    "litdata": "#0f766e",
}
MARKERS = {  # of a family, or of a variant of its loader
    "turboloader": "X",
    "datago": "p",
    "dataloader-rs": "h",
    "litdata": "<",
    "unordered": "s",
    "async for": "D",
    "async": "D",
    "threads": "^",
    "drop-in": "v",
    "processes": "o",
    "persistent workers": "d",
    "no workers": "s",
    "SharedList": "D",
}


def number(value: float) -> str:
    """Write down a figure with three digits or so."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def loads(report: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return title: (unit, sides)."""
    found = {}
    for title, sides in report["found"].items():
        first = next(iter(sides.values()), None)
        if isinstance(first, dict) and "ratio" in first:
            found[title] = next(key for key in first if key not in ("ratio", "extras", "target")), sides
    return found


def style(name: str) -> tuple[str, str]:
    """Return colour and marker of a loader: ours blue, filled; each family one colour; no two look alike in grey."""
    family = next((key for key in COLORS if name.startswith(key)), "")
    if not family and "alone" in name:  # no loader: the bound
        return "#64748b", "*"
    if not family:  # Grain
        return "#15803d", "P"
    return COLORS[family], MARKERS.get(family) or MARKERS.get(name.partition(", ")[2], "o")


def draw_load(axis: Axes, top: int, unit: str, sides: dict[str, Any]) -> dict[str, Any]:
    """One load: for each loader but the first, a line below the one before; return what the legend shows of them."""
    seen: dict[str, Any] = {}
    for at, name in enumerate(list(sides)[1:], 1):
        ratios = sides[name]["ratio"]["all"]
        if unit in LOWER_IS_BETTER:
            ratios = [1 / ratio for ratio in ratios]
        ratios = sorted(ratios)
        color, marker = style(name)
        axis.plot([ratios[0], ratios[-1]], [top - at] * 2, color=color, linewidth=1, alpha=0.6)
        filled = color if name.startswith("asyncloader") else "white"
        middle = ratios[len(ratios) // 2]
        (seen[name],) = axis.plot(middle, top - at, marker, color=color, markerfacecolor=filled, markersize=6, ls="")
    return seen


def draw_ratios(report: dict[str, Any], picture: Path, first: str) -> None:
    """A row for each load, a dot for each loader: its ratio to the first, which is 1, and a bar over all rounds."""
    rows = {title: found for title, found in loads(report).items() if not IN_FLIGHT.fullmatch(title)}
    lines = sum(len(sides) for _, sides in rows.values())  # the first, which has no dots, parts a load from the next
    figure, axis = pyplot.subplots(figsize=(8.2, SIDE_IN * lines + 1.2), layout="constrained")
    seen: dict[str, Any] = {}
    top, middles = 0, []
    for unit, sides in rows.values():
        seen |= draw_load(axis, top, unit, sides)
        middles.append(top - len(sides) / 2)
        top -= len(sides)
        axis.axhline(top, color="#cbd5e1", linewidth=0.8)
    axis.axvline(1, color=COLORS["torch"], linewidth=1)
    axis.set_yticks(middles, list(rows), fontsize=9)
    axis.set_ylim(top, 0)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    shown = [tick for tick in TICKS if low <= tick <= high]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown], fontsize=9)
    axis.minorticks_off()
    label = f"times as fast as {first} (the line): median of the rounds' ratios; bars: all rounds"
    axis.set_xlabel(label, fontsize=9, loc="right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def draw_curve(axis: Axes, name: str, points: list[tuple[int, dict[str, Any]]], beside: float) -> None:
    """One loader's rates, each with its lowest and highest round, moved by a factor along the axis."""
    color, marker = style(name)
    middles = [found["median"] for _, found in points]
    around = [[found["median"] - found["low"] for _, found in points],
              [found["high"] - found["median"] for _, found in points]]  # fmt: skip
    filled = color if name.startswith("asyncloader") else "white"
    axis.errorbar([beside * flight for flight, _ in points], middles, around, color=color, marker=marker, label=name,
                  markerfacecolor=filled, capsize=2, linewidth=1.2, markersize=6.5)  # fmt: skip


def draw_waiting(report: dict[str, Any], picture: Path) -> None:
    """Samples a second over samples in flight, for all loaders on one axis; the short lines are as many every 20 ms."""
    curves: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for title, (unit, sides) in loads(report).items():
        if match := IN_FLIGHT.fullmatch(title):
            for name, side in sides.items():
                curves.setdefault(name, []).append((int(match[1]), side[unit]))
    figure, axis = pyplot.subplots(figsize=(8.2, 4.2), layout="constrained")
    flights = sorted({flight for points in curves.values() for flight, _ in points})
    for flight in flights:
        axis.plot([flight * 2**-0.3, flight * 2**0.3], [flight / WAIT_S] * 2, color="#64748b", linewidth=1.2, ls="--")
    axis.annotate("all of them every 20 ms", (flights[1], flights[1] / WAIT_S), (-10, 6), textcoords="offset points",
                  fontsize=8.5, color="#475569", ha="right")  # fmt: skip
    for place, (name, points) in enumerate(curves.items()):
        draw_curve(axis, name, points, 2 ** (0.075 * (place - (len(curves) - 1) / 2)))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(flights, [f"{flight:,}" for flight in flights])
    axis.tick_params(labelsize=9)
    axis.set_xlabel("samples in flight, in all (marks of the same number stand side by side)", fontsize=9)
    axis.set_ylabel("samples a second", fontsize=9)
    axis.legend(fontsize=8.5, frameon=False)
    axis.grid(color="#e2e8f0", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def matrix(rows: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """Loads by loaders: the median, and the median of the rounds' ratios to the first loader of the row."""
    names = list(dict.fromkeys(name for _, sides in rows.values() for name in sides))
    shown = [f"**{name}**" if name.startswith("asyncloader") else name for name in names]
    lines = ["", f"| | {' | '.join(shown)} |", "|---|" + "---:|" * len(names)]
    for title, (unit, sides) in rows.items():
        if title.endswith(", steady"):
            continue  # what the last two thirds of an epoch had: in the picture, and the file
        cells = (cell(unit, sides[name]) if name in sides else "" for name in names)
        lines.append(f"| {title[0].upper()}{title[1:]}, {unit} | {' | '.join(cells)} |")
    return lines


def cell(unit: str, side: dict[str, Any]) -> str:
    """The figure of a loader, and its ratio."""
    return f"{number(side[unit]['median'])} ({number(side['ratio']['median'])})"


def tables(report: dict[str, Any]) -> str:
    """The pictures, the machine, then loads by loaders, then what failed. Lowest and highest are in the file."""
    lines = ["![How many times as fast as torch's DataLoader, by load and loader](images/benchmarks.png)", ""]
    if any(map(IN_FLIGHT.fullmatch, report["found"])):
        lines += ["![Samples a second over samples in flight](images/in_flight.png)", ""]
    if report["quick"]:
        lines += ["**Short runs**, of three rounds (`--quick`): what lies within their spread says nothing.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["machine"].items() if name not in NOT_SHOWN]
    found = loads(report)
    lines += [
        "",
        "Medians, and in brackets the median of the rounds' ratios to the first loader of the row that is there.",
    ]
    lines += matrix({title: row for title, row in found.items() if not IN_FLIGHT.fullmatch(title)})
    lines += matrix({title: row for title, row in found.items() if IN_FLIGHT.fullmatch(title)})
    for title, figures in report["found"].items():
        if title.startswith("memory"):
            shown = "; ".join(f"{name} {number(value)}" for name, value in figures.items())
            lines += ["", f"{title[0].upper()}{title[1:]}: {shown}."]
    if failed := report["found"].get("failed"):
        lines += ["", "What failed:", ""] + [f"- {name}: {why.splitlines()[0]}" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw the pictures, and put the tables between the marks on the page."""
    report = json.loads(Path(sys.argv[1]).read_text())
    draw_ratios(report, DOCS / "images" / "benchmarks.png", "torch's DataLoader")
    if any(map(IN_FLIGHT.fullmatch, report["found"])):
        draw_waiting(report, DOCS / "images" / "in_flight.png")
    page = DOCS / "benchmarks.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + "\n" + tables(report) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
