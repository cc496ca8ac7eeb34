"""While the batch whose turn it is takes long, other workers go on: from the first batch on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader


class SlowFirst(Dataset[int]):
    """Sample 0 is there when ten others are, which takes more than the window of four; or never."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 0:
            deadline = time.monotonic() + 20
            while len([*self._made.iterdir()]) < 10:
                time.sleep(0.005)
                if time.monotonic() > deadline:
                    raise TimeoutError("nobody runs ahead")
        else:
            (self._made / str(index)).touch()
        return index


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_a_first_batch_that_is_slow_holds_up_no_other_worker(scheduling: Any, backend: Any, tmp_path: Path) -> None:
    """In each epoch of workers that stay."""
    loader = DataLoader(
        SlowFirst(tmp_path),
        batch_size=1,
        num_workers=2,
        scheduling=scheduling,
        worker_backend=backend,
        persistent_workers=True,
    )
    for _ in range(2):
        assert [int(batch) for batch in loader] == list(range(40))
        for made in tmp_path.iterdir():
            made.unlink()
    loader.close()
