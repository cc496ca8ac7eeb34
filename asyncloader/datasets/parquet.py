"""Rows of Parquet files by number: row groups are read whole, and kept for the rows beside.

numbers ──> row groups ──> read once, a bounded number of bytes of them kept ──> rows as dicts ──> decode
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.errors import FetchError, require
from asyncloader.datasets.kept_blocks import BlockDataset, KeptBlocks
from asyncloader.datasets.numbers import counted
from asyncloader.datasets.source import RangeFile, Source, Version, listed
from asyncloader.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)


class ParquetDataset(BlockDataset[T_co]):
    """Serve the rows of Parquet files.

    A row group is what can be read of a file: for one row of it the columns are read of all its rows. A batch reads
    each row group that it needs once, and each worker keeps those that were used last. In a random order over files
    that are larger than that, all would be read for each batch: shuffle with a
    :class:`~asyncloader.samplers.BlockShuffleSampler`, which visits row groups in blocks.

    A sample is a dict by column: numbers, texts, bytes; lists of numbers are arrays, of one dtype in all files; what
    else there is comes as Python values. Null is None; within a list of floats it is NaN, and a list of integers that
    has one is a Python list, so that its numbers stay exact.

    Args:
        paths: The files: paths and urls (``http``, ``https``, ``s3``, ``gs``, ``az``), one text or many.
        columns: Which to read, in this order; None reads all, of which all files have the same, in that of the first.
        decode: Makes a sample of a row, ``decode(row)``, or of it and its number, ``decode(row, number)``.
        cache_bytes: How many bytes of row groups each worker keeps, as they are in memory.
        store: A store of obstore's, in which the paths are names of objects.
        store_options: As for :class:`~asyncloader.datasets.RemoteDataset`.

    Attributes:
        block_sizes: How many rows there are in each row group: for a BlockShuffleSampler. An array of int64.

    Raises:
        ConfigurationError: The files have no rows, a file is no Parquet file or was truncated, or lacks columns to be
            read.
        FileNotFoundError: A file is not there.
        ImportError: pyarrow (``asyncloader[parquet]``), or obstore, which urls need (``asyncloader[remote]``), is not
            installed.

    To make the dataset, the footer of each file is read: those of remote files by a process of its own. A row raises
    :class:`FetchError`, which names its file and row group, if that cannot be read, or if the file was changed since.

    Example:
        ::

            rows = ParquetDataset(["part-0.parquet", "part-1.parquet"], columns=["text", "label"])
            loader = DataLoader(rows, batch_size=32, sampler=BlockShuffleSampler(rows.block_sizes), num_workers=4)
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        decode: Callable[..., T_co] | None = None,
        *,
        cache_bytes: int = 1 << 28,
        store: ObjectStore | None = None,
        **store_options: Any,
    ) -> None:
        require("pyarrow.parquet", "parquet", "ParquetDataset")
        super().__init__(listed(paths), decode, cache_bytes, store, store_options)
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ConfigurationError(f"columns is a list of names, or None for all columns, but got {columns!r}")
        self.columns = None if columns is None else list(columns)
        footers = self._asked(read_footers)
        self._names = _named_columns(self.columns, self.paths, footers)
        self._dtypes = {  # lists of numbers come in one dtype, whichever file they are of
            name: np.result_type(*(footer.dtypes[name] for footer in footers if name in footer.dtypes))
            for name in {name for footer in footers for name in footer.dtypes}
        }
        self._versions = [footer.version for footer in footers]
        sizes = [len(footer.rows) for footer in footers]
        self._files = np.repeat(np.arange(len(sizes)), sizes)  # of each row group
        self._groups = np.concatenate([np.arange(size) for size in sizes])  # its number in that file
        self._blocks = np.cumsum([0, *(rows for footer in footers for rows in footer.rows)])
        if not len(self):
            raise ConfigurationError(f"there is no row in {len(sizes)} files, the first of which is {self.paths[0]}")
        self._metadata: dict[int, Any] = {}  # of files, parsed
        self._kept: KeptBlocks[pa.Table] = KeptBlocks(cache_bytes, operator.attrgetter("nbytes"))  # row groups

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_metadata": {}}

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Read the rows of a batch."""
        numbers = counted(indices, len(self), "row")
        rows = self._rows(numbers)
        return [self._decoder(row, number) for row, number in zip(rows, numbers.tolist(), strict=True)]

    async def getitems(self, indices: Sequence[int]) -> list[T_co]:
        """Read the rows of a batch on a thread."""
        numbers = counted(indices, len(self), "row")
        rows = await in_thread(self._rows, numbers)
        return [await self._decoder.call_async(row, number) for row, number in zip(rows, numbers.tolist(), strict=True)]

    def _rows(self, numbers: NDArray[np.int64]) -> list[dict[str, Any]]:
        found: list[Any] = [None] * len(numbers)
        groups = self._block_of(numbers)
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            table = self._table(group).take(numbers[mine] - self._blocks[group])
            columns = {name: _values(table.column(name), self._dtypes.get(name)) for name in table.column_names}
            for at, values in zip(mine.tolist(), zip(*columns.values(), strict=True), strict=True):
                found[at] = dict(zip(columns, values, strict=True))
        return found

    def _table(self, group: int) -> pa.Table:
        """Return a row group: one that is kept, or else read. In any thread."""
        table = self._kept.get(group)
        if table is None:
            table = self._read(group)
            self._kept.keep(group, table)
        return table

    def _read(self, group: int) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        at, number = int(self._files[group]), int(self._groups[group])
        path, version = self.paths[at], self._versions[at]
        try:
            with RangeFile(self._source, path, version) as file:
                reader = pq.ParquetFile(file, metadata=self._metadata.get(at), pre_buffer=True)
                self._metadata[at] = reader.metadata
                table = reader.read_row_group(number, columns=self.columns, use_threads=False)
        except (FetchError, FileNotFoundError, PermissionError) as error:
            error.add_note(f"It is row group {number} of {path}.")
            raise
        except (pa.ArrowException, OSError) as error:
            raise FetchError(f"{path}: row group {number} cannot be read: {error}") from error
        return table.select(self._names)  # in one order, whatever that in the file is


class Footer(NamedTuple):
    """The footer of a file: rows of each row group, columns, the dtypes of the columns of lists of numbers."""

    version: Version
    rows: list[int]
    columns: list[str]
    dtypes: dict[str, np.dtype[Any]]


def read_footers(source: Source, paths: Sequence[str]) -> list[Footer]:
    """Return what all files say of themselves.

    Raises:
        ConfigurationError: A file is no Parquet file, or truncated.
    """
    return [_read_footer(source, path) for path in paths]


def _read_footer(source: Source, path: str) -> Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    version = source.version(path)
    try:
        with RangeFile(source, path, version) as file:
            told = pq.ParquetFile(file)
            return Footer(
                version,
                [told.metadata.row_group(at).num_rows for at in range(told.metadata.num_row_groups)],
                list(told.schema_arrow.names),
                {
                    field.name: np.dtype(field.type.value_type.to_pandas_dtype())
                    for field in told.schema_arrow
                    if _holds_numbers(field.type)
                },
            )
    except pa.ArrowInvalid as error:
        raise ConfigurationError(f"{path}: no Parquet file, or truncated: {error}") from error


def _named_columns(wanted: Sequence[str] | None, paths: Sequence[str], footers: Sequence[Footer]) -> list[str]:
    """Return the columns of a row, which all files are to have: of a nested column its outermost."""
    first = footers[0].columns
    names = list(dict.fromkeys(first if wanted is None else (name.split(".")[0] for name in wanted)))
    for path, (_, _, there, _) in zip(paths, footers, strict=True):
        if len(set(there)) < len(there):
            raise ConfigurationError(f"{path}: has several columns of one name: {', '.join(there)}")
        if wanted is None and (more := [name for name in there if name not in first]):
            raise ConfigurationError(
                f"{path}: has columns that {paths[0]} has not: {', '.join(more)}; name those to be read (columns=...)"
            )
        if missing := [name for name in names if name not in there]:
            raise ConfigurationError(f"{path}: has no column {', '.join(missing)}; it has {', '.join(there)}")
    return names


def _holds_numbers(kind: pa.DataType) -> bool:
    """Whether a column is one of lists of numbers."""
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)))


def _values(column: pa.ChunkedArray, dtype: np.dtype[Any] | None) -> list[Any]:
    """Return the values of a column: those of lists of numbers as arrays, where those can hold them exactly."""
    import pyarrow as pa

    if not _holds_numbers(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    lists = column.combine_chunks()
    numbers = lists.flatten()
    if lists.null_count or (numbers.null_count and not pa.types.is_floating(column.type.value_type)):
        return [_value(row, dtype) for row in column]
    flat = numbers.to_numpy(zero_copy_only=False).astype(dtype)
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))[:-1]
    return [part.copy() for part in np.split(flat, ends)]


def _value(row: Any, dtype: np.dtype[Any] | None) -> Any:
    import pyarrow as pa

    holds_null = pa.types.is_floating(row.type.value_type)  # as NaN; of integers with one pyarrow would make floats
    if row.is_valid and (holds_null or not row.values.null_count):
        return np.array(row.values.to_numpy(zero_copy_only=False), dtype)
    return row.as_py()
