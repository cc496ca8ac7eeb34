"""Rows of Parquet files by number: row groups are read whole, and kept for the rows beside.

numbers ──> row groups ──> read once, a bounded number of bytes of them kept ──> rows as dicts ──> decode
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import at_least
from asyncloader.datasets.apart import run_apart, versions_of
from asyncloader.datasets.block_cache import BlockCache
from asyncloader.datasets.extras import require
from asyncloader.datasets.filesystems import open_system, secrets_kept, version_in
from asyncloader.datasets.limits import open_regular
from asyncloader.datasets.numbers import counted
from asyncloader.datasets.opened import BatchDataset, Opened, all_decoded
from asyncloader.datasets.retry import Retries
from asyncloader.datasets.source import Version, kind_of, path_of, raise_changed
from asyncloader.datasets.sources import Access, Sources
from asyncloader.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

T_co = TypeVar("T_co", covariant=True)

_SERVED = frozenset({"file", "http", "https", "s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})


class Footer(NamedTuple):
    """The footer of a file: rows of each row group, columns, and the dtypes of the columns of lists of numbers."""

    rows: list[int]
    columns: list[str]
    dtypes: dict[str, np.dtype[Any]]


class ParquetDataset(BatchDataset[Opened["_Ranges"], T_co]):
    """Serve the rows of Parquet files.

    A row group is what can be read of a file: for one row of it the columns are read of all its rows. A batch reads
    each row group that it needs once, and each worker keeps those that were used last. In a random order over files
    that are larger than that, all would be read for each batch: shuffle with a
    :class:`~asyncloader.samplers.BlockShuffleSampler`, which visits row groups in blocks.

    A sample is a dict by column: numbers, texts, bytes; lists of numbers are arrays, of one dtype in all files; what
    else there is comes as Python values. Null is None; within a list of floats it is NaN, and a list of integers that
    has one is a Python list, so that its numbers stay exact.

    Args:
        paths: The file or files: paths and urls (``http``, ``https``, ``s3``, ``gs``, ``az``; others through fsspec).
        columns: Which to read, in this order; None reads all, of which all files have the same, in that of the first.
        decode: Makes a sample of a row. Runs on a thread.
        cache_bytes: How many bytes of row groups each worker keeps, as they are in memory.
        threads: Row groups that are read, and batches that are made of them, at once in each worker.
        storage_options: Settings of the file system, for urls that fsspec opens.
        headers, config, client_options, credential_provider, retries: As :class:`~asyncloader.datasets.TarShards` takes
            them, for the other urls.

    Attributes:
        block_sizes: How many rows there are in each row group: for a BlockShuffleSampler. An array of int64.

    Raises:
        ConfigurationError: The files have no rows, a file is no Parquet file or was truncated, or lacks columns to be
            read; a url leads through one of fsspec's caches.
        FileNotFoundError: A file is not there.
        ImportError: pyarrow, or the client for a url, is not installed (``asyncloader[parquet]``, ``[http]``,
            ``[objects]``, ``[fsspec]``).

    A row raises :class:`FetchError` if its file was changed since the dataset was made; through fsspec, as far as its
    file system tells (by size, tag or time).

    Example:
        ::

            rows = ParquetDataset(["part-0.parquet", "part-1.parquet"], columns=["text", "label"])
            sampler = BlockShuffleSampler(rows.block_sizes, num_workers=4, batch_size=32)
            loader = DataLoader(rows, batch_size=32, sampler=sampler, num_workers=4)
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        decode: Callable[[dict[str, Any]], T_co] | None = None,
        *,
        cache_bytes: int = 1 << 28,
        threads: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        credential_provider: Any = None,
        retries: Retries | None = None,
    ) -> None:
        super().__init__()
        require("pyarrow.parquet", "parquet", "ParquetDataset")
        listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        self.paths = [os.fspath(path) for path in listed]
        self.columns = None if columns is None else list(columns)
        self.decode = decode
        self.cache_bytes = cache_bytes
        self.threads = threads
        self.storage_options = dict(storage_options or {})
        _check(self)
        served = [path for path in self.paths if _kind_of(path) != "fsspec"]
        if len(served) < len(self.paths):
            require("fsspec", "fsspec", "ParquetDataset")
        self.access = Access.to(served, "ParquetDataset", retries, headers, config, client_options, credential_provider)
        self._versions = {path: self._version(path) for path in self.paths if path not in served}
        self._versions |= zip(served, versions_of(served, self.access), strict=True)
        footers = self._footers()
        self._names = self._named_columns(footers)
        self._dtypes = {  # lists of numbers come in one dtype, whichever file they are of
            name: np.result_type(*(footer.dtypes[name] for footer in footers if name in footer.dtypes))
            for name in {name for footer in footers for name in footer.dtypes}
        }
        sizes = [len(footer.rows) for footer in footers]
        self._files = np.repeat(np.arange(len(sizes)), sizes)  # of each row group
        self._groups = np.concatenate([np.arange(size) for size in sizes])  # its number in that file
        self._firsts = np.cumsum([0, *(rows for footer in footers for rows in footer.rows)])
        if not len(self):
            raise ConfigurationError(f"there is no row in {len(sizes)} files, the first of which is {self.paths[0]}")

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """How many rows there are in each row group."""
        return np.diff(self._firsts)

    async def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Read the rows of a batch."""
        numbers = counted(indices, len(self), "row")
        of_rows = np.searchsorted(self._firsts, numbers, side="right") - 1
        client = self._client
        tables = await client.cache.get_all(np.unique(of_rows).tolist(), partial(self._read, client))
        return await client.threads.run(self._rows, tables, of_rows, numbers - self._firsts[of_rows])

    def _rows(self, tables: dict[int, pa.Table], groups: NDArray[Any], places: NDArray[np.int64]) -> list[T_co]:
        """Take rows out of tables, on a thread."""
        found: list[Any] = [None] * len(places)
        for group, table in tables.items():
            mine = np.flatnonzero(groups == group)
            taken = _columns(table.take(places[mine]))
            columns = {name: _values(column, self._dtypes.get(name)) for name, column in taken}
            for at, values in zip(mine.tolist(), zip(*columns.values(), strict=True), strict=True):
                found[at] = dict(zip(columns, values, strict=True))
        return found if self.decode is None else all_decoded(self.decode, found)

    async def _read(self, client: Opened[_Ranges], group: int) -> pa.Table:
        path, number = self.paths[self._files[group]], int(self._groups[group])
        opens = partial(self._opened_file, path, client.source)
        table = await client.threads.run(read_group, opens, number, self.columns)
        return table.select(self._names)  # in one order, whatever that in the file is

    # --------------------------------------------------------------------------------------------------------- files

    @contextlib.contextmanager
    def _opened_file(self, path: str, ranges: _Ranges | None) -> Iterator[Any]:
        """Open a file for pyarrow, on a thread.

        Raises:
            FetchError: The file has changed since the dataset was made. Versions are compared after the file was read,
                whatever came of that: bytes that were read while a file was replaced may be parts of both.
        """
        if ranges is not None and _kind_of(path) == "away":
            yield _RangeFile(ranges, path, self._versions[path])
            return
        try:
            if _kind_of(path) == "file":
                with open_regular(path_of(path)) as file:
                    yield file
            else:
                # Each thread has a file system of its own, which an archive's files need as long as they are read.
                system, place = open_system(path, self.storage_options)
                with secrets_kept(), system.open(place, "rb") as file:
                    yield file
        finally:
            if self._version(path) != self._versions[path]:
                raise_changed(path)

    def _version(self, path: str) -> Version:
        if _kind_of(path) == "file":
            return Version.of_file(path_of(path))
        return version_in(*open_system(path, self.storage_options))

    def _footers(self) -> list[Footer]:
        """Read what all files say of themselves."""
        away = [path for path in self.paths if _kind_of(path) == "away"]
        versions = [self._versions[path] for path in away]
        found = dict(zip(away, run_apart(_read_footer_away, away, self.access, versions), strict=True))
        return [
            found[path] if path in found else _read_footer(path, partial(self._opened_file, path, None))
            for path in self.paths
        ]

    def _named_columns(self, footers: Sequence[Footer]) -> list[str]:
        """Return the columns of a row, which all files are to have."""
        first = footers[0].columns
        wanted = first if self.columns is None else self.columns
        for path, footer in zip(self.paths, footers, strict=True):
            if len(set(footer.columns)) < len(footer.columns):
                raise ConfigurationError(f"{path}: has several columns of one name: {', '.join(footer.columns)}")
            if self.columns is None and (more := [name for name in footer.columns if name not in first]):
                raise ConfigurationError(
                    f"{path}: has columns that {self.paths[0]} has not: {', '.join(more)}; name those to be read "
                    "(columns=...)"
                )
            there = {*footer.columns, *(name.split(".")[0] for name in footer.columns)}
            if missing := [name for name in wanted if name.split(".")[0] not in there]:
                raise ConfigurationError(
                    f"{path}: has no column {', '.join(missing)}; it has {', '.join(footer.columns)}"
                )
        return list(dict.fromkeys(name if name in first else name.split(".")[0] for name in wanted))

    def _connect(self) -> Opened[_Ranges]:
        cache = BlockCache[Any](self.cache_bytes, lambda table: table.nbytes)
        return Opened(_Ranges(Sources(self.access)), self.threads, cache)


class _Ranges:
    """Gives threads the bytes that are asked for on the loop that makes it, until that closes it.

    No thread waits for an answer that the loop does not give any more: what was asked for before is cancelled, what is
    asked for afterwards is refused, and the lock leaves nothing in between.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._asked: set[Future[bytes]] = set()
        self._is_closed = False

    def read(self, url: str, start: int, stop: int, version: Version) -> bytes:
        """Wait for some bytes, on a thread.

        Raises:
            ValueError: The dataset is closed.
            CancelledError: The dataset was closed while the bytes were on their way.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{url}: the dataset is closed")
            asked = asyncio.run_coroutine_threadsafe(self._sources.read_range(url, start, stop, version), self._loop)
            self._asked.add(asked)
        try:
            return asked.result()
        finally:
            with self._lock:
                self._asked.discard(asked)

    async def aclose(self) -> None:
        """Refuse what is asked for from now on, cancel what was, and close the sources."""
        with self._lock:
            self._is_closed = True
            asked = list(self._asked)
        for one in asked:
            one.cancel()
        await self._sources.aclose()


class _RangeFile(io.RawIOBase):
    """A file of which some bytes are asked for at a time, on a thread."""

    def __init__(self, ranges: _Ranges, url: str, version: Version) -> None:
        super().__init__()
        self._read_range = partial(ranges.read, url)
        self._version = version
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        stop = min(self._at + len(buffer), self._version.size)
        data = self._read_range(self._at, stop, self._version)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._version.size}[whence]
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


async def _read_footer_away(sources: Sources, path: str, version: Version) -> Footer:
    file = _RangeFile(_Ranges(sources), path, version)
    return await asyncio.to_thread(_read_footer, path, lambda: contextlib.nullcontext(file))


def _read_footer(path: str, opens: Callable[[], contextlib.AbstractContextManager[Any]]) -> Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opens() as file:
            told = pq.ParquetFile(file)
            groups = (told.metadata.row_group(at) for at in range(told.metadata.num_row_groups))
            return Footer(
                [group.num_rows for group in groups],
                list(told.schema_arrow.names),
                {
                    field.name: np.dtype(field.type.value_type.to_pandas_dtype())
                    for field in told.schema_arrow
                    if _holds_numbers(field.type)
                },
            )
    except pa.ArrowInvalid as error:
        raise ConfigurationError(f"{path}: no Parquet file, or truncated: {error}") from error


def read_group(
    opens: Callable[[], contextlib.AbstractContextManager[Any]], number: int, columns: Sequence[str] | None
) -> pa.Table:
    """Read columns of a row group of a file. On a thread of the dataset."""
    import pyarrow.parquet as pq

    with opens() as file:
        return pq.ParquetFile(file, pre_buffer=True).read_row_group(number, columns=columns, use_threads=False)


def _columns(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    return zip(table.column_names, table.columns, strict=True)


def _holds_numbers(kind: pa.DataType) -> bool:
    """Whether a column is one of lists of numbers."""
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)))


def _values(column: pa.ChunkedArray, dtype: np.dtype[Any] | None) -> list[Any]:
    """Return the values of a column: those of lists of numbers as arrays, where those can hold them exactly."""
    import pyarrow as pa

    if not _holds_numbers(column.type):
        return cast(list[Any], column.to_pylist())
    holds_null = pa.types.is_floating(column.type.value_type)  # as NaN; of integers with one pyarrow would make floats
    return [
        np.array(row.values.to_numpy(zero_copy_only=False), dtype)
        if row.is_valid and (holds_null or not row.values.null_count)
        else row.as_py()
        for row in column
    ]


def _kind_of(path: str) -> str:
    """Tell how a file is read: "file" from the disk, "away" by ranges, otherwise by "fsspec"."""
    if "://" in path and path.partition("://")[0] not in _SERVED:
        return "fsspec"
    return "file" if kind_of(path) == "file" else "away"


def _check(dataset: ParquetDataset[Any]) -> None:
    if not dataset.paths:
        raise ConfigurationError("there are no files")
    if dataset.columns is not None and not dataset.columns:
        raise ConfigurationError("columns names no column; None reads all of them")
    for name, least in (("cache_bytes", 0), ("threads", 1)):
        at_least(name, getattr(dataset, name), least=least)
