"""Tar shards: the layout, the division of the data, the order, streams that break, resuming."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset

from asyncloader.datasets import FetchError, Retries, TarShards
from asyncloader.datasets.http import HTTPSource
from asyncloader.datasets.local import CHUNK_BYTES
from asyncloader.datasets.shards import share_of
from asyncloader.datasets.sources import gunzip
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS, put

pytestmark = pytest.mark.usefixtures("threads_of_obstore")

BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)
SAMPLES = 20  # of each shard


def tar_bytes(files: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as shard:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        shard.addfile(folder)
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5  # a fraction of a second makes a pax header
            shard.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def shard_bytes(number: int) -> bytes:
    """A shard of 20 samples of about 50 kB: more than comes in one piece."""
    ids = [f"{number:02}-{position:03}" for position in range(SAMPLES)]
    return tar_bytes(
        [(f"{one}.{part}", one.encode() * size) for one in ids for part, size in (("txt", 1), ("bin", 8000))]
    )


SHARDS = {f"{number:02}.tar": shard_bytes(number) for number in range(6)}
IDS = [f"{number:02}-{position:03}" for number in range(6) for position in range(SAMPLES)]


IN_STORE = {
    **SHARDS,
    **{f"bucket/{name}": data for name, data in SHARDS.items()},
    "bucket/run#1/07.tar.gz": gzip.compress(tar_bytes([("1.txt", b"one")])),
}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    for name, data in SHARDS.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in SHARDS]


@pytest.fixture(scope="module")
def shards_in_s3(s3: str) -> str:
    for name, data in SHARDS.items():
        put(f"{s3}/pictures/shards/{name}", data)
    return s3


@pytest.fixture(scope="module")
def shard_server() -> Iterator[FaultServer]:
    with FaultServer(IN_STORE) as server:
        yield server


def text(sample: dict[str, Any]) -> str:
    """The sample's id, if the sample is whole."""
    found: str = sample["txt"].decode()
    assert sample["bin"] == sample["txt"] * 8000
    assert found == sample["__key__"]
    return found


async def read_all(dataset: TarShards[Any], limit: int | None = None) -> list[Any]:
    found: list[Any] = []
    async with dataset:
        iterator = aiter(dataset)
        async for sample in iterator:
            found.append(sample)
            if len(found) == limit:
                break
        await iterator.aclose()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_files_of_a_sample_are_put_together(tmp_path: Path, tar_format: int) -> None:
    """Up to the first dot of the name; folders count; extensions in lower case; long names; strays are left out."""
    long = "folder/" + "long" * 30 if tar_format != tarfile.USTAR_FORMAT else "short"
    files = [
        ("a/1.JPG", b"one"), ("a/1.seg.png", b""), ("README", b"no sample"), ("a/.hidden", b"no sample"),
        ("b/1.jpg", b"other"), (f"{long}.jpg", b"x" * 512), ("ümläut.txt", b"y" * 513),
    ]  # fmt: skip
    path = tmp_path / "shard.tar"
    path.write_bytes(tar_bytes(files, tar_format))
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()[:1000]) + gzip.compress(path.read_bytes()[1000:]))
    for shard in (path, packed):
        assert await read_all(TarShards([shard])) == [
            {"__key__": "a/1", "__url__": str(shard), "jpg": b"one", "seg.png": b""},
            {"__key__": "b/1", "__url__": str(shard), "jpg": b"other"},
            {"__key__": long, "__url__": str(shard), "jpg": b"x" * 512},
            {"__key__": "ümläut", "__url__": str(shard), "txt": b"y" * 513},
        ]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # theirs
async def test_what_webdataset_wrote_is_read_as_webdataset_does(tmp_path: Path) -> None:
    """The same samples as the library reads whose layout this is."""
    path = str(tmp_path / "shard.tar")
    with webdataset.TarWriter(path) as writer:
        for number in range(5):
            writer.write({"__key__": f"part{number % 2}/{number:03}", "txt": "word", "cls": number, "a.b": b"\0" * 700})
    theirs = [
        {name: value for name, value in sample.items() if not name.startswith("__l")}
        for sample in webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
    ]
    assert await read_all(TarShards([path])) == theirs


