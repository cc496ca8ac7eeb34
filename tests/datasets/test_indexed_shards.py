"""IndexedTarShards: the samples of TarShards by number; indices kept, made anew, shared; changed and damaged shards."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader import ConfigurationError, DataLoader, ElasticSampler
from asyncloader.datasets import FetchError, IndexedTarShards, Retries, TarShards, tar_index
from asyncloader.datasets.block_cache import BlockCache
from asyncloader.datasets.source import Version
from tests import inside
from tests.datasets.test_shards import IDS, SHARDS, read_all, tar_bytes, text
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS, put

pytestmark = pytest.mark.on_threads

BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's caches are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "asyncloader" / "tar"


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    for name, data in SHARDS.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in SHARDS]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer({f"shards/{name}": data for name, data in SHARDS.items()}) as server:
        yield server


async def all_of(dataset: IndexedTarShards[Any]) -> list[Any]:
    async with dataset:
        return await dataset.__getitems__(range(len(dataset)))


LONG = "folder/" + "long" * 30


async def test_samples_are_those_of_tar_shards(tmp_path: Path) -> None:
    """Of several folders, with strays between, long names, empty files: the same dicts in the same order."""
    files = [
        ("a/1.JPG", b"one"), ("a/1.seg.png", b""), ("README", b"no sample"), ("a/.hidden", b"no sample"),
        ("b/1.jpg", b"other"), (f"{LONG}.jpg", b"x" * 512), ("stray", b"y" * 70_000), (f"{LONG}.txt", b"z"),
        ("ümläut.txt", b"y" * 513),
    ]  # fmt: skip
    paths = [tmp_path / "0.tar", tmp_path / "empty.tar", tmp_path / "1.tar"]
    for path, content in zip(paths, (files, [], files[:2]), strict=True):
        path.write_bytes(tar_bytes(content))
    expected = await read_all(TarShards(paths))
    assert [sample["__key__"] for sample in expected] == ["a/1", "b/1", LONG, "ümläut", "a/1"]
    for cache_bytes in (0, 1 << 20):
        dataset = IndexedTarShards(paths, cache_bytes=cache_bytes, block_bytes=512)
        assert await all_of(dataset) == expected
        async with dataset:
            assert await dataset[-1] == expected[-1]
            with pytest.raises(IndexError, match="no sample 5: there are 5"):
                await dataset[5]
            assert await dataset.__getitems__(np.array([4])) == [await dataset[np.int32(4)]]  # type: ignore[arg-type, index]
            for index in (1.9, "3", np.float32(2.7)):
                with pytest.raises(TypeError):
                    await dataset[index]  # type: ignore[index]


@pytest.mark.parametrize(("num_workers", "cache_bytes"), [(0, 0), (2, 0), (2, 1 << 24)])
def test_any_order_on_any_number_of_ranks(shards: list[Path], num_workers: int, cache_bytes: int) -> None:
    """Each sample once; an epoch that 4 ranks began with 1 worker goes on on 3 with more; all have equal steps."""
    dataset = IndexedTarShards(shards, text, cache_bytes=cache_bytes, block_bytes=1 << 18)
    assert dataset.block_sizes.sum() == len(dataset) == 120
    assert len(dataset.block_sizes) > 6

    def loader(rank: int, ranks: int, workers: int) -> Any:
        sampler = ElasticSampler(dataset, ranks, rank, drop_last=True)
        return DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=workers)

    found, states = [], []
    for rank in range(4):
        with iter(loader(rank, 4, 1)) as batches:
            found += [name for _ in range(3) for name in next(batches)]
            states.append(batches.state_dict())
    for rank in range(3):
        resumed = loader(rank, 3, num_workers)
        resumed.load_state_dict(states[0])
        rest = list(resumed)
        assert len(rest) == 4
        found += [name for batch in rest for name in batch]
    assert sorted(found) == IDS


def test_indices_are_kept_and_made_anew(
    shards: list[Path], cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Beside the shards or in a folder, for each shard by itself; whatever else lies there is no index."""
    made: list[str] = []
    run_apart = tar_index.run_apart

    def watched(function: Any, urls: Any, *args: Any) -> Any:
        made.extend(os.path.basename(url) for url in urls)
        return run_apart(function, urls, *args)

    monkeypatch.setattr(tar_index, "run_apart", watched)
    assert len(IndexedTarShards(shards[:3])) == 60
    assert made == ["00.tar", "01.tar", "02.tar"]
    assert len(IndexedTarShards(shards[:4])) == 80
    assert made == ["00.tar", "01.tar", "02.tar", "03.tar"]
    assert shards[3].with_name("03.tar.index").exists()

    made.clear()
    caplog.set_level(logging.INFO, "asyncloader.datasets")
    shards[1].write_bytes(tar_bytes([("1.txt", b"one")]))
    os.utime(shards[2], ns=(1, 1))
    shards[3].with_name("03.tar.index").write_bytes(b"no index")
    assert len(IndexedTarShards(shards[:4])) == 61
    assert made == ["01.tar", "02.tar", "03.tar"]
    assert "01.tar.index: is of another version of its shard, and made anew" in caplog.text

    made.clear()
    for _ in range(2):
        assert len(IndexedTarShards(shards[4:], index=tmp_path / "indices")) == 40
    assert made == ["04.tar", "05.tar"]
    assert len(list((tmp_path / "indices").iterdir())) == 2

    made.clear()
    tar_index.save([Path("/proc/none/index")], Version(1, ""), np.empty((0, 2), np.int64))
    assert "cannot be kept" in caplog.text
    monkeypatch.setattr(tar_index, "_places", lambda *_: [Path("/proc/none/index"), cache_folder / "index"])
    for _ in range(2):
        IndexedTarShards(shards[:1])
    assert made == ["00.tar"]
    assert not list(tmp_path.rglob("*.part"))


