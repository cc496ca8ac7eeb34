"""Statistics as a notebook shows them: the verdict, and bars for where the time of the trainer and of workers went."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from asyncloader.observe.figures import Figures
from asyncloader.observe.tally import show_s

_MOST_WORKERS = 16
_WAITING, _WORKING = "#dc2626", "#2563eb"  # red and blue, which stand out on light and on dark pages


def as_html(stats: Figures, text: str) -> str:
    """Return a table of bars, and the figures in words behind a fold.

    Args:
        stats: A run.
        text: All figures, as they are printed.
    """
    _, verdict, *_ = text.split("\n", 2)
    rows = [("training waited", stats.waited_share, f"{stats.waited_share:.0%}", _WAITING)]
    shown = stats.workers[:_MOST_WORKERS]
    rows += [
        (f"worker {worker.worker_id} busy", worker.busy_share, f"{worker.busy_share:.0%}", _WORKING) for worker in shown
    ]
    stages = [("a batch: " + name, timing.mean_s) for name, timing in stats.stages if timing.total_s]
    longest = max((seconds for _, seconds in stages), default=0.0)
    rows += [(name, seconds / longest, show_s(seconds), _WORKING) for name, seconds in stages if longest]
    more = len(stats.workers) - len(shown)
    rest = f"<p>and {more} more workers</p>" if more > 0 else ""
    return (
        f"<div><p><b>{escape(verdict)}</b></p><table>{''.join(_rows(rows))}</table>{rest}"
        f"<details><summary>all figures</summary><pre>{escape(text)}</pre></details></div>"
    )


def _rows(rows: Iterable[tuple[str, float, str, str]]) -> Iterable[str]:
    for name, share, words, colour in rows:
        width = 100 * min(1.0, max(0.0, share))
        bar = f'<div style="background:{colour};height:0.8em;width:{width:.1f}%"></div>'
        yield (
            f'<tr><td style="text-align:left">{escape(name)}</td><td style="min-width:20em">{bar}</td>'
            f'<td style="text-align:right">{escape(words)}</td></tr>'
        )
