"""FileDataset: files read by both faces."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from asyncloader import DataLoader
from asyncloader.datasets import FileDataset


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten files, some of them a folder deeper."""
    for number in range(10):
        path = tmp_path / "texts" / ("even" if number % 2 == 0 else "") / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"text {number}")
    return tmp_path / "texts"


ORDER = [1, 3, 5, 7, 9, 0, 2, 4, 6, 8]  # sorted by path


def test_samples_by_both_faces(texts: Path) -> None:
    """Of a folder, of many paths, of one; with the path for functions that take it; after a pickle."""

    async def awaited(dataset: FileDataset[Any]) -> list[Any]:
        return await asyncio.gather(*map(dataset.getitem, range(len(dataset))))

    for paths in (texts, str(texts), [texts / ("even" * (n % 2 == 0)) / f"{n}.txt" for n in ORDER]):
        dataset = pickle.loads(pickle.dumps(FileDataset(paths, _numbered, pattern="**/*.txt")))
        wanted = [(number, f"text {number}") for number in ORDER]
        assert list(dataset) == wanted
        assert asyncio.run(awaited(dataset)) == wanted
    assert list(FileDataset(texts / "1.txt", bytes.decode)) == ["text 1"]
    assert FileDataset(texts)[-1] == b"text 8"


def _numbered(data: bytes, path: Path) -> tuple[int, str]:
    return int(path.stem), data.decode()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_of_both_kinds(texts: Path, num_workers: int) -> None:
    """torch's and ours give the same, also of a part."""
    part = torch.utils.data.Subset(FileDataset(texts, lambda data: int(data[5:])), range(7))
    for kind in (torch.utils.data.DataLoader, DataLoader):
        assert torch.cat(list(kind(part, batch_size=3, num_workers=num_workers))).tolist() == ORDER[:7]


async def test_missing_files_and_folders_are_named(texts: Path) -> None:
    """A folder that is not there, or has nothing that matches, is an error at construction; a file when it is read."""
    with pytest.raises(FileNotFoundError, match=r"no such file or folder.*nowhere"):
        FileDataset(texts / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"nothing in it is \*\.png"):
        FileDataset(texts, pattern="*.png")
    os.mkfifo(texts / "pipe")
    dataset = FileDataset([texts / "gone.txt", texts / "pipe"])
    for index, words in enumerate((r"gone\.txt", "is no regular file")):
        with pytest.raises(OSError, match=words):
            dataset[index]
        with pytest.raises(OSError, match=words):
            await dataset.getitem(index)