WRONG_SPANS: dict[str, list[tuple[int, int]]] = {
    "behind the end": [(0, 512), (512, 1 << 40)],
    "before the beginning": [(-512, 512)],
    "backwards": [(1024, 512)],
    "empty": [(512, 512)],
    "out of order": [(1024, 2048), (0, 512)],
    "overlapping": [(0, 2048), (1024, 4096)],
    "between blocks": [(0, 513)],
    "more than fit": [(0, 512)] * 100_000,
}


@pytest.mark.parametrize("spans", WRONG_SPANS.values(), ids=WRONG_SPANS)
def test_an_index_that_cannot_be_of_its_shard_is_made_anew(shards: list[Path], spans: list[tuple[int, int]]) -> None:
    """Whoever made the shard may have put it there: it is believed no more than the shard is."""
    version = Version.of_file(str(shards[0]))
    tar_index.save([Path(f"{shards[0]}.index")], version, np.array(spans, np.int64))
    dataset = IndexedTarShards(shards[:1])
    assert len(dataset) == 20
    assert tar_index.load([Path(f"{shards[0]}.index")], version).tolist() == inside.spans(dataset).tolist()  # type: ignore[union-attr]


def test_what_lies_in_the_place_of_an_index_is_not_waited_for(shards: list[Path]) -> None:
    """A pipe, a device without an end, a folder, a file of a terabyte; none takes time or memory."""
    places = [Path(f"{shard}.index") for shard in shards[:4]]
    os.mkfifo(places[0])
    places[1].symlink_to("/dev/zero")
    places[2].mkdir()
    with open(places[3], "wb") as file:
        file.write(tar_index.head(Version.of_file(str(shards[3]))))
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        assert len(IndexedTarShards(shards[:4])) == 80
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


async def test_a_shard_that_changed_is_an_error(shards: list[Path]) -> None:
    """When a sample of it is asked for; and an index that lies is found out by what it points to."""
    dataset = IndexedTarShards(shards, text)
    os.utime(shards[0], ns=(1, 1))
    async with dataset:
        with pytest.raises(FetchError, match=r"00.tar: was changed since this dataset was made"):
            await dataset[0]
        assert await dataset[20] == IDS[20]
        inside.spans(dataset)[21] = [0, 512]
        with pytest.raises(FetchError, match=r"01.tar: 0 samples where its index has one, number 21, at byte 0"):
            await dataset[21]


