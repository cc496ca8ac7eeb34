"""TarShards: samples by number; indices kept, made anew, shared; changed, damaged and hostile shards."""

from __future__ import annotations

import asyncio
import gzip
import os
import pickle
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from webdataset import tariterators

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, TarShards, tar_shards
from asyncloader.datasets.kept_blocks import KeptBlocks
from asyncloader.samplers import BlockShuffleSampler, ElasticSampler
from tests.datasets.tars import IDS, SHARDS, tar_bytes, text
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS, put
from tests.support import inside

pytestmark = pytest.mark.on_threads


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


LONG = "folder/" + "long" * 30
LAYOUTS: dict[str, bytes] = {
    "folders, strays, long names, empty files": tar_bytes(
        [
            ("a/1.JPG", b"one"),
            ("a/1.seg.png", b""),
            ("README", b"no sample"),
            ("b/1.jpg", b"other"),
            (f"{LONG}.jpg", b"x" * 512),
            ("stray", b"y" * 70_000),
            (f"{LONG}.txt", b"z"),
            ("ümläut.txt", b"y" * 513),
        ]
    ),
    "GNU's long names": tar_bytes([(f"{LONG}.jpg", b"x"), ("2.txt", b"y")], tarfile.GNU_FORMAT),
    "metadata": tar_bytes([("__index__/i.json", b"{}"), ("0.txt", b"a"), ("__meta__.json", b"{}")]),
    "no mark of the end": tar_bytes([("0.txt", b"a"), ("1.txt", b"b" * 512)]).rstrip(b"\0"),
    "macOS": tar_bytes([("./._0.txt", b"x"), ("./0.txt", b"a")]),
    "dots in folders": tar_bytes([("a.b/0.txt", b"a"), ("a.b/0.cls", b"1")]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_of_webdataset(tmp_path: Path, layout: str) -> None:
    """The same samples of the same files, in the same order, whether read one by one or in blocks."""
    path = tmp_path / "shard.tar"
    path.write_bytes(LAYOUTS[layout] + bytes(-len(LAYOUTS[layout]) % 512))
    with open(path, "rb") as stream:
        files = tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        theirs = list(tariterators.group_by_keys(files))
    wanted = [{name: value for name, value in each.items() if name == "__key__" or name[0] != "_"} for each in theirs]
    for options in ({}, {"cache_bytes": 1 << 20, "block_bytes": 512}):
        dataset = TarShards(path, **options)  # type: ignore[arg-type]
        found = [{name: value for name, value in each.items() if name != "__url__"} for each in dataset]
        assert found == wanted
        assert {each["__url__"] for each in dataset} == {str(path)}
        assert asyncio.run(dataset.getitems(range(len(dataset)))) == list(dataset)


def test_a_dataset_like_any_other(shards: list[Path]) -> None:
    """By numbers of Python's and numpy's, from the end, in Subset and torch's loader; wrong numbers are errors."""
    dataset = TarShards(shards, text)
    assert (len(dataset), dataset[0], dataset[-1], dataset[np.int32(4)]) == (120, IDS[0], IDS[-1], IDS[4])  # type: ignore[index]
    assert list(dataset) == IDS
    with pytest.raises(IndexError, match="no sample 120: there are 120"):
        dataset[120]
    for index in (1.9, "3", np.float32(2.7)):
        with pytest.raises(TypeError):
            dataset[index]  # type: ignore[index]
    part = torch.utils.data.Subset(dataset, range(50))
    for kind in (torch.utils.data.DataLoader, DataLoader):
        assert [name for batch in kind(part, batch_size=7, num_workers=1) for name in batch] == IDS[:50]


def test_paths_are_one_text_or_many_and_braces_are_expanded(shards: list[Path], tmp_path: Path) -> None:
    """A text is no list of characters; numbers keep their width."""
    assert TarShards(str(tmp_path / "{00..05}.tar")).paths == list(map(str, shards))
    assert TarShards([str(tmp_path / "{00,03}.tar"), tmp_path / "05.tar"]).paths == [
        str(tmp_path / f"{number}.tar") for number in ("00", "03", "05")
    ]
    assert tar_shards.expanded("a{8..11}{x}.tar") == ["a8{x}.tar", "a9{x}.tar", "a10{x}.tar", "a11{x}.tar"]


@pytest.mark.parametrize(("num_workers", "cache_bytes"), [(0, 0), (2, 0), (2, 1 << 24)])
def test_any_order_on_any_number_of_ranks(shards: list[Path], num_workers: int, cache_bytes: int) -> None:
    """Each sample once; an epoch that 4 ranks began with 1 worker goes on on 3 with more; all have equal steps."""
    dataset = TarShards(shards, text, cache_bytes=cache_bytes, block_bytes=1 << 18)
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


def test_blocks_are_kept_within_their_bytes() -> None:
    """What was used last stays; what does not fit at all is not kept; a copy begins empty."""
    kept = KeptBlocks(100, len)
    for number in (50, 40, 50, 60, 200):
        if kept.get(number) is None:
            kept.keep(number, bytes(number))
    assert [number for number in (40, 50, 60, 200) if kept.get(number) is not None] == [60]
    kept.keep(40, bytes(40))
    assert kept.get(60) is not None
    kept.keep(30, bytes(30))
    assert [number for number in (30, 40, 60) if kept.get(number) is not None] == [30, 60]
    assert pickle.loads(pickle.dumps(kept)).get(60) is None


def test_indices_are_kept_and_made_anew(
    shards: list[Path],
    cache_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For each shard by itself, in the user's cache or a folder, and not among the user's data."""
    made: list[str] = []
    find_samples = tar_shards.find_samples

    def watched(source: Any, url: str, version: Any) -> Any:
        made.append(os.path.basename(url))
        return find_samples(source, url, version)

    monkeypatch.setattr(tar_shards, "find_samples", watched)
    assert len(TarShards(shards[:3])) == 60
    assert made == ["00.tar", "01.tar", "02.tar"]
    assert len(TarShards(shards[:4])) == 80
    assert made == ["00.tar", "01.tar", "02.tar", "03.tar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*SHARDS, "cache"]

    made.clear()
    shards[1].write_bytes(tar_bytes([("1.txt", b"one")]))
    os.utime(shards[2], ns=(1, 1))
    assert len(TarShards(shards[:4])) == 61
    assert made == ["01.tar", "02.tar"]

    made.clear()
    for _ in range(2):
        assert len(TarShards(shards[4:], index=tmp_path / "indices")) == 40
    assert made == ["04.tar", "05.tar"]
    assert len(list((tmp_path / "indices").glob("*.index"))) == 2

    made.clear()
    for _ in range(2):
        TarShards(shards[:1], index="/proc/none")
    assert made == ["00.tar"] * 2
    assert "cannot be kept" in caplog.text
    assert not list(tmp_path.rglob("*.part"))


WRONG_SPANS: dict[str, list[tuple[int, int]]] = {
    "behind the end": [(0, 512), (512, 1 << 40)],
    "before the beginning": [(-512, 512)],
    "backwards": [(1024, 512)],
    "empty": [(512, 512)],
    "out of order": [(1024, 2048), (0, 512)],
    "overlapping": [(0, 2048), (1024, 4096)],
}


@pytest.mark.parametrize("wrong", WRONG_SPANS.values(), ids=WRONG_SPANS)
def test_an_index_that_cannot_be_of_its_shard_is_made_anew(
    shards: list[Path], tmp_path: Path, wrong: list[tuple[int, int]]
) -> None:
    """An index is believed no more than its shard is."""
    folder = tmp_path / "indices"
    wanted = inside.spans(TarShards(shards[0], index=folder)).tolist()
    (place,) = folder.glob("*.index")
    for content in (np.array(wrong, "<i8").tobytes(), bytes(7), b"no index", b""):
        place.write_bytes(content)
        assert inside.spans(TarShards(shards[0], index=folder)).tolist() == wanted


def test_a_shard_that_changed_is_an_error(shards: list[Path]) -> None:
    """When a sample of it is asked for; and an index that lies is found out by what it points to."""
    dataset = TarShards(shards, text)
    os.utime(shards[0], ns=(1, 1))
    with pytest.raises(FetchError, match=r"00.tar: was changed since this dataset was made"):
        dataset[0]
    assert dataset[20] == IDS[20]
    inside.spans(dataset)[21] = [0, 512]
    with pytest.raises(FetchError, match=r"01.tar: no sample where its index has one"):
        dataset[21]
    inside.spans(dataset)[22] = inside.spans(dataset)[22][0], inside.spans(dataset)[23][1]
    with pytest.raises(FetchError, match=r"01.tar: the samples 01-003 and 01-002 where its index has one"):
        dataset[22]


def header(kind: bytes, size: int) -> bytes:
    """Return a header that says so."""
    info = tarfile.TarInfo("1.txt")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


WHOLE = tar_bytes([("1.txt", b"x" * 3000), ("1.cls", b"1")])
PLAIN = tar_bytes([("1.txt", b"x" * 3000), ("1.cls", b"1")], tarfile.GNU_FORMAT)
DAMAGED = {
    "cut off in a file": (WHOLE[:2500], "damaged"),
    "cut off in a header": (WHOLE[: WHOLE.index(b"1.cls") + 100], "damaged"),
    "a damaged header": (PLAIN.replace(b"1.cls", b"2.cls"), "damaged: no header at byte"),
    "a damaged header behind another": (WHOLE.replace(b"1.cls", b"2.cls"), "damaged"),
    "two files of one extension": (tar_bytes([("1.txt", b"a"), ("1.TXT", b"b")]), "a second .txt of the sample 1"),
    "a name of ours": (tar_bytes([("1.__key__", b"a")]), "a second .__key__"),
    "no tar": (b"no tar" * 1000, "damaged"),
    "empty": (b"", "damaged"),
    "a header of a petabyte": (header(tarfile.GNUTYPE_LONGNAME, 1 << 50), "damaged"),
    "headers about headers": (header(tarfile.GNUTYPE_LONGNAME, 0) * 5000, "damaged"),
    "a file of a petabyte": (header(tarfile.REGTYPE, 1 << 50), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_shards_are_errors_at_construction(tmp_path: Path, cache_folder: Path, kind: str) -> None:
    """With the name of the shard, in little memory, and no index of it is kept."""
    data, words = DAMAGED[kind]
    (tmp_path / "shard.tar").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FetchError, match=rf"shard.tar: {words}"):
            TarShards(tmp_path / "shard.tar")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert not list(cache_folder.glob("*.index"))


def test_links_and_sparse_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their content lies elsewhere: left out, the samples would vanish without a word."""
    monkeypatch.chdir(tmp_path)
    Path("0.txt").write_text("zero")
    os.link("0.txt", "1.txt")
    os.symlink("0.txt", "2.txt")
    with open("3.txt", "wb") as file:
        file.truncate(1 << 20)
    for names, words in (
        (["0.txt", "1.txt"], "1.txt is a link to 0.txt"),
        (["0.txt", "2.txt"], "2.txt is a link to 0.txt"),
        (["3.txt"], "3.txt is a sparse file"),
    ):
        subprocess.run(["tar", "--sparse", "-cf", "s.tar", *names], check=True)
        with pytest.raises(FetchError, match=rf"s.tar: {words}, which is not read here.*--dereference"):
            TarShards("s.tar")
    subprocess.run(
        ["tar", "--dereference", "--hard-dereference", "-cf", "s.tar", "0.txt", "1.txt", "2.txt"], check=True
    )
    assert [sample["txt"] for sample in TarShards("s.tar")] == [b"zero"] * 3


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    """At construction, with what to do."""
    path = tmp_path / "shard.tar"
    path.write_bytes(tar_bytes([]))
    with pytest.raises(ConfigurationError, match=r"there is no sample in 1 shards, the first of which is .*shard.tar"):
        TarShards(path)
    path.with_suffix(".tar.gz").write_bytes(gzip.compress(WHOLE))
    with pytest.raises(FetchError, match=r"shard.tar.gz: damaged, or no tar file, or a compressed one"):
        TarShards(path.with_suffix(".tar.gz"))
    for options in ({"cache_bytes": -1}, {"block_bytes": 1.5}, {"max_bytes": True}):
        with pytest.raises(ConfigurationError, match="should be an integer of at least"):
            TarShards(path, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="was given no path"):
        TarShards([])
    with pytest.raises(FileNotFoundError):
        TarShards(tmp_path / "none.tar")
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(OSError, match="is no regular file"):
        TarShards(tmp_path / "pipe.tar")
    path.write_bytes(WHOLE)
    with pytest.raises(FetchError, match=r"the sample from byte [\d,]+ on: larger than 100 bytes"):
        TarShards(path, max_bytes=100)


@pytest.mark.processes
def test_over_http_blocks_are_read_once(server: FaultServer) -> None:
    """In the order of the blocks, a request for each; after a pickle as well."""
    urls = [server.url(f"shards/{name}") for name in SHARDS]
    dataset = TarShards(urls, text, cache_bytes=1 << 22, block_bytes=1 << 19)
    assert len(dataset) == 120
    before = server.seen()["requests"]
    loader = DataLoader(
        pickle.loads(pickle.dumps(dataset)),
        batch_size=5,
        num_workers=1,
        concurrency=5,
        prefetch_factor=1,
        multiprocessing_context="forkserver",
    )
    assert [name for batch in loader for name in batch] == IDS
    assert server.seen()["requests"] - before == len(dataset.block_sizes)
    shuffled = DataLoader(
        dataset,
        batch_size=5,
        sampler=BlockShuffleSampler(dataset.block_sizes),
        num_workers=1,
        multiprocessing_context="forkserver",
    )
    assert sorted(name for batch in shuffled for name in batch) == IDS


@pytest.mark.usefixtures("threads_of_obstore")
def test_shards_in_an_object_store(s3: str) -> None:
    """An index of what lies in S3, made by a process of its own and kept in the user's cache."""
    for name, data in SHARDS.items():
        put(f"{s3}/pictures/indexed/{name}", data)
    options: dict[str, Any] = {"config": {"endpoint": s3, **KEYS}, "client_options": {"allow_http": True}}
    dataset = TarShards("s3://pictures/indexed/{00..05}.tar", text, **options)
    assert asyncio.run(dataset.getitems(range(len(dataset)))) == IDS


@pytest.mark.usefixtures("threads_of_obstore")
def test_shards_in_a_store_of_ones_own(tmp_path: Path, shards: list[Path]) -> None:
    """A ready store of obstore's, in which the paths are names."""
    from obstore.store import LocalStore

    dataset = TarShards("{00..05}.tar", text, store=LocalStore(str(tmp_path)))
    assert (len(dataset), dataset[30]) == (120, IDS[30])
