"""The first steps of a worker: memory that samples free is kept, and what is the trainer's is left alone."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.support.nursery import Program

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc's malloc")

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


@glibc
def test_memory_of_a_batch_is_used_again(start_method: str) -> None:
    """Its samples are freed together, and the next batch faults in next to no page, however the worker was started."""
    assert faults(start_method) < PAGES / 10


@glibc
def test_what_malloc_was_told_wins(run: Callable[..., Program]) -> None:
    """Who sets malloc's thresholds has reasons: here by a call, as glibc does itself by the environment."""
    program = run("""
        import ctypes
        from tests.worker.test_bootstrap import faults

        M_MMAP_THRESHOLD = -3
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
        print(faults("fork"))
        """)
    assert float(program.out) > PAGES / 2


@glibc
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "65536"}, id="MALLOC_"),
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}, id="GLIBC_TUNABLES"),
    ],
)
@pytest.mark.slow  # fresh interpreters, which import torch
def test_what_the_environment_says_wins(setting: dict[str, str]) -> None:
    """Who sets malloc's thresholds has reasons."""
    script = "from tests.worker.test_bootstrap import faults; print(faults('fork'))"
    environment = {**os.environ, **setting}
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=True, env=environment, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert float(found.stdout) > PAGES / 2


def test_nothing_of_the_trainer_ends_in_a_worker(run: Callable[..., Program], tmp_path: Path) -> None:
    """What only handlers refer to, of the exit, of a signal or multiprocessing's, is not run or destroyed in a fork."""
    folder = tmp_path / "of the trainer"
    folder.mkdir()
    program = run(
        """
        import atexit, os, signal, sys, tempfile
        from functools import partial
        from multiprocessing import util
        from asyncloader import DataLoader

        folder, trainer = sys.argv[1], os.getpid()

        class Owned:
            def __init__(self, name):
                self.path = os.path.join(folder, name)

            def __call__(self, *args):
                pass

            def method(self):
                pass

            def __del__(self):
                if os.getpid() != trainer:
                    open(self.path, "w").close()

        if __name__ == "__main__":
            atexit.register(Owned("method").method)
            atexit.register(Owned("callable"))
            atexit.register(partial(print, Owned("of a partial")))
            signal.signal(signal.SIGUSR1, Owned("of a signal"))
            util.Finalize(None, print, args=(Owned("of a finalizer"),), exitpriority=0)
            temporary = tempfile.TemporaryDirectory(dir=folder)
            path = temporary.name
            atexit.register(temporary.cleanup)
            del temporary
            for _ in DataLoader(range(8), num_workers=2, multiprocessing_context="fork"):
                pass
            assert os.listdir(folder) == [os.path.basename(path)], os.listdir(folder)
        """,
        folder,
    )
    assert program.returncode == 0, program.explain("it failed")
