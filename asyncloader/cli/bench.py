"""``asyncloader bench``: the user's own loader under torch's DataLoader and ours, and ours with other workers.

All take turns, round by round, so that whatever else the machine does affects them alike. A choice that costs more
counts as better if it brings 5 % in the median of the rounds, and something in each. Where it brings that in some
rounds and not in others no choice stands out, and none is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.utils.data
from rich.console import Console
from rich.progress import track

from asyncloader.cli.measure import Run, run
from asyncloader.cli.report import Report
from asyncloader.cli.source import Source
from asyncloader.errors import ConfigurationError
from asyncloader.loader import DataLoader
from asyncloader.machine import usable_cores
from asyncloader.protocols import is_async

_GAIN = 1.05
_CONCURRENCY = 16
_TORCH, _OURS = "torch", "asyncloader"
_FIGURES: dict[str, Callable[[Run], float]] = {
    "waited %": lambda run: 100 * run.waited_s / run.seconds,
    "first batch ms": lambda run: 1e3 * run.first_s,
    "CPU ms/batch": lambda run: 1e3 * run.cpu_s / (run.batches + 1),
}


def choose(rates: Mapping[str, Sequence[float]]) -> list[str]:
    """Choose among candidates by their rates in each round, in rising order of what they cost.

    Returns:
        The best one; with others behind it where none stands out, as those were ahead in some rounds and not in others.
    """
    names = list(rates)
    best = names[0]
    for name in names[1:]:
        median, least = _gain(rates[name], rates[best])
        if median >= _GAIN and least > 1.0:
            best = name
    at = names.index(best)
    rivals = [name for name in names[at + 1 :] if _gain(rates[name], rates[best])[0] >= _GAIN]
    rivals += [name for name in names[:at] if _gain(rates[name], rates[best])[0] >= 1.0]
    return [best, *rivals]


def _gain(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return how many times as fast one is as another: the median of the rounds, and the least."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=True)]
    return statistics.median(ratios), min(ratios)


def candidates(source: Source) -> dict[str, dict[str, Any]]:
    """Return the options to try beside the loader's own, by their names, in rising order of what they cost.

    A stream is divided among its workers, so another number of them gives other batches: there are none to try.
    """
    if isinstance(source.loader.dataset, torch.utils.data.IterableDataset):
        return {}
    cores = usable_cores()
    counts = [0, *(1 << power for power in range(cores.bit_length()))]
    found: list[dict[str, Any]] = [{"num_workers": count} for count in counts]
    if is_async(source.loader.dataset):
        found += [{"num_workers": count, "concurrency": _CONCURRENCY} for count in (1, cores)]
    else:
        found.append({"num_workers": cores, "worker_backend": "thread"})
    return {", ".join(f"{name}={value!r}" for name, value in options.items()): options for options in found}


def bench(source: Source, report: Report, *, seconds: float, rounds: int) -> None:
    """Let all take turns, and print medians; then what to write, and what limits ours."""
    sides: dict[str, Any] = {_TORCH: (torch.utils.data.DataLoader, {}), _OURS: (DataLoader, {})}
    sides |= {name: (DataLoader, options) for name, options in candidates(source).items()}
    runs = _in_turns(source, sides, seconds, rounds)
    title = f"medians of {rounds} runs of {seconds:g} s, taking turns; ratio to torch in the same round"
    report.table("sides", title, [_row(name, own, runs[_TORCH]) for name, own in runs.items()])
    _recommend(report, sides, {name: own for name, own in runs.items() if name not in (_TORCH, _OURS)})
    _judge(report, runs[_OURS])


def _in_turns(source: Source, sides: dict[str, Any], seconds: float, rounds: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    console = Console(stderr=True)  # on a terminal a bar shows how far it is
    turns = track([*sides] * rounds, "running", console=console, transient=True, disable=not console.is_terminal)
    for name in turns:
        if name not in runs:
            continue
        kind, options = sides[name]
        try:
            runs[name].append(run(source.make(kind, **options), source.step, seconds=seconds))
        except (ConfigurationError, NotImplementedError):
            if name in (_TORCH, _OURS):  # the loader's own options
                raise
            del runs[name]
    return runs


def _row(name: str, own: Sequence[Run], torchs: Sequence[Run]) -> dict[str, Any]:
    rates = [one.rate for one in own]
    ratios = [one.rate / other.rate for one, other in zip(own, torchs, strict=True)]
    figures = {name: statistics.median(map(figure, own)) for name, figure in _FIGURES.items()}
    first = {"": name, "batches/s": statistics.median(rates), "low": min(rates), "high": max(rates)}
    return {**first, "ratio": statistics.median(ratios), **figures}


def _recommend(report: Report, sides: dict[str, Any], runs: dict[str, list[Run]]) -> None:
    """Print the line to paste; or that the rounds do not agree."""
    if not runs:
        return
    best, *rivals = choose({name: [one.rate for one in own] for name, own in runs.items()})
    if rivals:
        words = f"Nothing stands out: {'; '.join([best, *rivals])} were each ahead in some rounds. Try --seconds 10, "
        report.say("undecided", f"{words}or --rounds 5, or when the machine has less else to do.", [best, *rivals])
    else:
        report.say("recommendation", f"of what was tried: DataLoader(..., {best})", sides[best][1])


def _judge(report: Report, ours: Sequence[Run]) -> None:
    """Print what limits the loader as it is."""
    stats = ours[-1].stats
    assert stats is not None
    report.say("verdict", f"asyncloader, within an epoch: {stats.verdict}", asdict(stats.verdict))
