"""``asyncloader bench``: the user's own loader under torch's DataLoader and under ours, in turns."""

from __future__ import annotations

import statistics
from typing import Any

import torch.utils.data

from asyncloader.cli.measure import Run, run
from asyncloader.cli.report import Report
from asyncloader.cli.source import Source
from asyncloader.loader import DataLoader


def bench(source: Source, report: Report, *, seconds: float, rounds: int) -> None:
    """Let both take turns, and print medians; then what limits ours."""
    sides: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "asyncloader": DataLoader}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    with report.progress("running", rounds * len(sides)) as advance:
        for _ in range(rounds):
            for name, kind in sides.items():
                advance(name)
                runs[name].append(run(source.make(kind), source.step, seconds=seconds))
    rows = []
    for name, own in runs.items():
        rates = [one.rate for one in own]
        ratios = [one.rate / other.rate for one, other in zip(own, runs["torch"], strict=True)]
        rows.append(
            {
                "": name,
                "batches/s": statistics.median(rates),
                "low": min(rates),
                "high": max(rates),
                "ratio": statistics.median(ratios),
                "waited %": 100 * statistics.median(one.waited_s / one.seconds for one in own),
                "first batch ms": 1e3 * statistics.median(one.first_s for one in own),
                "CPU ms/batch": 1e3 * statistics.median(one.cpu_s / (one.batches + 1) for one in own),
                "MB": statistics.median(one.memory_bytes for one in own) / 1e6,
            }
        )
    title = f"medians of {rounds} runs of {seconds:g} s, taking turns; ratio to torch in the same round"
    report.table("sides", title, rows)
    stats = runs["asyncloader"][-1].stats
    assert stats is not None
    report.say("verdict", f"asyncloader, within an epoch: {stats.verdict}", stats.verdict.as_dict())
    starts = statistics.median(one.waited_s / one.seconds for one in runs["asyncloader"]) - stats.waited_share
    if starts > 0.05:
        words = f"{starts:.0%} of the time went by between epochs, while workers started"
        persistent = "" if stats.options.get("persistent_workers") else ": persistent_workers=True spares that"
        report.say("starts", words + persistent, {"share": starts})
