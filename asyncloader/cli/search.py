"""``asyncloader tune``: find options for a loader by trying them, within a budget of cores and memory.

One option after the other: workers first, since they decide most; then, with the best of them, the samples that one
worker fetches at once (async datasets); then how many batches it has in advance. A step up counts if it brings 5 %. In
the end the loader is left to find the number of workers by itself, for comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncloader.cli.measure import Run, run
from asyncloader.cli.report import Report
from asyncloader.cli.source import Source
from asyncloader.errors import ConfigurationError
from asyncloader.loader import DataLoader
from asyncloader.machine import usable_cores
from asyncloader.protocols import is_async

_GAIN = 1.05
_CONCURRENCY = (1, 4, 16, 64, 256)
_PREFETCH = (2, 4, 8)
_TO_SETTLE = 3
"""A loader that looks for its number of workers is given so many times as long."""


class Search:
    """Tries out options, and keeps the best that the budget allows."""

    def __init__(self, source: Source, report: Report, *, seconds: float, memory_bytes: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.best: tuple[dict[str, Any], Run] | None = None
        self._source = source
        self._report = report
        self._seconds = seconds
        self._memory_bytes = memory_bytes

    def tries(self, options: dict[str, Any]) -> bool:
        """Try these options; whether they are the best so far, by so much that it counts."""
        try:
            seen = run(self._source.make(DataLoader, **options), self._source.step, seconds=self._seconds)
        except NotImplementedError:
            return False
        fits = seen.memory_bytes <= self._memory_bytes
        is_best = fits and (self.best is None or seen.rate > _GAIN * self.best[1].rate)
        if is_best:
            self.best = (options, seen)
        self._note(options, seen, "*" if is_best else "" if fits else "too much memory")
        return is_best

    def _note(self, options: dict[str, Any], seen: Run, mark: str) -> None:
        self.rows.append(
            {
                "options": ", ".join(f"{name}={value}" for name, value in options.items()),
                "batches/s": seen.rate,
                "waited %": 100 * seen.waited_s / seen.seconds,
                "first batch ms": 1e3 * seen.first_s,
                "MB": seen.memory_bytes / 1e6,
                "": mark,
            }
        )

    def by_itself(self, max_workers: int, word: Any) -> str:
        """Have the loader look for the number of workers, with what else is best; return what came of it, in words."""
        if self.best is None or not self.best[0]["num_workers"]:
            return ""
        options, best = self.best
        options = {**options, "num_workers": "auto", "max_workers": max_workers}
        try:
            loader = self._source.make(DataLoader, **options)
        except ConfigurationError:  # batches depend on who makes them
            return ""
        word("num_workers=auto")
        seen = run(loader, self._source.step, seconds=_TO_SETTLE * self._seconds)
        self._note(options, seen, f"{loader.num_workers:d} in the end")
        share = f"{seen.rate / best.rate:.0%} of that, the time until it had found it included"
        return (
            f'num_workers="auto" came to {loader.num_workers:d} by itself, and to {share}; it follows the load later on'
        )

    @property
    def is_waiting(self) -> bool:
        """Whether training still waits with the best options, so that there is something to gain."""
        return self.best is None or self.best[1].waited_s > 0.02 * self.best[1].seconds

    def along(self, name: str, values: Any, word: Any) -> None:
        """Try values of one option in rising order, until two in a row bring nothing or training waits no more."""
        given = dict(self.best[0]) if self.best is not None else {}
        vain = 0
        for value in values:
            word(f"{name}={value}")
            vain = 0 if self.tries({**given, name: value}) else vain + 1
            if vain == 2 or not self.is_waiting:
                return


def tune(
    source: Source,
    report: Report,
    *,
    max_workers: int,
    memory_bytes: float,
    seconds: float,
    picture: Path | None,
) -> None:
    """Search, print what was tried, the line to paste, and what limits further gain."""
    search = Search(source, report, seconds=seconds, memory_bytes=memory_bytes)
    workers = [count for count in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= max_workers]
    with report.progress("trying", len(workers) + len(_CONCURRENCY) + len(_PREFETCH) + 1) as advance:
        search.along("num_workers", workers, advance)
        by_workers = list(search.rows)
        if search.is_waiting and is_async(source.loader.dataset):
            search.along("concurrency", _CONCURRENCY, advance)
        if search.is_waiting and search.best is not None and search.best[0]["num_workers"]:
            search.along("prefetch_factor", _PREFETCH[1:], advance)
        by_itself = search.by_itself(max_workers, advance)
    report.table("tried", f"runs of {seconds:g} s; * is the best so far", search.rows)
    if search.best is None:
        report.say("line", "Nothing fits into that memory.", {})
        return
    options, seen = search.best
    assert seen.stats is not None
    report.say(
        "line", "DataLoader(..., " + ", ".join(f"{name}={value}" for name, value in options.items()) + ")", options
    )
    if by_itself:
        report.say("by itself", by_itself)
    report.say("verdict", f"What limits it now: {seen.stats.verdict}", seen.stats.verdict.as_dict())
    if picture is not None:
        draw(by_workers, picture)
        report.say("picture", f"drawn to {picture}", str(picture))


def default_max_workers() -> int:
    """Return how many workers to try at most: twice the cores, for what waits more than it computes."""
    return 2 * usable_cores()


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw time per batch against number of workers, as in the tinyloader post."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    workers = [row["options"].partition("=")[2] for row in rows]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.bar(workers, [1e3 / row["batches/s"] for row in rows], color="#2563eb")
    axes.bar(workers, [10 * row["waited %"] / row["batches/s"] for row in rows], color="#dc2626", label="waiting")
    axes.set(xlabel="num_workers", ylabel="ms per batch", title="Time per batch; red: training waits")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
