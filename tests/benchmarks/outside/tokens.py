"""Tokens by nanoGPT's measures: a flat file of 55 million, batches of 32 rows of 1,024, inputs and targets as int64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting, loader_class

SIZE, BATCH = 1024, 32
MILLIONS = 55


class Blocks(Dataset[Tensor]):
    """The dataset of docs/guides/which-dataset.md: blocks of a file, a whole batch at once."""

    collated = True

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Tensor:
        starts = np.array(indices) * SIZE
        return torch.from_numpy(self.tokens[starts[:, None] + np.arange(SIZE + 1)])


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Make int64 of rows that are one token longer, and return inputs and targets."""
    tokens = torch.from_numpy(rows.numpy().astype(np.int64))  # as the others do: torch would use threads for so little
    return tokens[:, :-1], tokens[:, 1:]


def get_batch(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """What nanoGPT does in place of a loader: rows at random places, from a new map of the file for each batch."""
    while True:
        tokens = np.memmap(path, np.uint16, mode="r")
        starts = torch.randint(len(tokens) - SIZE, (BATCH,)).tolist()
        rows = [torch.from_numpy(tokens[start : start + SIZE].astype(np.int64)) for start in starts]
        following = [torch.from_numpy(tokens[start + 1 : start + 1 + SIZE].astype(np.int64)) for start in starts]
        yield torch.stack(rows), torch.stack(following)


def turboloader(path: Path) -> Iterable[Any]:
    import turboloader

    loader: Iterable[Any] = turboloader.TokenDataLoader(str(path), seq_len=SIZE, batch_size=BATCH, dtype="uint16")
    return ((torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in loader)


def litdata(path: Path) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset: Any = StreamingDataset(
        str(path.parent / "litdata"), item_loader=TokensLoader(block_size=SIZE + 1), shuffle=True
    )
    return map(halves, StreamingDataLoader(dataset, batch_size=BATCH, num_workers=2))


def as_it_is(rows: Tensor) -> Tensor:
    return rows


def blocks(name: str, workers: int, path: Path) -> Iterable[Any]:
    dataset = Blocks(path)
    options = {} if name == "asyncloader" else {"collate_fn": as_it_is}
    return map(halves, loader_class(name)(dataset, BATCH, shuffle=True, num_workers=workers, **options))


def tokens_a_second(make: Callable[[Path], Iterable[Any]], setting: Setting) -> Run:
    """Millions of tokens a second, after ten batches that do not count."""
    batches = iter(make(setting.folder / "train.bin"))
    for _ in range(10):
        inputs, targets = next(batches)
    assert inputs.shape == targets.shape == (BATCH, SIZE)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    count = 100 if setting.quick else 1000
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return Run(count * BATCH * SIZE / (time.perf_counter() - began) / 1e6)


def write_tokens(setting: Setting) -> None:
    """Write the flat file, and the same as litdata keeps it."""
    tokens = np.random.default_rng(0).integers(0, 50257, MILLIONS * 1_000_000).astype(np.uint16)
    tokens.tofile(setting.folder / "train.bin")
    try:
        from litdata import TokensLoader, optimize
    except ImportError:
        return
    pieces = [(str(setting.folder / "train.bin"), number, 16) for number in range(16)]
    optimize(
        fn=piece, inputs=pieces, output_dir=str(setting.folder / "litdata"), chunk_size=(SIZE + 1) * 4096,
        item_loader=TokensLoader(), num_workers=1,
    )  # fmt: skip


def piece(part: tuple[str, int, int]) -> Iterator[Tensor]:
    """One of so many parts of the file: whole blocks, as litdata's loader cuts chunks into such."""
    path, number, count = part
    tokens = np.memmap(path, np.uint16, mode="r")
    each = len(tokens) // count // (SIZE + 1) * (SIZE + 1)
    yield torch.from_numpy(np.array(tokens[number * each : (number + 1) * each]))


MAKERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "nanoGPT's get_batch": get_batch,
    "turboloader": turboloader,
    "litdata, 2 workers": litdata,
    "torch, 2 workers": partial(blocks, "torch", 2),
    "asyncloader, no workers": partial(blocks, "asyncloader", 0),
    "asyncloader, 2 workers": partial(blocks, "asyncloader", 2),
}
BENCHMARKS = [
    Benchmark(
        title="inputs and targets",
        unit="M tokens/s",
        whose="nanoGPT's tokens",
        link="https://github.com/karpathy/nanoGPT/blob/master/train.py",
        rules=f"{MILLIONS} million tokens in a file of uint16, batches of 32 rows of 1,024 in random order, as "
        "int64 on the CPU. `get_batch` and turboloader draw places at random, in the trainer's thread; "
        "others take each block once.",
        sides={name: partial(tokens_a_second, make) for name, make in MAKERS.items()},
        needs={"turboloader": "turboloader", "litdata, 2 workers": "litdata"},
        prepare=write_tokens,
    )
]
