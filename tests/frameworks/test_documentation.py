"""docs/frameworks.md and the examples with frameworks, run as a user runs them: in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import python_blocks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 400  # it trains with each framework, and imports them all


def run(*command: str | Path, folder: Path) -> list[str]:
    """Run a program; see that it ends well, and return what it printed."""
    # Ray Train writes what it keeps of a run into the home directory.
    quiet = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, env=quiet, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_code_of_the_page_runs(tmp_path: Path) -> None:
    """The blocks of the page, one after the other, are a program whose assertions hold."""
    run(sys.executable, "-c", "\n".join(python_blocks(ROOT / "docs" / "frameworks.md")), folder=tmp_path)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the digits; the first example that needs them writes them there."""
    return tmp_path_factory.mktemp("examples") / "digits"


@pytest.mark.parametrize(
    ("devices", "sampler"),
    [("1", "RandomSampler"), pytest.param("2", "DistributedSampler", marks=pytest.mark.slow)],
)
def test_train_lightning(digits: Path, tmp_path: Path, devices: str, sampler: str) -> None:
    """The example trains on one process and on two, which share the images; it says by whom they were loaded."""
    options = ("--epochs", "2", "--min-accuracy", "0.3", "--data", digits, "--devices", devices)
    loaded, accuracy = run(sys.executable, EXAMPLES / "train_lightning.py", *options, folder=tmp_path)[-2:]
    assert loaded == f"loaded by asyncloader.loader.DataLoader, {sampler}"
    assert re.fullmatch(r"test accuracy \d+\.\d% after 2 epochs", accuracy)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="one process", marks=pytest.mark.slow),
        pytest.param(("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"), id="two processes"),
    ],
)
def test_train_accelerate(digits: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """The example trains by itself, and on two processes under `accelerate launch`; our loader is what prepare made."""
    options = ("--epochs", "2", "--min-accuracy", "0.3", "--data", digits)
    printed = run(sys.executable, *launcher, EXAMPLES / "train_accelerate.py", *options, folder=tmp_path)
    assert printed.count("loaded by asyncloader.loader.DataLoader") == 1
    assert re.fullmatch(r"test accuracy \d+\.\d% after 2 epochs", printed[-1])
