"""Examples with libraries that bring samplers, decoders or trainers: they train, stop, and resume."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.frameworks.test_documentation import EXAMPLES, run

STOPPED = {
    "train_video.py": ("av", "stopped after 17 and resumed with 1 worker in place of 2: the same losses"),
    "train_lhotse.py": (
        "lhotse", "stopped after 7 and resumed with 1 worker and with none in place of 2: the same losses"
    ),
}  # fmt: skip


def train(name: str, package: str, folder: Path) -> list[str]:
    """Run an example where its package is; return what it printed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-frameworks` installs it")
    return run(sys.executable, EXAMPLES / name, folder=folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", STOPPED)
def test_a_training_that_was_stopped_has_the_losses_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    """With videos of two cameras, and with speech in dynamic buckets: on other numbers of workers."""
    package, stopped = STOPPED[name]
    losses, resumed = train(name, package, tmp_path)[-2:]
    assert re.fullmatch(r"loss [01]\.\d+ to 0\.0\d+ in 48 steps of .*", losses)
    assert resumed == stopped


@pytest.mark.timeout(120)
def test_the_trainer_of_trl_takes_batches_of_ours_and_resumes(tmp_path: Path) -> None:
    """From a checkpoint in the middle of an epoch, with our options."""
    loaded, resumed = train("train_sft.py", "trl", tmp_path)[-2:]
    assert loaded == "loaded by asyncloader.loader.DataLoader, scheduling='dynamic'"
    assert re.fullmatch(r"loss 2\.\d+ to 1\.\d+ in 12 steps; stopped after 5 and resumed: the same losses", resumed)
