"""ParquetDataset: rows as pyarrow reads them, each row group read once a batch; bad files named; wherever they lie."""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, ParquetDataset
from asyncloader.samplers import BlockShuffleSampler
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS, put

pytestmark = pytest.mark.on_threads

ROWS = 100  # of each file, in row groups of 30


def table(first: int, rows: int = ROWS) -> pa.Table:
    numbers = list(range(first, first + rows))
    return pa.table(
        {
            "id": numbers,
            "text": [f"row {number}" if number % 7 else None for number in numbers],
            "embedding": pa.array([[number, 0.5] for number in numbers], pa.list_(pa.float32(), 2)),
            "tokens": [list(range(number % 4)) for number in numbers],
            "about": [{"score": number / 2} for number in numbers],
        }
    )


def written(content: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(content, file, row_group_size=30, **options)
    return file.getvalue()


FILES = {f"{number}.parquet": written(table(number * ROWS)) for number in range(2)}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in FILES]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(FILES) as server:
        yield server


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers, in their files, of the row groups that were read."""
    seen: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group

    def watched(self: Any, number: int, **options: Any) -> Any:
        seen.append(number)
        return read_row_group(self, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", watched)
    return seen


async def rows_of(dataset: ParquetDataset[Any], indices: Any) -> list[Any]:
    """Read rows by both faces of the dataset."""
    rows = dataset.__getitems__(indices)
    assert repr(await dataset.getitems(indices)) == repr(rows)
    return rows


async def test_rows_are_those_of_pyarrow(paths: list[Path], reads: list[int]) -> None:
    """In any order, with all their types; a batch reads each row group that it needs once."""
    dataset = ParquetDataset(paths)
    assert (len(dataset), dataset.block_sizes.tolist()) == (200, [30, 30, 30, 10] * 2)
    expected = pa.concat_tables([table(0), table(ROWS)]).to_pylist()
    order = [150, 3, -1, 29, 30, 3, 151]
    for row, index in zip(dataset.__getitems__(order), order, strict=True):
        assert isinstance(row["embedding"], np.ndarray)
        assert row["embedding"].dtype == np.float32
        assert {**row, "embedding": row["embedding"].tolist(), "tokens": row["tokens"].tolist()} == expected[index]
    assert sorted(reads) == [0, 1, 1, 3]
    assert repr(await dataset.getitems(order)) == repr(dataset.__getitems__(order))
    assert [row["id"] for row in dataset] == list(range(200))
    assert dataset[7]["text"] is None
    with pytest.raises(IndexError, match="no sample 200: there are 200"):
        dataset[200]


async def test_a_row_has_a_whole_number(paths: list[Path]) -> None:
    """Whatever stands for one, numpy's and torch's too; what is none is not rounded, and no text is read as one."""
    dataset = ParquetDataset(paths, ["id"])
    for index in (3, np.int32(3), np.uint8(3), np.array(3), torch.tensor(3)):
        assert dataset[index] == {"id": 3}  # type: ignore[index]
    for indices in (np.array([3, -1]), torch.tensor([3, -1]), range(3, 200, 196)):
        assert [row["id"] for row in await rows_of(dataset, indices)] == [3, 199]
    assert await rows_of(dataset, []) == []
    for wrong in (1.9, "3", 3.0, np.float64(3.0), None):
        with pytest.raises(TypeError, match="integer"):
            dataset[wrong]  # type: ignore[index]


async def test_whole_numbers_in_lists_stay_exact(tmp_path: Path) -> None:
    """Beside a null they are Python's, as an array could hold them only as floats; floats have NaN for it."""
    large = 2**53 + 1
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)):
        floats = pa.array([[0.5, None], [1.0, 2.0], None], pa.list_(pa.float64()))
        content = {"whole": pa.array([[large, None], [large, 1], None], kind), "float": floats}
        pq.write_table(pa.table(content), tmp_path / "lists.parquet")
        first, second, third = await rows_of(ParquetDataset(tmp_path / "lists.parquet"), [0, 1, 2])
        assert first["whole"] == [large, None]
        assert (second["whole"].dtype, second["whole"].tolist()) == (np.int64, [large, 1])
        assert np.array_equal(first["float"], [0.5, np.nan], equal_nan=True)
        assert third == {"whole": None, "float": None}


