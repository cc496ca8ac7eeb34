"""Recipes of the docs: data of other libraries, each in a few lines."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch.utils.data
from webdataset import WebDataset

from asyncloader import DataLoader
from tests.services.s3 import KEYS, put


class Files(torch.utils.data.Dataset[bytes]):
    """What fsspec has a file system for: hf://, sftp://, zip://. Threads overlap the reads (concurrency=)."""

    def __init__(self, urls: list[str], **options: Any) -> None:
        self.urls, self.options = urls, options

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> bytes:
        system, path = fsspec.core.url_to_fs(self.urls[index], **self.options)
        return bytes(system.cat_file(path))


@pytest.mark.leaks("fsspec keeps file systems in a cache")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_through_fsspec(tmp_path: Path, num_workers: int) -> None:
    """Each file once, in order, several at a time."""
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    urls = [f"local://{tmp_path}/{number}.txt" for number in range(20)]
    loader = DataLoader(Files(urls), batch_size=8, num_workers=num_workers, concurrency=4)
    assert [data for batch in loader for data in batch] == [f"text {number}".encode() for number in range(20)]


def _number(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves shards open
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_webdataset_resumes_by_count(tmp_path: Path, num_workers: int) -> None:
    """As it is: what had been read is read again, and left out; the rest of the epoch and the next one are whole."""
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(10):
                info = tarfile.TarInfo(f"{shard}-{number}.txt")
                info.size = len(data := str(10 * shard + number).encode())
                tar.addfile(info, io.BytesIO(data))

    def make() -> DataLoader[Any]:
        stream = WebDataset(str(tmp_path / "{0..3}.tar"), shardshuffle=False).map(_number)
        return DataLoader(stream, batch_size=3, num_workers=num_workers)

    whole = [batch.tolist() for batch in make()]
    assert sorted(number for batch in whole for number in batch) == list(range(40))
    iterator = iter(loader := make())
    begun = [next(iterator).tolist() for _ in range(5)]
    state = loader.state_dict()
    del iterator
    resumed = make()
    resumed.load_state_dict(state)
    assert begun + [batch.tolist() for batch in resumed] == whole
    assert [batch.tolist() for batch in resumed] == whole


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """An array of zarr's wherever obstore reaches: its chunks are awaited, many at once.

    Its workers come from the fork server: obstore has threads, of which forked workers would have none.
    """

    def __init__(self, store: Any, length: int) -> None:
        self.store, self.length = store, length

    def __len__(self) -> int:
        return self.length

    async def __aenter__(self) -> None:
        from zarr.api.asynchronous import open_array
        from zarr.storage import ObjectStore

        self.array = await open_array(store=ObjectStore(self.store, read_only=True), mode="r")

    async def __aexit__(self, *_: object) -> None:
        del self.array

    async def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(await self.array.getitem(index))


def test_an_array_of_zarr_in_an_object_store(s3: str, tmp_path: Path) -> None:
    """Each picture is a chunk, which a worker awaits beside others."""
    asynchronous = pytest.importorskip("zarr.api.asynchronous", reason="`make test-services` installs zarr")
    from obstore.store import S3Store

    pictures = np.arange(20 * 12, dtype=np.float32).reshape(20, 3, 4)
    asyncio.run(asynchronous.from_array(tmp_path, data=pictures, chunks=(1, 3, 4)))
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        put(f"{s3}/pictures/array/{path.relative_to(tmp_path)}", path.read_bytes())
    store = S3Store("pictures", prefix="array", endpoint=s3, client_options={"allow_http": True}, **KEYS)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "forkserver"}
    loader = DataLoader(Pictures(store, 20), batch_size=8, concurrency=16, **options)
    assert torch.equal(torch.cat(list(loader)), torch.from_numpy(pictures))