@pytest.mark.parametrize("readers", [1, 2, 4, 5, 7, 13])
async def test_ranks_share_the_samples(shards: list[Path], readers: int) -> None:
    """Whether there are more shards than readers or fewer: each sample once."""
    found = []
    for rank in range(readers):
        found += await read_all(TarShards(shards, text, rank=rank, world_size=readers, shuffle_shards=True))
    assert sorted(found) == IDS


def test_every_number_of_readers_shares_every_number_of_shards() -> None:
    """Each shard has all its parts read, once each, and none stands idle while there is something to share."""
    for num_shards in range(1, 12):
        names = [str(number) for number in range(num_shards)]
        for readers in range(1, 30):
            read: Counter[tuple[str, int, int]] = Counter()
            for number in range(readers):
                mine, part, parts = share_of(names, number, readers)
                assert mine
                read.update((name, part, parts) for name in mine)
            assert set(read.values()) == {1}
            for name in names:
                (parts,) = {parts for one, _, parts in read if one == name}
                assert sum(one == name for one, _, _ in read) == parts


async def test_the_order_depends_on_seed_and_epoch(shards: list[Path]) -> None:
    """The same again for the same numbers; another one for each epoch."""

    def dataset(seed: int = 3) -> TarShards[str]:
        return TarShards(shards, text, shuffle_shards=True, shuffle_buffer=30, seed=seed)

    one = dataset()
    epochs = []
    for epoch in range(3):
        one.set_epoch(epoch)
        epochs.append(await read_all(one))
    assert await read_all(one) == epochs[2]
    assert all(sorted(epoch) == IDS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    shards_begun = dict.fromkeys(sample[:2] for sample in epochs[0])
    assert list(shards_begun) != sorted(shards_begun)
    again = pickle.loads(pickle.dumps(dataset()))
    again.set_epoch(2)
    assert await read_all(again) == epochs[2]
    assert await read_all(dataset(seed=4)) != epochs[0]
    assert await read_all(TarShards(shards, text)) == IDS


async def test_a_buffer_for_all_samples_gives_them_in_any_order(shards: list[Path]) -> None:
    """What is left in it at the end of the shards is drawn at random as well."""
    found = await read_all(TarShards(shards, text, shuffle_buffer=len(IDS)))
    assert sorted(found) == IDS
    assert found != IDS


async def test_reading_goes_on_where_it_was(shards: list[Path]) -> None:
    """A state that was saved after any number of samples gives the rest of its epoch, and then the epoch after."""
    original = TarShards(shards, text, shuffle_shards=True, shuffle_buffer=10, seed=1)
    first = await read_all(original)
    original.set_epoch(1)
    second = await read_all(original)
    for count in (1, 50, 119):
        dataset = TarShards(shards, text, shuffle_shards=True, shuffle_buffer=10, seed=1)
        assert await read_all(dataset, count) == first[:count]
        state = dataset.state_dict()
        resumed = TarShards(shards, text, shuffle_shards=True, shuffle_buffer=10, seed=1)
        resumed.load_state_dict(state)
        assert await read_all(resumed) == first[count:]
        resumed.set_epoch(1)
        assert await read_all(resumed) == second


async def test_streams_that_break_go_on_where_they_broke(shard_server: FaultServer) -> None:
    """Over HTTP, with each fault three times, at half of what is left."""
    for fault in ("cut", "short", "reset", "503", "late", "less"):
        urls = [shard_server.url(name, fault=fault, times=3) for name in SHARDS]
        assert await read_all(TarShards(urls, text, retries=BRISK)) == IDS


async def test_streams_from_an_object_store_go_on_as_well(shard_server: FaultServer) -> None:
    """The same through obstore, in the way S3's urls are made."""
    config = {"endpoint": shard_server.url("")[:-1], "skip_signature": True, "region": "us-east-1"}
    options: dict[str, Any] = {"config": config, "client_options": {"allow_http": True}, "retries": BRISK}
    for fault in ("cut", "503"):
        urls = [shard_server.url(f"bucket/{name}", fault=fault, times=2).partition("/bucket/")[2] for name in SHARDS]
        assert await read_all(TarShards([f"s3://bucket/{url}" for url in urls], text, **options)) == IDS


async def test_shards_come_from_s3(shards_in_s3: str) -> None:
    """From moto's server."""
    config = {**KEYS, "endpoint": shards_in_s3}
    urls = [f"s3://pictures/shards/{name}" for name in SHARDS]
    assert await read_all(TarShards(urls, text, config=config, client_options={"allow_http": True})) == IDS


async def test_a_shard_that_changes_while_it_is_read_is_found_out(shard_server: FaultServer) -> None:
    """What is left of another version is not put behind the beginning of this one."""
    url = shard_server.url("00.tar", fault="cut", times=3, etag="changes")
    with pytest.raises(FetchError, match="412 Precondition Failed"):
        await read_all(TarShards([url], text, retries=BRISK))
    weak = shard_server.url("00.tar", fault="cut", times=3, etag="changes", weak=1)
    with pytest.raises(FetchError, match="was changed while it was read"):
        await read_all(TarShards([weak], text, retries=BRISK))


async def test_a_stream_goes_on_with_the_bytes_that_it_lacks(shard_server: FaultServer) -> None:
    """Others, or such of which the server does not say what they are, are not put in their place."""
    for fault in ("elsewhere", "unsaid", "whole"):
        source = HTTPSource()
        with pytest.raises(FetchError, match=r"were asked for|where 206 was expected"):
            await anext(source.stream(shard_server.url("00.tar", fault=fault), 1000))
        await source.aclose()


async def test_a_url_is_a_url_and_a_path_a_path(tmp_path: Path) -> None:
    """In a path of a file no character has a meaning of its own; in a url of one they are quoted."""
    for name in ("run#1", "a?b", "50%"):
        shard = tmp_path / name / "s.tar.gz"
        shard.parent.mkdir()
        shard.write_bytes(gzip.compress(tar_bytes([("1.txt", b"one")])))
        for url in (str(shard), shard.as_uri()):
            assert [sample["txt"] for sample in await read_all(TarShards([url]))] == [b"one"]


async def test_object_names_may_have_any_character(shard_server: FaultServer) -> None:
    """A number sign in the prefix of a bucket is part of it."""
    config = {"endpoint": shard_server.url("")[:-1], "skip_signature": True, "region": "us-east-1"}
    options: dict[str, Any] = {"config": config, "client_options": {"allow_http": True}, "retries": BRISK}
    assert await read_all(TarShards(["s3://bucket/run#1/07.tar.gz"], **options)) == [
        {"__key__": "1", "__url__": "s3://bucket/run#1/07.tar.gz", "txt": b"one"}
    ]


async def test_decompressing_takes_no_more_than_a_piece(tmp_path: Path) -> None:
    """63 kB that are 64 MiB come piece by piece."""

    async def source() -> AsyncGenerator[bytes, None]:
        yield gzip.compress(bytes(64 << 20)) + bytes(1000)
        yield bytes(100) + gzip.compress(b"end")

    sizes = [len(piece) async for piece in gunzip(source(), "u")]
    assert sum(sizes) == (64 << 20) + 3
    assert max(sizes) <= CHUNK_BYTES


async def test_damaged_and_missing_shards_are_named(tmp_path: Path, shards: list[Path]) -> None:
    """After the samples that came before: never a silently short epoch."""
    whole = shards[0].read_bytes()
    cases = {
        "cut.tar": (whole[:100_000], "ends in the middle of 00-"),
        "bad.tar": (whole[:512] + b"\x01" * 512 + whole[1024:], "bad checksum|invalid header"),
        "cut.tar.gz": (gzip.compress(whole)[:-100], "ends in the middle"),
        "bad.tar.gz": (b"no gzip", "incorrect header check"),
    }
    for name, (data, said) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FetchError, match=rf"{name}: damaged: .*({said})"):
            await read_all(TarShards([tmp_path / name]))
    with pytest.raises(FileNotFoundError, match="gone"):
        await read_all(TarShards([shards[0], tmp_path / "gone.tar"], text))


async def test_impossible_arguments_are_refused() -> None:
    """At construction."""
    with pytest.raises(ValueError, match="no shards"):
        TarShards([])
    for wrong in ({"rank": 0}, {"rank": 2, "world_size": 2}):
        with pytest.raises(ValueError, match="give both"):
            TarShards(["a.tar"], **wrong)