async def test_columns_and_decode(paths: list[Path]) -> None:
    """Only the columns that are asked for, in that order, nested ones too; decode makes the sample."""
    (row,) = await rows_of(ParquetDataset(paths[0], ["text", "id"]), [1])
    assert list(row.items()) == [("text", "row 1"), ("id", 1)]
    (score,) = await rows_of(ParquetDataset(paths[0], ["about.score"], lambda row: row["about"]["score"]), [3])
    assert score == 1.5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_have_each_row_once_also_after_a_resume(paths: list[Path], num_workers: int) -> None:
    """Collated as ever, each row once; shuffled by blocks; resumed in the middle."""
    dataset = ParquetDataset(paths, ["id", "embedding"])

    def loader() -> Any:
        sampler = BlockShuffleSampler(dataset.block_sizes)
        return DataLoader(dataset, batch_size=20, sampler=sampler, num_workers=num_workers)

    batches = list(loader())
    assert all(torch.equal(batch["id"].float(), batch["embedding"][:, 0]) for batch in batches)
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(200))
    with iter(loader()) as first:
        for _ in range(4):
            next(first)
        state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch["id"].tolist() for batch in resumed] == [batch["id"].tolist() for batch in batches[4:]]


def test_a_block_shuffle_reads_each_row_group_once(paths: list[Path], reads: list[int]) -> None:
    """With room for a window; without any, again for later batches."""
    for cache_bytes, most in ((1 << 20, 8), (0, 200)):
        reads.clear()
        dataset = ParquetDataset(paths, ["id"], cache_bytes=cache_bytes)
        sampler = BlockShuffleSampler(dataset.block_sizes, window=50)
        for _ in DataLoader(dataset, batch_size=10, sampler=sampler):
            pass
        assert set(Counter(reads)) == {0, 1, 2, 3}
        assert 8 <= len(reads) <= most
    assert len(reads) > 8


async def test_it_travels_in_few_bytes(paths: list[Path]) -> None:
    """As few bytes, also when it has read."""
    dataset = ParquetDataset(paths, ["id"])
    assert dataset[3] == {"id": 3}
    data = pickle.dumps(dataset)
    assert len(data) < 3000
    assert await rows_of(pickle.loads(data), [150]) == [{"id": 150}]


