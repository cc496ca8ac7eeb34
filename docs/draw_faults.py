"""Draw the table of docs/faults.md, what five loaders do when something goes wrong, as a grid of colours.

python docs/draw_faults.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parent
GOOD, LOUD, BAD = "#bbf7d0", "#fde68a", "#fecaca"  # as it should be; an error that says so; silent, or for ever


def judge(cell: str) -> str:
    """Return the colour of a cell by its words."""
    if "hangs" in cell or "ends as if" in cell or cell.startswith("not in"):
        return BAD
    if cell.startswith("all ") or cell == "none" or cell.endswith(" s"):
        return GOOD
    return BAD if cell.isdigit() else LOUD


def main() -> None:
    """Draw the rows between the marks of the page."""
    page = (DOCS / "faults.md").read_text()
    measured = page.split("<!-- measured: begin -->")[1].split("<!-- measured: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in measured.splitlines() if line[:1] == "|"]
    head, _, *body = rows
    figure, axis = pyplot.subplots(figsize=(9.6, 0.62 * len(body) + 0.7), layout="constrained")
    widths = [2.3, *[1.5] * (len(head) - 1)]
    lefts = [sum(widths[:column]) for column in range(len(widths))]
    for at, row in enumerate(body):
        for column, cell in enumerate(row):
            words = cell.replace("`", "").replace(" batches", "").replace("ends as if all was well", "and ends, silent")
            color = judge(cell) if column else "white"
            place = (lefts[column], -at)
            axis.add_patch(pyplot.Rectangle(place, widths[column], -1, facecolor=color, edgecolor="white"))
            text = textwrap.fill(words, 33 if column == 0 else 20)
            axis.text(lefts[column] + 0.06, -at - 0.5, text, fontsize=7.5, va="center", linespacing=1.05)
    for column, name in enumerate(head):
        if column:
            bold = "bold" if name == "asyncloader" else "normal"
            axis.text(lefts[column] + 0.06, 0.15, name, fontsize=9, va="bottom", weight=bold)
    axis.set_xlim(0, sum(widths))
    axis.set_ylim(-len(body), 0.6)
    axis.axis("off")
    figure.savefig(DOCS / "images" / "faults.png", dpi=130)


if __name__ == "__main__":
    main()
