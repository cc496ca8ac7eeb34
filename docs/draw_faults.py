"""Make the table and the picture of docs/faults.md from what the suite of faults has seen.

python docs/draw_faults.py docs/results/faults.json    # `make compare-loaders` measures, then calls this
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from asyncloader.testing.suite import CASES

DOCS = Path(__file__).resolve().parent


class Verdict(NamedTuple):
    """How a cell looks, and what that means. The signs, and how light colours are, tell as much as the colours."""

    color: str
    sign: str
    meaning: str


GOOD = Verdict("#a7f3c0", "✔", "the desired result")
SLOW = Verdict("#e9fcef", "◐", "the same, but notably slower than the fastest loader")
LOUD = Verdict("#fcd34d", "!", "an error that says what happened")
BAD = Verdict("#f28b82", "✘", "samples missing or repeated silently, a loop that hangs, or something left behind")

SLOWER_TIMES, SLOWER_S = 2, 0.5  # notably slower: takes more than so many times the least, and so much longer
TIMES = re.compile(r"([\d.]+) s")
HEAD_WIDTH, WIDTH = 2.3, 1.6
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
NAMES = {
    "tests.faults.adapters:Ours": "asyncloader",
    "tests.faults.adapters:Torch": "torch",
    "tests.faults.adapters:Stateful": "StatefulDataLoader",
    "tests.faults.adapters:Spdl": "SPDL",
    "tests.faults.adapters:Nodes": "torchdata.nodes",
    "tests.faults.adapters:Grain": "Grain",
    "tests.faults.adapters:Litdata": "litdata",
}


def judge(found: dict[str, Any], least_s: float) -> Verdict:
    """Give a cell the look of its verdict; its seconds are compared with the least in its row."""
    took = TIMES.fullmatch(found["words"])
    if took and float(took[1]) > max(SLOWER_TIMES * least_s, least_s + SLOWER_S):
        return SLOW
    return {"good": GOOD, "loud": LOUD, "bad": BAD}[found["verdict"]]


def write_table(cases: dict[str, Any], names: list[str], versions: dict[str, str]) -> None:
    """Put the table between the marks of the page."""
    lines = [f"| what happens | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, cells in cases.items():
        lines.append(f"| {CASES[case]} | {' | '.join(cell['words'] for cell in cells.values())} |")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += ["", f"Measured with {packages.replace('+cpu', '')}, Linux."]
    lines += ["A program has 30 s, for resumes 300 s.", ""]
    page = DOCS / "faults.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + "\n".join(lines) + END + rest.partition(END)[2])


def draw_row(axis: Axes, at: int, what: str, cells: list[dict[str, Any]]) -> None:
    """What goes wrong, and a cell for each loader."""
    least_s = min((float(took[1]) for cell in cells if (took := TIMES.fullmatch(cell["words"]))), default=0.0)
    style = {"fontsize": 8, "va": "center", "linespacing": 1.15}
    axis.text(0, -at - 0.5, textwrap.fill(what.replace("`", ""), 32, break_on_hyphens=False), **style)
    for column, cell in enumerate(cells):
        left, verdict = HEAD_WIDTH + column * WIDTH, judge(cell, least_s)
        axis.add_patch(pyplot.Rectangle((left, -at), WIDTH, -1, facecolor=verdict.color, edgecolor="white"))
        words = (
            cell["words"]
            .replace("`", "")
            .replace(" batches", "")
            .replace("ends as if all was well", "and ends, silent")
        )
        axis.text(left + 0.07, -at - 0.5, textwrap.fill(words, 19), **style)
        axis.text(left + WIDTH - 0.06, -at - 0.07, verdict.sign, fontsize=9, ha="right", va="top", weight="bold")


def main() -> None:
    """Write the table; draw the head, the rows, and what colours and signs mean."""
    report = json.loads(Path(sys.argv[1]).read_text())
    cases = report["cases"]
    loaders = [NAMES.get(adapter, adapter) for adapter in next(iter(cases.values()))]
    write_table(cases, loaders, report["measured with"])
    width = HEAD_WIDTH + len(loaders) * WIDTH
    figure, axis = pyplot.subplots(figsize=(0.88 * width, 0.6 * len(cases) + 1), layout="constrained")
    for at, (case, cells) in enumerate(cases.items()):
        draw_row(axis, at, CASES[case], list(cells.values()))
    for column, name in enumerate(loaders):
        weight = "bold" if name == "asyncloader" else "normal"
        axis.text(HEAD_WIDTH + column * WIDTH + 0.07, 0.12, name, fontsize=9, va="bottom", weight=weight)
    axis.set_xlim(0, width)
    axis.set_ylim(-len(cases), 0.5)
    axis.axis("off")
    verdicts = (GOOD, SLOW, LOUD, BAD)
    handles = [pyplot.Rectangle((0, 0), 1, 1, facecolor=verdict.color, edgecolor="#94a3b8") for verdict in verdicts]
    names = [f"{verdict.sign}  {verdict.meaning}" for verdict in verdicts]
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(DOCS / "images" / "faults.png", dpi=150)


if __name__ == "__main__":
    main()