@pytest.mark.processes
@pytest.mark.usefixtures("threads_of_obstore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_over_http_only_ranges_are_read(server: FaultServer, num_workers: int) -> None:
    """By ranges, of the columns that are asked for; what fails is asked for again."""
    urls = [server.url("0.parquet"), server.url("1.parquet", fault="503", times=2)]
    dataset = ParquetDataset(urls, ["id"])
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver"} if num_workers else {}
    found = [number for batch in DataLoader(dataset, 50, **workers) for number in batch["id"].tolist()]  # type: ignore[arg-type]
    assert found == list(range(200))


async def test_a_file_that_is_changed(paths: list[Path]) -> None:
    """Is an error when a row of it is read, which names it, also by a reader that has its footer already."""
    dataset = ParquetDataset(paths, ["id"], cache_bytes=0)
    assert [row["id"] for row in await rows_of(dataset, [0, 100])] == [0, 100]
    paths[0].write_bytes(written(table(1000)))
    with pytest.raises(FetchError, match=r"0.parquet: was changed since this dataset was made") as caught:
        await rows_of(dataset, [5])
    assert "It is row group 0 of" in caught.value.__notes__[0]
    assert [row["id"] for row in await rows_of(dataset, [100])] == [100]


async def test_a_footer_is_parsed_once(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file, whichever row groups are read of it; an error in a row group names it and the file."""
    given: list[Any] = []
    parquet_file = pq.ParquetFile

    def watched(file: Any, **options: Any) -> Any:
        given.append(options.get("metadata"))
        return parquet_file(file, **options)

    dataset, footer = ParquetDataset(paths, ["text"], cache_bytes=0), pq.ParquetFile(paths[0]).metadata
    monkeypatch.setattr(pq, "ParquetFile", watched)
    await rows_of(dataset, [0, 40, 70, 99])
    assert [metadata is None for metadata in given] == [True] + [False] * 7
    data = bytearray(FILES["0.parquet"])
    times = os.stat(paths[0])
    begin = footer.row_group(1).column(1).dictionary_page_offset
    data[begin : begin + 20] = bytes(20)
    paths[0].write_bytes(data)
    os.utime(paths[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(FetchError, match=r"0.parquet: row group 1 cannot be read"):
        await rows_of(dataset, [45])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("large_first", [True, False])
def test_lists_of_several_files_have_one_dtype(tmp_path: Path, num_workers: int, large_first: bool) -> None:
    """One that holds the numbers of all: torch's workers would stack them in that of the first sample, and cut them."""
    kinds = [(pa.uint8(), 7), (pa.int64(), 70_000)]
    for name, (kind, number) in zip("ab", kinds[::-1] if large_first else kinds, strict=True):
        lists = pa.array([[number, 1]], pa.list_(kind))
        fixed = pa.array([[number, 0.5]], pa.list_(pa.float32() if number > 7 else pa.float64(), 2))
        (tmp_path / f"{name}.parquet").write_bytes(written(pa.table({"lists": lists, "fixed": fixed})))
    dataset = ParquetDataset([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    (batch,) = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    assert batch["lists"].dtype == torch.int64
    assert batch["fixed"].dtype == torch.float64
    assert sorted(batch["lists"][:, 0].tolist()) == sorted(batch["fixed"][:, 0].tolist()) == [7, 70_000]


async def test_columns_of_several_files(tmp_path: Path) -> None:
    """Come in one order, and are the same in all files: others are an error, which the columns to read settle."""
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    paths[0].write_bytes(written(pa.table({"a": [1], "b": [2], "c": [{"x": 3, "y": 4}]})))
    paths[1].write_bytes(written(pa.table({"c": [{"y": 40, "x": 30}], "b": [20], "a": [10]})))
    rows = await rows_of(ParquetDataset(paths), [0, 1])
    assert [list(row) for row in rows] == [["a", "b", "c"]] * 2
    assert [list(row.values()) for row in rows] == [[1, 2, {"x": 3, "y": 4}], [10, 20, {"x": 30, "y": 40}]]
    rows = await rows_of(ParquetDataset(paths, ["c.y", "a", "c.x"]), [0, 1])
    assert [list(row) for row in rows] == [["c", "a"]] * 2
    paths[1].write_bytes(written(pa.table({"z": [0], "b": [20], "a": [10], "c": [{"x": 30, "y": 40}]})))
    with pytest.raises(ConfigurationError, match=r"b.parquet: has columns that .*a.parquet has not: z; name those"):
        ParquetDataset(paths)
    assert [row["b"] for row in await rows_of(ParquetDataset(paths, ["b"]), [0, 1])] == [2, 20]
    paths[0].write_bytes(written(pa.table([[1], [2]], ["a", "a"])))
    with pytest.raises(ConfigurationError, match=r"a.parquet: has several columns of one name: a, a"):
        ParquetDataset(paths[0])


@pytest.mark.usefixtures("threads_of_obstore")
def test_files_in_an_object_store_are_read(s3: str) -> None:
    """From S3, asked at construction by a process of its own."""
    for name, data in FILES.items():
        put(f"{s3}/pictures/parquet/{name}", data)
    options: dict[str, Any] = {"config": {"endpoint": s3, "region": "us-east-1", **KEYS}}
    urls = [f"s3://pictures/parquet/{name}" for name in FILES]
    dataset = ParquetDataset(urls, ["id"], client_options={"allow_http": True}, **options)
    loader = DataLoader(dataset, batch_size=100, num_workers=1, multiprocessing_context="forkserver")
    assert [batch["id"].tolist() for batch in loader] == [list(range(100)), list(range(100, 200))]


async def test_what_is_wrong_is_said(tmp_path: Path, paths: list[Path]) -> None:
    """With the name of the file: at construction, or when a file has changed since."""
    broken = tmp_path / "broken.parquet"
    for data in (FILES["0.parquet"][:-100], b"", b"PAR1" * 10):
        broken.write_bytes(data)
        with pytest.raises(ConfigurationError, match=r"broken.parquet: no Parquet file, or truncated"):
            ParquetDataset([paths[0], broken])
    broken.write_bytes(written(pa.table({"id": [1]})))
    for columns in (None, ["text"]):
        with pytest.raises(ConfigurationError, match=r"broken.parquet: has no column .*text.*; it has id"):
            ParquetDataset([paths[0], broken], columns)
    broken.write_bytes(written(pa.table({"id": pa.array([], pa.int64())})))
    with pytest.raises(ConfigurationError, match="there is no row in 1 files"):
        ParquetDataset(broken)
    for arguments, words in (
        ({"paths": []}, "was given no path"),
        ({"columns": []}, "columns is a list of names"),
        ({"columns": "id"}, "columns is a list of names"),
        ({"cache_bytes": None}, "cache_bytes should be"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            ParquetDataset(**{"paths": paths, **arguments})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        ParquetDataset(tmp_path / "none.parquet")
    dataset = ParquetDataset(paths)
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(FetchError, match=r"0.parquet: was changed since this dataset was made"):
        await rows_of(dataset, [5])
