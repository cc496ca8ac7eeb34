"""transport_types: batches that are not one collated tensor.

Measured: batches a second with 2 workers at default options, torch's DataLoader and ours taking turns, of
- sequences of different lengths, padded to the longest by a user's `collate_fn`, with a mask: short (32 sequences
  of up to 512 tokens, about 0.15 MB) and long (64 of up to 4,096 steps of 8 floats, about 8 MB);
- pandas frames: small (64 rows made by a `collate_fn`, numbers and strings) and large (batch_size=None, 100,000
  rows of 8 columns of float64, 6.4 MB);
- pyarrow record batches: small (64 rows, numbers and strings) and large (batch_size=None, 6.4 MB). The consumer
  reads one element per page where there are pages to read. Samples are made before, so that the workers' part is
  collation. 2 s a run (0.5 s with --quick).

Targets: no slower than torch anywhere; faster where bytes are moved (the long and the large).

Not profiled yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, drain

POOL = 512


class Samples(Dataset[Any]):
    """Samples made before, handed out in turn."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


# ---- sequences ----


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(16, 513, (POOL,), generator=generator)
    return [torch.randint(0, 50_000, (int(length),), generator=generator) for length in lengths]


def series() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.ones(int(length), 8) for length in torch.randint(256, 4097, (POOL,), generator=generator)]


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad to the longest, with a mask: what many write for themselves."""
    longest = max(len(sample) for sample in samples)
    padded = samples[0].new_zeros(len(samples), longest, *samples[0].shape[1:])
    mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        padded[row, : len(sample)] = sample
        mask[row, : len(sample)] = True
    return {"padded": padded, "mask": mask}


def read_tensors(batch: dict[str, torch.Tensor]) -> None:
    for tensor in batch.values():
        tensor.view(-1)[:: 4096 // tensor.itemsize].sum()


# ---- frames and record batches ----


def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(8)
    return [
        {"name": f"sample {row}", "label": row % 10, **dict(zip("abcdef", draw.random(6), strict=True))}
        for row in range(POOL)
    ]


def columns() -> dict[str, Any]:
    return {name: np.random.default_rng(9).random(100_000) for name in "abcdefgh"}


def large_frames() -> list[Any]:
    return [pd.DataFrame(columns()) for _ in range(4)]


def large_record_batches() -> list[Any]:
    return [pa.RecordBatch.from_pydict(columns()) for _ in range(4)]


def read_frame(batch: Any) -> None:
    for name in batch.columns:
        values = batch[name].to_numpy()
        if values.dtype != object:
            values[::512].sum()


def read_record_batch(batch: Any) -> None:
    for column in batch.columns:
        if pa.types.is_floating(column.type):
            column.to_numpy()[::512].sum()


# name: samples, batch size, collate_fn, what the consumer does
CASES: dict[str, tuple[Callable[[], list[Any]], int | None, Callable[..., Any] | None, Callable[[Any], None]]] = {
    "sequences, short": (tokens, 32, pad, read_tensors),
    "sequences, long": (series, 64, pad, read_tensors),
    "pandas, small": (rows, 64, pd.DataFrame, read_frame),
    "pandas, large": (large_frames, None, None, read_frame),
    "pyarrow, small": (rows, 64, pa.RecordBatch.from_pylist, read_record_batch),
    "pyarrow, large": (large_record_batches, None, None, read_record_batch),
}


def measure(bench: Bench) -> None:
    def run(loader: Callable[..., Any], name: str) -> Run:
        samples, batch_size, collate_fn, use = CASES[name]
        made = loader(Samples(samples()), batch_size=batch_size, collate_fn=collate_fn, num_workers=2)
        return drain(made, use, warm_up=16, seconds=0.5 if bench.quick else 2.0)

    for name in CASES:
        sides = {side: partial(run, loader, name) for side, loader in bench.loaders.items()}
        bench.compare(name, "batches/s", sides, rounds=2 if bench.quick else 7, targets={"ours": Target(">=", 1)})


if __name__ == "__main__":
    main(__doc__ or "", measure)