def test_damaged_shards_are_errors_at_construction(tmp_path: Path) -> None:
    """With the name of the shard, and no index of it is kept."""
    path = tmp_path / "shard.tar"
    whole = tar_bytes([("1.txt", b"x" * 3000), ("1.cls", b"1")])
    for data, words in (
        (whole[:2500], "damaged: it ends in the middle of 1.txt"),
        (whole[: len(whole) // 10_240 * 10_240 - 10_240], "damaged: "),
        (tar_bytes([("1.txt", b"a"), ("1.TXT", b"b")]), r"a second .txt of the sample 1"),
        (b"no tar" * 1000, "damaged: "),
    ):
        path.write_bytes(data)
        with pytest.raises(FetchError, match=rf"shard.tar: {words}"):
            IndexedTarShards([path])
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith("index")] == []
    path.write_bytes(tar_bytes([]))
    with pytest.raises(ConfigurationError, match=r"there is no sample in 1 shards, the first of which is .*shard.tar"):
        IndexedTarShards([path])
    path.with_suffix(".tar.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(ConfigurationError, match=r"is compressed.*use TarShards"):
        IndexedTarShards([path.with_suffix(".tar.gz")])
    for options in ({"cache_bytes": -1}, {"block_bytes": 1.5}, {"decode_threads": True}):
        with pytest.raises(ConfigurationError, match="should be an integer of at least"):
            IndexedTarShards([path], **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="there are no shards"):
        IndexedTarShards([])
    with pytest.raises(FileNotFoundError):
        IndexedTarShards([tmp_path / "none.tar"])


@pytest.mark.processes
@pytest.mark.usefixtures("stream_of_the_portal")
def test_over_http_blocks_are_read_once(server: FaultServer) -> None:
    """In the order of the shards, a request for each block; after a pickle as well."""
    urls = [server.url(f"shards/{name}") for name in SHARDS]
    dataset = IndexedTarShards(urls, text, cache_bytes=1 << 22, block_bytes=1 << 19, retries=BRISK)
    assert len(dataset) == 120
    before = server.seen()["requests"]
    loader = DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=5, num_workers=1)
    assert [name for batch in loader for name in batch] == IDS
    assert server.seen()["requests"] - before == len(dataset.block_sizes)


@pytest.mark.usefixtures("threads_of_obstore")
def test_shards_in_an_object_store(s3: str) -> None:
    """An index of what lies in S3, made by a process of its own and kept in the user's cache."""
    for name, data in SHARDS.items():
        put(f"{s3}/pictures/indexed/{name}", data)
    urls = [f"s3://pictures/indexed/{name}" for name in SHARDS]
    options: dict[str, Any] = {"config": {"endpoint": s3, "region": "us-east-1", **KEYS}}
    dataset = IndexedTarShards(urls, text, client_options={"allow_http": True}, **options)
    assert asyncio.run(all_of(dataset)) == IDS


async def test_a_cache_of_blocks_is_bounded_and_reads_once() -> None:
    """Who asks for what is being read waits for that; what was used last stays; errors are not kept."""
    reads: list[int] = []
    gate = asyncio.Event()

    async def read(number: int) -> bytes:
        reads.append(number)
        await gate.wait()
        if number < 0:
            raise ValueError(number)
        return bytes(number)

    cache = BlockCache[bytes](100, len)
    first, second = (asyncio.create_task(cache.get(40, read)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == bytes(40)
    for number in (50, 40, 60, 40, 50, 200, 40):
        assert len(await cache.get(number, read)) == number
    assert reads == [40, 50, 60, 50, 200]  # 60 drove out 50, 50 then 60; 200 does not fit at all
    assert cache.bytes == 90
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            await cache.get(-1, read)
    assert reads[-2:] == [-1, -1]
    gate.clear()
    left = asyncio.create_task(cache.get(7, read))
    await asyncio.sleep(0)
    await cache.aclose()
    with pytest.raises(asyncio.CancelledError):
        await left
