"""The run of one benchmark script: its arguments, sides taking turns, targets, tables, JSON."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.measure import Memory, Run, loader_classes, machine, settle

MINUTES = 40


class Target(NamedTuple):
    """A bound out of the requirements, such as Target(">=", 8)."""

    sign: str
    bound: float

    def met(self, seen: float) -> bool:
        return {">=": seen >= self.bound, "<=": seen <= self.bound, "<": seen < self.bound}[self.sign]

    def verdict(self, seen: float) -> str:
        return f"{self.sign} {self.bound:g}: {'met' if self.met(seen) else 'MISSED'}"


@dataclass
class Bench:
    """One run of one script: its arguments, the sides, and what was found so far."""

    name: str
    quick: bool
    null: bool
    only: list[str] = field(default_factory=list)
    minutes: float = 0
    found: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None  # what was found so far, so that a run that is broken off is not lost

    def __post_init__(self) -> None:
        self.loaders = loader_classes(self.null)

    def compare(
        self,
        title: str,
        unit: str,
        sides: Mapping[str, Callable[[], Run]],
        *,
        rounds: int,
        targets: Mapping[str, Target] | None = None,
        workers_stay: bool = False,
    ) -> dict[str, list[Run]]:
        """Let the sides take turns; print a table with each side's ratio to the first one, and remember it.

        Between two runs the workers of the first must be gone, unless they are meant to stay.
        """
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                if not workers_stay:
                    settle()
                runs[name].append(side())
        if not workers_stay:
            settle()
        self.show(title, unit, runs, targets)
        return runs

    def show(
        self, title: str, unit: str, runs: Mapping[str, Sequence[Run]], targets: Mapping[str, Target] | None = None
    ) -> None:
        """Print a table of the rounds of all sides, with each side's ratio to the first one, and remember it."""
        baseline = next(iter(runs))
        columns = list(dict.fromkeys(key for own in runs.values() for key in own[0].extras))
        rows, found = [], {}
        for name, own in runs.items():
            ratios = [mine.value / other.value for mine, other in zip(own, runs[baseline], strict=True)]
            seen: dict[str, Any] = {unit: summary([run.value for run in own]), "ratio": summary(ratios)}
            extras = {
                key: statistics.median(run.extras[key] for run in own if key in run.extras) for key in own[0].extras
            }
            target = (targets or {}).get(name)
            verdict = self._judge(f"{title}: {name}", target, seen["ratio"]["median"])
            more = (number(extras[key]) if key in extras else "" for key in columns)
            rows.append([name, *_shown(seen[unit]), *_shown(seen["ratio"]), verdict, *more])
            found[name] = {**seen, "extras": extras, "target": verdict}
        headers = ["", unit, "spread", "ratio", "spread", "target", *columns]
        self.table(f"{title} ({len(runs[baseline])} rounds, ratios to {baseline})", headers, rows)
        self.found[title] = found
        self.save()

    def check(self, what: str, seen: float, target: Target) -> None:
        """Print a figure that has a target of its own, not a ratio to another side."""
        verdict = self._judge(what, target, seen)
        print(f"  {what}: {number(seen)}   {verdict}", flush=True)
        self.found[what] = {"seen": seen, "target": verdict}

    def note(self, what: str, **figures: float) -> None:
        """Print and remember figures that nothing is asked of."""
        print(f"  {what}: " + ", ".join(f"{name} {number(value)}" for name, value in figures.items()), flush=True)
        self.found[what] = figures

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table as plain text, first column to the left, the others to the right."""
        cells = [list(headers), *map(list, rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
        print(f"\n{title}")
        for row in cells:
            padded = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            print(f"  {row[0].ljust(widths[0])}  " + "  ".join(padded), flush=True)

    def alone(
        self, job: str, *args: str, watch: bool = True, limit_s: float | None = None
    ) -> tuple[dict[str, Any], int]:
        """Run one of the script's jobs in a fresh process; return what it says and the most bytes its tree took.

        Watching takes locks in the watched: where a job's times count, not to be done. A job that takes longer than
        `limit_s` is killed, with what it has started.
        """
        command = [sys.executable, "-m", f"{__package__}.{self.name}", "--alone", job, *args]
        command += ["--quick"] * self.quick + ["--null"] * self.null
        most = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            memory = Memory(process.pid)
            while True:
                try:
                    said, _ = process.communicate(timeout=0.05 if watch else limit_s)
                    break
                except subprocess.TimeoutExpired:
                    if not watch:
                        kill_tree(process.pid)
                        raise RuntimeError(f"not done after {limit_s:g} s") from None
                    most = max(most, memory.bytes())
        if process.returncode:
            code = process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise RuntimeError(f"the process of {job!r} {how}")
        return json.loads(said.splitlines()[-1]), most

    def _judge(self, what: str, target: Target | None, seen: float) -> str:
        if target is None or self.null:
            return ""
        if not target.met(seen):
            self.missed.append(f"{what}: {number(seen)}, target {target.sign} {target.bound:g}")
        return target.verdict(seen)


def main(
    doc: str,
    measure: Callable[[Bench], None],
    *,
    selectable: bool = False,
    long: bool = False,
    **jobs: Callable[..., Mapping[str, Any]],
) -> None:
    """Run a script: `measure` does it all; `jobs` are what `Bench.alone` may start in a fresh process.

    A script that is `selectable` heeds `Bench.only`. One that is `long` heeds `Bench.minutes`, and goes on
    from what is in `Bench.found`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a look in about 20 s, too short to judge by")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found here as well")
    parser.add_argument("--null", action="store_true", help="torch's DataLoader on both sides: shows the noise")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    if selectable:
        parser.add_argument("--only", nargs="+", metavar="WORD", help="only what has one of these in its title")
    if long:
        parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most so many ({MINUTES})")
        parser.add_argument("--resume", action="store_true", help="go on from what is in the file of --json")
    parser.add_argument("--alone", nargs="+", metavar=("JOB", "ARG"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    # 4 workers on 2 cores are what some of the requirements ask for.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    script = sys.modules["__main__"].__spec__
    if script is None:
        parser.error("run it from the repository root as python -m tests.benchmarks.NAME")
    bench = Bench(script.name.rpartition(".")[2], args.quick, args.null, getattr(args, "only", None) or [])
    bench.minutes = getattr(args, "minutes", 0)
    if args.alone:
        job, *rest = args.alone
        print(json.dumps(jobs[job](bench, *rest)))
        return
    about = machine()
    if args.json:
        bench.save = lambda: _save(bench, about, args.json)
    if long and args.resume:
        bench.found = _load(bench, about, args.json)
    print(doc.splitlines()[0], *(f"  {key}: {value}" for key, value in about.items()), sep="\n", flush=True)
    measure(bench)
    for line in bench.missed:
        print(f"MISSED  {line}")
    bench.save()
    sys.exit(1 if args.check and bench.missed else 0)


def _save(bench: Bench, about: Mapping[str, str], path: Path) -> None:
    report = {"benchmark": bench.name, "quick": bench.quick, "null": bench.null, "machine": about}
    path.write_text(json.dumps({**report, "found": bench.found, "missed": bench.missed}, indent=1) + "\n")


def _load(bench: Bench, about: Mapping[str, str], path: Path | None) -> dict[str, Any]:
    """Return what a run has found that was broken off, if it was of the same code on the same packages."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    same = all(report["machine"][key] == about[key] for key in ("commit", "packages", "python"))
    found: dict[str, Any] = report["found"] if same and report["quick"] == bench.quick else {}
    print(f"  resumed: {len(found)} entries" if found else f"  begun anew: {path} is of another run", flush=True)
    return found


def kill_tree(pid: int, *, itself: bool = True) -> None:
    """Kill a process and its descendants, so that none of them holds its output open."""
    root = psutil.Process(pid)
    for process in [root] * itself + root.children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def number(value: float) -> str:
    """Show a figure with three digits or so."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of some rounds, the least and the most, and all of them."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "all": list(values)}


def _shown(summary: Mapping[str, float]) -> tuple[str, str]:
    return number(summary["median"]), f"{number(summary['low'])}-{number(summary['high'])}"
