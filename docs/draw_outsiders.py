"""Make docs/outsiders.md of what runs of tests/benchmarks/outsiders.py wrote.

python docs/draw_outsiders.py docs/results/outsiders*.json    # `make bench-outsiders` measures, then calls this
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from draw_benchmarks import LOWER_IS_BETTER, NOT_SHOWN, draw_ratios, loads, matrix, number

DOCS = Path(__file__).resolve().parent
Found = dict[str, tuple[str, dict[str, Any]]]  # name: unit, sides
LONGEST = 100  # characters of a reason
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def machine(report: dict[str, Any]) -> list[str]:
    """Say on what it was measured, and whether that was worth anything."""
    about = {
        name: value
        for name, value in report["machine"].items()
        if name not in NOT_SHOWN | {"python", "a million additions"}
    }
    lines = [f"## On Python {report['machine']['python']}", "", "| | |", "|---|---|"]
    lines += [*(f"| {name} | {value} |" for name, value in about.items()), ""]
    if report["quick"]:
        lines += ["**A look, not a measurement**: one short round (`--quick`). Differences here say nothing.", ""]
    elif float(report["machine"]["load before"].split()[0]) > float(report["machine"]["cores"].split()[0]):
        lines += ["**The minute before it was not idle**: only large differences mean something.", ""]
    return lines


def speeds(unit: str, side: dict[str, Any]) -> list[float]:
    """Return the rounds' ratios to the first loader, so that more is better."""
    ratios: list[float] = side["ratio"]["all"]
    return [1 / ratio for ratio in ratios] if unit in LOWER_IS_BETTER else ratios


def behind(name: str, unit: str, sides: dict[str, Any]) -> list[str]:
    """Say by how much the best of the others is faster than our best side, if it is, and whether it was always."""
    found = {side: speeds(unit, row) for side, row in sides.items()}
    best, ours = (
        max((side for side in found if side.startswith("asyncloader") is own), key=lambda side: median(found[side]))
        for own in (False, True)
    )
    times = [theirs / mine for theirs, mine in zip(found[best], found[ours], strict=True)]
    if median(times) <= 1:
        return []
    ahead = sum(ratio > 1 for ratio in times)
    share = f" (in {ahead} of {len(times)} rounds)" if ahead < len(times) else ""
    return [f"- {name}: {best}, {number(median(times))} times as fast as ours{share}"]


def benchmarks(report: dict[str, Any], found: Found) -> list[str]:
    """Whose each is, its rules, how many rounds were measured, and a table: its figures by loaders."""
    lines = []
    for whose, about in report["found"]["rules"].items():
        rows = {name.removeprefix(f"{whose}: "): row for name, row in found.items() if name.startswith(f"{whose}: ")}
        if rows:
            counts = sorted({len(next(iter(sides.values()))["ratio"]["all"]) for _, sides in rows.values()})
            rounds = f"{' or '.join(map(str, counts))} round{'s' * (counts != [1])}"
            lines += [f"### {whose}", "", f"{about['rules']} {rounds}. ([Source]({about['link']}).)"]
            lines += [*matrix(rows), ""]
    return lines


def chosen(reports: list[dict[str, Any]]) -> list[Found]:
    """Return what is shown of each report: of a figure that several have, the one with the most loaders."""
    all_found = [loads(report) for report in reports]
    most: dict[str, int] = {}
    for found in all_found:
        for name, (_, sides) in found.items():
            most[name] = max(most.get(name, 0), len(sides))
    return [{name: row for name, row in found.items() if len(row[1]) == most[name]} for found in all_found]


def page(reports: list[dict[str, Any]]) -> str:
    """The picture, what is faster than ours; for each run the machine and the benchmarks; what was left out in all."""
    found = {name: row for shown in chosen(reports) for name, row in shown.items()}
    lines = ["![How many times as fast as the first loader, by benchmark and loader](images/outsiders.png)", ""]
    ahead = [line for name, (unit, sides) in found.items() for line in behind(name, unit, sides)]
    lines += ["Where the best of the others is ahead of the best of ours:", "", *(ahead or ["- nowhere"])]
    lines += ["", "Medians, and in brackets the median of the rounds' ratios to the first loader of the row.", ""]
    for report, shown in zip(reports, chosen(reports), strict=True):
        lines += machine(report) + benchmarks(report, shown)
    measured = {f"{name}: {side}" for name, (_, sides) in found.items() for side in sides} | set(found)
    absent = {name: why for report in reports for name, why in report["found"].get("left out", {}).items()}
    if absent := {name: why for name, why in absent.items() if name not in measured}:
        lines += ["## Left out", "", *(f"- {name}: {why[-LONGEST:]}" for name, why in absent.items()), ""]
    return "\n".join(lines)


def main() -> None:
    """Draw the picture, and put the tables between the marks on the page."""
    reports = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    together = {name: row[1] for shown in chosen(reports) for name, row in shown.items()}
    draw_ratios({"found": together}, DOCS / "images" / "outsiders.png", "the first loader of a benchmark")
    path = DOCS / "outsiders.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + BEGIN + page(reports) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
