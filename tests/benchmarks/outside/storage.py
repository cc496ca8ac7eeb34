"""DLIO, the generator of MLPerf Storage, with our class in place of torch's: how many accelerators are kept busy.

Run as a program it is DLIO's own, for one accelerator of `mpiexec`; see `run`. DLIO of PyPI imports TensorFlow for a
profiler that PyTorch's workloads do not use: an empty module stands in for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting

MOST = 8  # accelerators for which there are files
FILES = 28  # for each accelerator: four steps of seven samples an epoch
SCALE = 16
OURS = "tests.benchmarks.outside.storage_loader.AsyncLoader"


def run(folder: Path, accelerators: int, *options: str) -> None:
    """Start DLIO with so many ranks, each of which is an accelerator that sleeps for its steps."""
    files = [f"dataset.num_files_train={FILES * accelerators}", f"dataset.data_folder={folder}/data"]
    length, deviation = (size // SCALE for size in (146_600_628, 68_341_808))
    size = [f"dataset.record_length={length}", f"dataset.record_length_stdev={deviation}"]
    always = ["workflow.checkpoint=False", f"output.folder={folder}/output", "reader.read_threads=1"]
    overrides = [f"++workload.{option}" for option in (*files, *size, *always, *options)]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", str(accelerators), sys.executable, "-m", __spec__.name, "workload=unet3d_h100"]
    done = subprocess.run([*command, *overrides, f"hydra.run.dir={folder}/output"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"DLIO ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")


def utilization(loader: str, accelerators: int, folder: Path, epochs: int) -> float:
    """Return the share of its time that an accelerator computed, on average, in percent."""
    chosen = [f"reader.data_loader_classname={OURS}", "reader.data_loader_sampler=index"] * (loader == "asyncloader")
    run(folder, accelerators, f"train.epochs={epochs}", *chosen)
    summary: dict[str, Any] = json.loads((folder / "output" / "summary.json").read_text())
    return float(summary["metric"]["train_au_mean_percentage"])


def accelerators_held(loader: str, setting: Setting) -> Run:
    """Add accelerators until they compute for less than 90 % of the time."""
    seen: dict[str, float] = {}
    held = 0
    for accelerators in range(1, 3 if setting.quick else MOST + 1):
        share = utilization(loader, accelerators, setting.folder, 1 if setting.quick else 5)
        seen[f"AU of {accelerators}, %"] = share
        if share < 90:
            break
        held = accelerators
    return Run(held, seen)


def write_files(setting: Setting) -> None:
    most = 2 if setting.quick else MOST
    run(setting.folder, most, "workflow.generate_data=True", "workflow.train=False")


SIDES = {name: partial(accelerators_held, name) for name in ("torch", "asyncloader")}
BENCHMARKS = [
    Benchmark(
        title="held at 90 %",
        unit="accelerators",
        whose="DLIO's unet3d",
        link="https://github.com/argonne-lcf/dlio_benchmark",
        rules="MLPerf Storage's unet3d for an H100, with files of a sixteenth of their size in the page cache, "
        "one worker for each accelerator, batches of seven, steps of 323 ms, five epochs: how many "
        "accelerators compute for at least 90 % of the time.",
        sides=SIDES,
        needs=dict.fromkeys(SIDES, "dftracer"),  # DLIO itself can be installed without it, and cannot be imported
        prepare=write_files,
    )
]


if __name__ == "__main__":
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
    from dlio_benchmark.main import main

    main()
