"""Draw the picture of docs/guides/several-ranks.md: who reads what on a mesh of 2 x 2 ranks.

python docs/draw_mesh.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DOCS = Path(__file__).resolve().parent
INK = "#1e293b"
GREY = "#64748b"
ROWS = (("#dbeafe", "#2563eb"), ("#fef3c7", "#d97706"))  # paper and edge of each half of the data
SAMPLES = (5, 2, 7, 0, 4, 6, 1, 3)


def box(axis: Axes, x: float, y: float, width: float, height: float, row: int) -> None:
    """Draw a box of one half of the data."""
    paper, edge = ROWS[row]
    style = "round,pad=0,rounding_size=0.06"
    axis.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=paper, edgecolor=edge, linewidth=1))


def write(axis: Axes, x: float, y: float, text: str, size: float = 8.5, **how: str) -> None:
    """Write centred, unless told otherwise."""
    axis.text(x, y, text, fontsize=size, **{"ha": "center", "va": "center", "color": INK, **how})  # type: ignore[arg-type]


def draw_samples(axis: Axes) -> None:
    """Draw the order of an epoch, dealt out to the two ranks of the data."""
    write(axis, 1.05, 3.3, "an epoch, shuffled", color=GREY)
    for place, sample in enumerate(SAMPLES):
        x, y = 0.3 + 0.4 * (place % 4), 2.45 - 0.45 * (place // 4)
        box(axis, x, y, 0.32, 0.36, place % 2)
        write(axis, x + 0.16, y + 0.18, str(sample))
    write(axis, 1.05, 1.55, "the sampler divides it\nbetween the ranks of the data", 8, color=GREY)


def draw_row(axis: Axes, row: int, y: float) -> None:
    """Draw the two ranks that read the same half, and what they get."""
    middle = y + 0.45
    arrow = FancyArrowPatch(
        (2.05, 2.35), (3.0, middle), arrowstyle="-|>", mutation_scale=9, color=ROWS[row][1], linewidth=1.2
    )
    axis.add_patch(arrow)
    write(axis, 3.15, middle, f"dp {row}", color=ROWS[row][1], weight="bold", ha="left")
    samples = SAMPLES[row::2][:2]
    for column in range(2):
        x = 3.75 + 2.35 * column
        box(axis, x, y, 2.1, 0.9, row)
        write(axis, x + 1.05, y + 0.67, f"process {2 * row + column}: rank {row} of the data", 8)
        write(
            axis, x + 1.05, y + 0.25, f"batch 0 = samples {samples[0]}, {samples[1]}\nseed (base, epoch, {row}, 0)", 8
        )


def main() -> None:
    """Draw the mesh."""
    figure, axis = pyplot.subplots(figsize=(8.4, 3.4), layout="constrained")
    axis.set_xlim(0, 8.4)
    axis.set_ylim(0.4, 3.6)
    axis.set_axis_off()
    draw_samples(axis)
    for row, y in enumerate((2.15, 0.95)):
        draw_row(axis, row, y)
    for column in range(2):
        write(axis, 4.8 + 2.35 * column, 3.3, f"tp {column}", color=GREY, weight="bold")
    write(axis, 5.97, 0.62, "in a row: one batch, and one augmentation; the ranks share the work on it", 8, color=GREY)
    # Without a date and with ids that stay, so that the file changes only with what it shows.
    matplotlib.rcParams["svg.hashsalt"] = "asyncloader"
    figure.savefig(DOCS / "images" / "mesh.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
