"""Make the picture and the table of docs/benchmarks.md of what tests/benchmarks/overview.py wrote.

python docs/draw_benchmarks.py overview.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- overview: begin -->\n", "<!-- overview: end -->\n"
LOWER_IS_BETTER = {"ms"}


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


def draw(report: dict[str, Any], picture: Path) -> None:
    """One panel for each load: medians as bars, lowest and highest as whiskers."""
    panels = loads(report)
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(11, 2.6 * rows), layout="constrained")
    for axis, (title, (unit, sides)) in zip(axes.flat, panels.items(), strict=False):
        names = list(sides)[::-1]
        medians = [sides[name][unit]["median"] for name in names]
        spread = [
            [sides[name][unit]["median"] - sides[name][unit]["low"] for name in names],
            [sides[name][unit]["high"] - sides[name][unit]["median"] for name in names],
        ]
        colors = ["#2563eb" if name.startswith("asyncloader") else "#94a3b8" for name in names]
        axis.barh(names, medians, xerr=spread, color=colors, error_kw={"ecolor": "#475569", "capsize": 2})
        better = "lower is better" if unit in LOWER_IS_BETTER else "higher is better"
        axis.set_title(f"{title}: {unit} ({better})", fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def tables(report: dict[str, Any]) -> str:
    """The picture, the machine, then a table for each load, then what failed."""
    lines = ["![All loaders, all loads](images/benchmarks.png)", ""]
    if report["quick"]:
        lines += ["**A quick look, with short runs: too short to judge by.**", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["machine"].items()]
    for title, (unit, sides) in loads(report).items():
        rounds = len(next(iter(sides.values()))[unit]["all"])
        lines += ["", f"### {title[0].upper()}{title[1:]}", ""]
        lines += [f"Medians of {rounds} runs; ratio to torch in the same round.", ""]
        lines += [f"| | {unit} | lowest to highest | ratio | CPU ms a batch |", "|---|---:|---:|---:|---:|"]
        for name, side in sides.items():
            seen, cpu = side[unit], side["extras"].get("cpu us/batch")
            shown = f"**{name}**" if name.startswith("asyncloader") else name
            lines.append(
                f"| {shown} | {number(seen['median'])} | {number(seen['low'])} to {number(seen['high'])} "
                f"| {number(side['ratio']['median'])} | {number(cpu / 1e3) if cpu else ''} |"
            )
    for title, figures in report["found"].items():
        if title.startswith("memory"):
            lines += ["", f"### {title[0].upper()}{title[1:]}", "", "| | MB |", "|---|---:|"]
            lines += [f"| {name} | {number(value)} |" for name, value in figures.items()]
    if failed := report["found"].get("failed"):
        lines += ["", "### What failed", ""] + [f"- {name}: {why.splitlines()[0]}" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw the picture, and put the tables between the marks on the page."""
    report = json.loads(Path(sys.argv[1]).read_text())
    draw(report, DOCS / "images" / "benchmarks.png")
    page = DOCS / "benchmarks.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + "\n" + tables(report) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
