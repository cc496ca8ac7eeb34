"""What workers do with memory that samples free: they keep it, so that the next sample finds it mapped."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc's malloc")

SAMPLE_BYTES = 800_000
PAGES = SAMPLE_BYTES // resource.getpagesize()
BATCH = 8


class Decodes(Dataset[tuple[np.ndarray, int]]):
    """Makes samples as a decoder does; tells how many page faults each cost."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        sample = np.ones(SAMPLE_BYTES, np.uint8)
        return sample, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def faults(start_method: str) -> float:
    """Return the page faults of a sample, once the heap has grown to what a batch needs."""
    loader = DataLoader(Decodes(), BATCH, num_workers=1, multiprocessing_context=start_method)
    *_, last = (count.double().mean().item() for _, count in loader)
    return last


def test_memory_of_a_batch_is_used_again(start_method: str) -> None:
    """Its samples are freed together, and the next batch faults in next to no page, however the worker was started."""
    assert faults(start_method) < PAGES / 10


@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_MMAP_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}],
    ids=lambda setting: next(iter(setting)),
)
def test_what_the_environment_says_wins(setting: dict[str, str]) -> None:
    """Who sets malloc's thresholds has reasons."""
    script = "from tests.workers.child.test_bootstrap import faults; print(faults('fork'))"
    environment = {**os.environ, **setting}
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=True, env=environment, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert float(found.stdout) > PAGES / 2
