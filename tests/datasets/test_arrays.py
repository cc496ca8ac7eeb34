"""ArrayDataset: what TensorDataset gives, of arrays; mapped ones travel by their path."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import ArrayDataset, FetchError

COUNT = 200
PIXELS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
LABELS = np.arange(COUNT) * 3


PLACES = ["memory", "mapped", "loaded"]


def pixels_in(place: str, folder: Path) -> Callable[[], Any]:
    """Return what gives the same array: in memory, a part of a mapped file, a file of numpy's."""
    path = folder / f"{place}.npy"
    if place == "memory":
        return lambda: PIXELS
    if place == "loaded":
        np.save(path, PIXELS)
        return lambda: np.load(path, mmap_mode="r")
    np.concatenate([np.zeros(5000, np.float32), PIXELS.reshape(-1)]).tofile(path)
    return lambda: np.memmap(path, np.float32, "r", offset=4996 * 4)[4:].reshape(COUNT, 2, 3)


@pytest.fixture(params=PLACES)
def pixels(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Gives the array, in each place."""
    return pixels_in(request.param, tmp_path)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_those_of_tensors(loader_class: Any, pixels: Callable[[], Any], num_workers: int) -> None:
    """With torch's loader and ours, in parts too; batches and samples may be written to, without a warning."""
    dataset = ArrayDataset(pixels(), LABELS)
    tensors = TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(LABELS))
    for ours, theirs in ((dataset, tensors), (Subset(dataset, [3, -1, 3]), Subset(tensors, [3, -1, 3]))):
        for batch, expected in zip(
            loader_class(ours, batch_size=64, num_workers=num_workers),
            loader_class(theirs, batch_size=64),
            strict=True,
        ):
            assert all(map(torch.equal, batch, expected))
            assert [part.dtype for part in batch] == [part.dtype for part in expected]
            batch[0].add_(1)
    sample = dataset[-1]
    sample[0].zero_()
    assert torch.equal(dataset[-1][0], torch.from_numpy(PIXELS[-1]))
    assert all(map(torch.equal, dataset.__getitems__([1])[0], dataset[1]))


def test_arrays_travel(loader_class: Any, tmp_path: Path, start_method: str) -> None:
    """To workers however they are started, from whatever place; what is mapped goes by its place in the file."""
    datasets = [ArrayDataset(pixels_in(place, tmp_path)()) for place in PLACES]
    whole = ConcatDataset(datasets)
    batches = list(loader_class(whole, batch_size=COUNT, num_workers=1, multiprocessing_context=start_method))
    assert len(batches) == len(PLACES)
    for (batch,), dataset in zip(batches, datasets, strict=True):
        assert torch.equal(batch, torch.from_numpy(PIXELS))
        data = pickle.dumps(dataset)
        assert (len(data) < 1000) == isinstance(dataset.arrays[0], np.memmap)
        assert torch.equal(pickle.loads(data)[7][0], dataset[7][0])


def numbers_in(path: Path, first: int) -> Any:
    np.save(path, np.arange(first, first + COUNT))
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mapped_file_that_is_replaced(tmp_path: Path, start_method: str, num_workers: int) -> None:
    """Every worker has the numbers that the trainer has, or says that it cannot have them."""
    path = tmp_path / "numbers.npy"
    dataset = ArrayDataset(numbers_in(path, 0))
    numbers_in(tmp_path / "new.npy", 1000)
    os.replace(tmp_path / "new.npy", path)
    assert dataset[3][0] == 3
    how: Any = {"multiprocessing_context": start_method} if num_workers else {}
    loader = DataLoader(dataset, batch_size=COUNT, num_workers=num_workers, **how)
    if num_workers and start_method != "fork":
        with pytest.raises(FetchError, match=r"numbers.npy: another file has taken the place"):
            next(iter(loader))
    else:
        assert next(iter(loader))[0].tolist() == list(range(COUNT))


def test_mapped_files_that_are_the_same(tmp_path: Path) -> None:
    """What is written into the file everybody sees; one without a name travels whole; another machine has its own."""
    path = tmp_path / "numbers.npy"
    dataset = ArrayDataset(numbers_in(path, 0))
    np.load(path, mmap_mode="r+")[3] = 7
    assert pickle.loads(pickle.dumps(dataset))[3][0] == dataset[3][0] == 7
    data = pickle.dumps(dataset)
    (boot_id,) = Path("/proc/sys/kernel/random/boot_id").read_text().split()
    assert data.count(boot_id.encode()) == 1
    numbers_in(tmp_path / "new.npy", 1000)
    os.replace(tmp_path / "new.npy", path)
    elsewhere = data.replace(boot_id.encode(), boot_id[::-1].encode())
    assert pickle.loads(elsewhere)[3][0] == 1003
    array = numbers_in(path, 0)
    path.unlink()
    assert pickle.loads(pickle.dumps(ArrayDataset(array)))[3][0] == 3


def test_changes_and_parts_of_what_is_mapped(tmp_path: Path) -> None:
    """Copies that were written to travel whole, and rows that do not lie together."""
    path = tmp_path / "array"
    PIXELS.tofile(path)
    changed = np.memmap(path, np.float32, "c", shape=PIXELS.shape)
    changed[0] = -1
    rows = np.memmap(path, np.float32, "r", shape=PIXELS.shape)
    for array in (changed, rows[::2], rows[np.array([1, 5])], rows[10:20], rows[:0]):
        again = pickle.loads(pickle.dumps(ArrayDataset(array)))
        assert len(again) == len(array)
        assert all(torch.equal(again[at][0], torch.from_numpy(np.array(array[at]))) for at in range(len(array)))
    assert len(pickle.dumps(ArrayDataset(rows[10:20]))) < 1000


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ([], "at least one array"),
        ([np.array(1)], "with rows"),
        ([[1, 2]], "but got list"),
        ([np.zeros(3), np.zeros(4)], r"of one length, but got \[3, 4\]"),
        ([np.array(["a"])], "torch has no tensors of <U1"),
        ([np.array([1, 2], ">i4")], "torch has no tensors of >i4"),
        ([np.zeros(2, [("a", "i4")])], "torch has no tensors of"),
        ([np.zeros(2, "M8[s]")], "torch has no tensors of"),
        ([np.ma.masked_equal([1, 2], 2)], "tensors have no mask"),
    ],
)
def test_arrays_are_checked(arrays: list[Any], error: str) -> None:
    """At construction, in words."""
    with pytest.raises(ConfigurationError, match=error):
        ArrayDataset(*arrays)
