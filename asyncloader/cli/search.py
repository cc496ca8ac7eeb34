"""``asyncloader tune``: find options for a loader by trying them, within a budget of cores and memory.

Options are tried one after the other: workers first, since they decide most; then, with the best of them, the samples
that one worker fetches at once (async datasets); then how many batches it has in advance. The values of an option take
turns, round by round, so that whatever else the machine does affects them alike. A step up counts if it brings 5 % in
the median of the rounds, and something in each. Where steps up bring that in some rounds and not in others no value
stands out, and none is named. In the end the loader is left to find the number of workers by itself, for comparison.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader.cli.measure import Run, run
from asyncloader.cli.report import Report
from asyncloader.cli.source import Source
from asyncloader.errors import ConfigurationError
from asyncloader.loader import DataLoader
from asyncloader.machine import usable_cores
from asyncloader.observe.verdict import Verdict
from asyncloader.protocols import is_async

_GAIN = 1.05
_HOPELESS = 0.7  # of the best of the first round: what is slower is not tried again
_CONCURRENCY = (1, 4, 16, 64, 256)
_PREFETCH = (2, 4, 8)
_TO_SETTLE = 3
"""A loader that looks for its number of workers is given so many times as long."""


class Choice(NamedTuple):
    """The result of comparing the values of one option.

    Attributes:
        value: The one to take; None where no value stands out.
        rivals: The values that were ahead in some rounds, and not in others.
    """

    value: Any
    rivals: Sequence[Any]


def choose(rates: Mapping[Any, Sequence[float]]) -> Choice:
    """Choose among values of an option by their rates in each round, in rising order of what they cost.

    A value that is ahead by 5 % in the median of the rounds takes the place of a cheaper one if it is ahead in all of
    them. If it is not, either may be the better one.
    """
    values = [value for value in rates if len(rates[value]) > 1] or list(rates)
    best = values[0]
    for value in values[1:]:
        median, least = _gain(rates[value], rates[best])
        if median >= _GAIN and least > 1.0:
            best = value
    later = values[values.index(best) + 1 :]
    earlier = values[: values.index(best)]
    rivals = [value for value in later if _gain(rates[value], rates[best])[0] >= _GAIN]
    rivals += [value for value in earlier if _gain(rates[value], rates[best])[0] >= 1.0]
    return Choice(None, [best, *rivals]) if rivals else Choice(best, [])


def _gain(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return how many times as fast one is as another: the median of the rounds, and the least."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=False)]
    return statistics.median(ratios), min(ratios)


class Search:
    """Tries out options, and keeps the best that the budget allows.

    Attributes:
        rows: The runs so far, for the report.
        best: The options found so far, with their median run; None if none fits into the memory.
        undecided: Options of which no value stands out, with the values that might be the best.
    """

    def __init__(self, source: Source, report: Report, *, seconds: float, memory_bytes: float, rounds: int = 3) -> None:
        self.rows: list[dict[str, Any]] = []
        self.best: tuple[dict[str, Any], Run] | None = None
        self.undecided: dict[str, Sequence[Any]] = {}
        self._source = source
        self._report = report
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._rounds = rounds
        self._tried: dict[str, set[int]] = {}

    def along(self, name: str, values: Iterable[int], word: Callable[[str], object]) -> None:
        """Choose among values of one option, in rising order, with the best of the others."""
        given = dict(self.best[0]) if self.best is not None else {}
        runs = self._first_round(name, values, given, word)
        fitting = {value: seen for value, seen in runs.items() if seen[0].memory_bytes <= self._memory_bytes}
        if fitting:
            hopeless = _HOPELESS * max(seen[0].rate for seen in fitting.values())
            still = [value for value in fitting if fitting[value][0].rate >= hopeless]
            for number in range(2, self._rounds + 1):
                for value in still:
                    word(f"{name}={value}, round {number}")
                    fitting[value].append(self._run({**given, name: value}))
            choice = choose({value: [seen.rate for seen in fitting[value]] for value in still})
            if choice.rivals:
                self.undecided[name] = sorted(choice.rivals)
            else:
                seen = sorted(fitting[choice.value], key=lambda one: one.rate)
                self.best = ({**given, name: choice.value}, seen[len(seen) // 2])
        self._tried[name] = set(runs)
        for value, seen in runs.items():
            is_best = self.best is not None and self.best[0] == {**given, name: value}
            self._note({**given, name: value}, seen, "*" if is_best else "" if value in fitting else "too much memory")

    def _first_round(
        self, name: str, values: Iterable[int], given: dict[str, Any], word: Callable[[str], object]
    ) -> dict[int, list[Run]]:
        """Try values in rising order, until two in a row bring nothing or training waits no more."""
        runs: dict[int, list[Run]] = {}
        best, vain = 0.0, 0
        for value in values:
            word(f"{name}={value}")
            try:
                seen = self._run({**given, name: value})
            except NotImplementedError:
                continue
            runs[value] = [seen]
            vain = 0 if seen.rate > _GAIN * best else vain + 1
            best = max(best, seen.rate)
            if vain == 2 or not _is_waiting(seen):
                break
        return runs

    def _run(self, options: dict[str, Any]) -> Run:
        return run(self._source.make(DataLoader, **options), self._source.step, seconds=self._seconds)

    def _note(self, options: dict[str, Any], runs: Sequence[Run], mark: str) -> None:
        rates = [seen.rate for seen in runs]
        self.rows.append(
            {
                "options": ", ".join(f"{name}={value}" for name, value in options.items()),
                "batches/s": statistics.median(rates),
                "low": min(rates),
                "high": max(rates),
                "waited %": 100 * statistics.median(seen.waited_s / seen.seconds for seen in runs),
                "first batch ms": 1e3 * statistics.median(seen.first_s for seen in runs),
                "MB": max(seen.memory_bytes for seen in runs) / 1e6,
                "": mark,
            }
        )

    def by_itself(self, max_workers: int, word: Callable[[str], object]) -> str:
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
        self._note(options, [seen], f"{loader.num_workers:d} in the end")
        share = f"{seen.rate / best.rate:.0%} of that, the time until it had found it included"
        return (
            f'num_workers="auto" came to {loader.num_workers:d} by itself, and to {share}; it follows the load later on'
        )

    @property
    def is_waiting(self) -> bool:
        """Whether training still waits with the best options, so that there is something to gain."""
        return self.best is None or _is_waiting(self.best[1])

    def limit(self) -> tuple[str, Verdict] | None:
        """Say what limits the best, as its verdict does, but for advice that was tried and has not helped."""
        if self.best is None or self.best[1].stats is None:
            return None
        seen, verdict = self.best[1], self.best[1].stats.verdict
        in_vain = [
            f"{name}={value}"
            for name, value in verdict.advice.items()
            if name in self._tried and value != self.best[0].get(name) and value <= max(self._tried[name])
        ]
        if not in_vain:
            return f"What limits it now: {verdict}", verdict
        words = f"training waited {seen.waited_s / seen.seconds:.0%} of its time"
        text = f"{words}; {' and '.join(in_vain)} would be the next thing to try, and was tried: it is no faster here"
        return f"What limits it now: {text}", Verdict(verdict.limit, text)


def _is_waiting(seen: Run) -> bool:
    return seen.waited_s > 0.02 * seen.seconds


def tune(
    source: Source,
    report: Report,
    *,
    max_workers: int,
    memory_bytes: float,
    seconds: float,
    picture: Path | None,
    rounds: int = 3,
) -> None:
    """Search, print what was tried, the line to paste, and what limits further gain."""
    search = Search(source, report, seconds=seconds, memory_bytes=memory_bytes, rounds=rounds)
    workers = [count for count in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= max_workers]
    with report.progress("trying", rounds * (len(workers) + len(_CONCURRENCY) + len(_PREFETCH)) + 1) as advance:
        search.along("num_workers", workers, advance)
        by_workers = list(search.rows)
        if search.best is not None and search.is_waiting and is_async(source.loader.dataset):
            search.along("concurrency", _CONCURRENCY, advance)
        if search.best is not None and search.is_waiting and search.best[0]["num_workers"]:
            search.along("prefetch_factor", _PREFETCH, advance)
        by_itself = search.by_itself(max_workers, advance)
    report.table("tried", f"medians of {rounds} runs of {seconds:g} s, taking turns; * is what to take", search.rows)
    _tell(search, report, by_itself)
    if picture is not None and by_workers:
        draw(by_workers, picture)
        report.say("picture", f"drawn to {picture}", str(picture))


def _tell(search: Search, report: Report, by_itself: str) -> None:
    """Print the line to paste and what limits it; or why there is none."""
    for name, rivals in search.undecided.items():
        values = " and ".join(map(str, rivals))
        report.say(
            f"undecided: {name}",
            f"No {name} stands out: {values} were each ahead in some rounds. Try again with longer runs "
            "(--seconds 10), more of them (--rounds 5), or when the machine has less else to do.",
            rivals,
        )
    if search.best is None:
        report.say("line", "" if search.undecided else "Nothing fits into that memory.", {})
        return
    options = search.best[0]
    report.say(
        "line", "DataLoader(..., " + ", ".join(f"{name}={value}" for name, value in options.items()) + ")", options
    )
    if by_itself:
        report.say("by itself", by_itself)
    if (found := search.limit()) is not None:
        report.say("verdict", found[0], found[1].as_dict())


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
