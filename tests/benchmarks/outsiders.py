"""outsiders: other people's benchmarks of loaders, by their rules, their loaders, torch's and ours in turns.

Measured: torch's tutorial on data loading; SPDL's benchmark of a large dataset on its way to spawned workers;
imread-benchmark's "loader-supply"; torchdata's imagenet example; datago's folder of JPEGs; turboloader's images for
training; nanoGPT's tokens; dataloader-rs' hashes; DLIO's unet3d. What the rules are is written beside each benchmark in
tests/benchmarks/outside, and goes with the results to the page.

Each run is a process of its own, as imread-benchmark asks for. A round goes through all benchmarks, so that a slow
quarter of an hour falls on all of them, and after the first round each has a result. A benchmark is begun again only
if its last round says that it ends in time (--minutes). The first round shows which loaders are there: those that are
not, or fail, are left out with the reason. dataloader-rs needs Python 3.13, DLIO one before: a second run with --only
dataloader-rs writes a file of its own, and the page is made of both.

With --quick: short runs, one round. With --only WORDS: the benchmarks whose names have one of the words in them. With
--minutes M: not longer than that, 40 by default. With --resume: a run of the same commit that was broken off goes on
from what the file of --json has.

No targets: `make bench-outsiders` writes all rounds, the machine, the versions and the commit into docs/results, and
makes docs/outsiders.md of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.bench import Bench, kill_tree, main
from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting

MODULES = ("tutorial", "startup", "images", "tokens", "hashes", "storage")
LIMIT_S = 240  # for one run: the longest take a minute on two cores


def of_module(name: str) -> list[Benchmark]:
    found: list[Benchmark] = importlib.import_module(f"tests.benchmarks.outside.{name}").BENCHMARKS
    return found


def one_job(bench: Bench, module: str, name: str, side: str, folder: str) -> dict[str, Any]:
    """Run one side, or prepare files where no side is named.

    Only the module at hand is imported here: spawned workers import what this process has.
    """
    benchmark = next(benchmark for benchmark in of_module(module) if benchmark.name == name)
    setting = Setting(Path(folder), bench.quick)
    said: dict[str, Any] = {}
    try:
        if side:
            value, extras = benchmark.sides[side](setting)
            said = {"value": value, "extras": dict(extras)}
        elif benchmark.prepare:
            benchmark.prepare(setting)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    # What runs at the end of a program is not measured, and aborts it where threads of torchdata's nodes are left.
    print(json.dumps(said), flush=True)
    kill_tree(os.getpid(), itself=False)
    os._exit(0)


class Turns:
    """The rounds of one benchmark: who takes part, and what has been measured so far."""

    def __init__(self, bench: Bench, module: str, benchmark: Benchmark, folder: str) -> None:
        self.bench, self.module, self.benchmark, self.folder = bench, module, benchmark, folder
        self.rounds = 1 if bench.quick else benchmark.rounds
        self.took_s = 0.0  # by the last round
        self.prepared = benchmark.prepare is None
        self.runs: dict[str, list[Run]] = {}
        for side, found in bench.found.get(benchmark.name, {}).items():  # of the run that is resumed
            self.runs[side] = [Run(value, found["extras"]) for value in found[benchmark.unit]["all"]]

    @property
    def done(self) -> int:
        """How many rounds there are."""
        return len(next(iter(self.runs.values()), ()))

    def job(self, side: str) -> dict[str, Any]:
        said, _ = self.bench.alone(
            "run", self.module, self.benchmark.name, side, self.folder, watch=False, limit_s=LIMIT_S
        )
        if "failed" in said:
            raise RuntimeError(said["failed"])
        return said

    def take(self) -> None:
        """Measure one round. After the first one, a round in which a loader fails does not count."""
        began = time.monotonic()
        if not self.prepared:
            self.job("")
            self.prepared = True
        sides = list(self.runs) or self.sides_that_are_there()
        round_of: dict[str, Run] = {}
        for side in sides:
            try:
                said = self.job(side)
                round_of[side] = Run(said["value"], said["extras"])
            except Exception as error:
                self.leave_out(side, f"round {self.done + 1}: " * bool(self.runs) + str(error))
                if self.runs:
                    return
        if len(round_of) > 1:
            for side, run in round_of.items():
                self.runs.setdefault(side, []).append(run)
            self.bench.show(self.benchmark.name, self.benchmark.unit, self.runs)
        self.took_s = time.monotonic() - began

    def sides_that_are_there(self) -> list[str]:
        """Leave out what is not installed; all, where that is every loader for whose sake there is the benchmark."""
        needs = {side: module.partition(".")[0] for side, module in self.benchmark.needs.items()}
        absent = {side: module for side, module in needs.items() if not importlib.util.find_spec(module)}
        for side, module in absent.items():
            self.leave_out(side, f"{module} is not installed")
        return [] if needs and absent == needs else [side for side in self.benchmark.sides if side not in absent]

    def leave_out(self, side: str, reason: str) -> None:
        name = f"{self.benchmark.name}: {side}".removesuffix(": ")
        self.bench.found.setdefault("left out", {})[name] = reason
        print(f"  {name} left out: {reason}", flush=True)


def measure(bench: Bench) -> None:
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    about = bench.found.setdefault("rules", {})
    until = time.monotonic() + 60 * bench.minutes
    with TemporaryDirectory() as folder:
        all_turns = [
            Turns(bench, name, benchmark, folder)
            for name in MODULES
            for benchmark in of_module(name)
            if not bench.only or any(word in benchmark.name for word in bench.only)
        ]
        for turns in all_turns:
            about[turns.benchmark.whose] = {"link": turns.benchmark.link, "rules": turns.benchmark.rules}
        for number in range(max((turns.rounds for turns in all_turns), default=0)):
            for turns in all_turns:
                if turns.done <= number < turns.rounds and time.monotonic() + turns.took_s < until:
                    try:
                        turns.take()
                    except Exception as error:  # preparing it failed
                        turns.leave_out("", str(error))
                    bench.save()


if __name__ == "__main__":
    main(__doc__ or "", measure, selectable=True, long=True, run=one_job)
