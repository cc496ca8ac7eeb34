"""Draw the table of docs/faults.md, what five loaders do when something goes wrong, as a grid of colours and signs.

python docs/draw_faults.py
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent


class Verdict(NamedTuple):
    """How a cell looks, and what that means. The signs, and how light colours are, tell as much as the colours."""

    color: str
    sign: str
    meaning: str


GOOD = Verdict("#a7f3c0", "✔", "the desired result")
SLOW = Verdict("#e9fcef", "◐", "the same, but notably slower than the fastest loader")
LOUD = Verdict("#fcd34d", "!", "an error that says what happened")
BAD = Verdict("#f28b82", "✘", "batches missing silently, a loop that hangs, or something left behind")

SLOWER_TIMES, SLOWER_S = 2, 0.5  # notably slower: takes more than so many times the least, and so much longer
TIMES = re.compile(r"([\d.]+) s")
HEAD_WIDTH, WIDTH = 1.95, 1.6


def judge(cell: str, least_s: float) -> Verdict:
    """Judge a cell by its words, and its seconds by the least in its row."""
    if "hangs" in cell or "ends as if" in cell or cell.startswith("not in"):
        return BAD
    if took := TIMES.fullmatch(cell):
        took_s = float(took[1])
        return SLOW if took_s > SLOWER_TIMES * least_s and took_s > least_s + SLOWER_S else GOOD
    if cell.startswith("all ") or cell == "none":
        return GOOD
    return BAD if cell.isdigit() else LOUD


def read() -> list[list[str]]:
    """Return the rows between the marks of the page, the names of the loaders first."""
    page = (DOCS / "faults.md").read_text()
    measured = page.split("<!-- measured: begin -->")[1].split("<!-- measured: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in measured.splitlines() if line[:1] == "|"]
    return rows[:1] + rows[2:]


def draw_row(axis: Axes, at: int, row: list[str]) -> None:
    """What goes wrong, and a cell for each loader."""
    what, *cells = (cell.replace("`", "") for cell in row)
    least_s = min((float(took[1]) for took in map(TIMES.fullmatch, cells) if took), default=0.0)
    style = {"fontsize": 8, "va": "center", "linespacing": 1.15}
    axis.text(0, -at - 0.5, textwrap.fill(what, 26, break_on_hyphens=False), **style)
    for column, cell in enumerate(cells):
        left, verdict = HEAD_WIDTH + column * WIDTH, judge(cell, least_s)
        axis.add_patch(pyplot.Rectangle((left, -at), WIDTH, -1, facecolor=verdict.color, edgecolor="white"))
        words = cell.replace(" batches", "").replace("ends as if all was well", "and ends, silent")
        axis.text(left + 0.07, -at - 0.5, textwrap.fill(words, 20), **style)
        axis.text(left + WIDTH - 0.06, -at - 0.07, verdict.sign, fontsize=9, ha="right", va="top", weight="bold")


def main() -> None:
    """Draw the head, the rows, and what colours and signs mean."""
    (_, *loaders), *body = read()
    figure, axis = pyplot.subplots(figsize=(9, 0.6 * len(body) + 1), layout="constrained")
    for at, row in enumerate(body):
        draw_row(axis, at, row)
    for column, name in enumerate(loaders):
        weight = "bold" if name == "asyncloader" else "normal"
        axis.text(HEAD_WIDTH + column * WIDTH + 0.07, 0.12, name, fontsize=9, va="bottom", weight=weight)
    axis.set_xlim(0, HEAD_WIDTH + len(loaders) * WIDTH)
    axis.set_ylim(-len(body), 0.5)
    axis.axis("off")
    verdicts = (GOOD, SLOW, LOUD, BAD)
    handles = [pyplot.Rectangle((0, 0), 1, 1, facecolor=verdict.color, edgecolor="#94a3b8") for verdict in verdicts]
    names = [f"{verdict.sign}  {verdict.meaning}" for verdict in verdicts]
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(DOCS / "images" / "faults.png", dpi=150)


if __name__ == "__main__":
    main()
