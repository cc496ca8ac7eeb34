"""Rows of Parquet files by number: row groups are read whole, and kept for the rows beside.

numbers ──> row groups ──> read once, a bounded number of bytes of them kept ──> rows as dicts ──> decode
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.errors import FetchError, require
from asyncloader.datasets.kept_blocks import BlockDataset
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

    A sample is a dict by column: numbers, texts, bytes; lists of numbers are arrays; what else there is comes as Python
    values. A column whose types differ among files has one that holds the values of all of them. Null is None; within a
    list of floats it is NaN, and a list of integers that has one is a Python list, so that its numbers stay exact.

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
        super().__init__(listed(paths), decode, cache_bytes, operator.attrgetter("nbytes"), store, store_options)
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ConfigurationError(f"columns is a list of names, or None for all columns, but got {columns!r}")
        self.columns = None if columns is None else list(columns)
        footers = self._asked(read_footers, self.columns)
        self._versions = [version for version, *_ in footers]
        self._schema = _common_schema(self.columns, self.paths, footers)
        sizes = [len(rows) for _, rows, *_ in footers]
        self._files = np.repeat(np.arange(len(sizes)), sizes)  # of each row group
        self._groups = np.concatenate([np.arange(size) for size in sizes])  # its number in that file
        self._blocks = np.cumsum([0, *itertools.chain.from_iterable(rows for _, rows, *_ in footers)])
        if not len(self):
            raise ConfigurationError(f"there is no row in {len(sizes)} files, the first of which is {self.paths[0]}")
        self._metadata: dict[int, Any] = {}  # of files, parsed

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_metadata": {}}

    def _samples(self, numbers: NDArray[np.int64], blocks: dict[int, Any]) -> list[tuple[Any, Any]]:
        found: list[Any] = [None] * len(numbers)
        groups = self._block_of(numbers)
        for group, content in blocks.items():
            mine = np.flatnonzero(groups == group)
            table = content.take(numbers[mine] - self._blocks[group])
            for at, *values in zip(mine.tolist(), *map(_values, table.columns), strict=True):
                found[at] = dict(zip(table.column_names, values, strict=True)), int(numbers[at])
        return found

    def _read(self, block: int) -> pa.Table:
        """Read a row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        at, number = int(self._files[block]), int(self._groups[block])
        path, version = self.paths[at], self._versions[at]
        try:
            with RangeFile(self._source, path, version) as file:
                reader = pq.ParquetFile(file, metadata=self._metadata.get(at), pre_buffer=True)
                self._metadata[at] = reader.metadata
                table = reader.read_row_group(number, columns=self.columns, use_threads=False)
                return table.select(self._schema.names).cast(self._schema)
        except (FetchError, FileNotFoundError, PermissionError) as error:
            error.add_note(f"It is row group {number} of {path}.")
            raise
        except (pa.ArrowException, OSError) as error:
            raise FetchError(f"{path}: row group {number} cannot be read: {error}") from error


Footer: TypeAlias = "tuple[Version, list[int], list[str], pa.Schema]"
"""The version of a file, the rows of each of its row groups, its columns, and the types of those that are read."""


def read_footers(source: Source, paths: Sequence[str], columns: Sequence[str] | None) -> list[Footer]:
    """Return what all files say of themselves.

    Raises:
        ConfigurationError: A file is no Parquet file, or truncated.
    """
    return [_read_footer(source, path, columns) for path in paths]


def _read_footer(source: Source, path: str, columns: Sequence[str] | None) -> Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    version = source.version(path)
    try:
        with RangeFile(source, path, version) as file:
            told = pq.ParquetFile(file)
            rows = [told.metadata.row_group(at).num_rows for at in range(told.metadata.num_row_groups)]
            return version, rows, list(told.schema_arrow.names), told.read_row_groups([], columns=columns).schema
    except pa.ArrowInvalid as error:
        raise ConfigurationError(f"{path}: no Parquet file, or truncated: {error}") from error


def _common_schema(wanted: Sequence[str] | None, paths: Sequence[str], footers: Sequence[Footer]) -> pa.Schema:
    """Return the columns of a row, which all files are to have, in types that hold the values of all files.

    Of a nested column it is the outermost.
    """
    import pyarrow as pa

    first = footers[0][2]
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
    try:
        schema = pa.unify_schemas([schema for *_, schema in footers], promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigurationError(f"the files have columns of one name and of types that differ: {error}") from error
    return pa.schema([schema.field(name) for name in names])


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column: lists of numbers as arrays, where those can hold them exactly."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return [_numbers(row) for row in column]
    return column.to_pylist()  # type: ignore[no-any-return]


def _numbers(row: Any) -> Any:
    import pyarrow as pa

    holds_null = pa.types.is_floating(row.type.value_type)  # as NaN; of integers with one pyarrow would make floats
    if row.is_valid and (holds_null or not row.values.null_count):
        return np.array(row.values.to_numpy(zero_copy_only=False))
    return row.as_py()
