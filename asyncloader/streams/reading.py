"""What reads shards for `ShardedStream`: ``read(shard, start)`` gives the samples of a shard from a number on.

Each reads a file from its beginning, or from the row group that has the first sample, and gives nothing before that. A
line that is bad is given as the error that it costs; a file that is cut short raises.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from os import PathLike, fspath
from typing import Any

Path = str | PathLike[str]


def text_lines(path: Path, start: int) -> Iterator[str | ValueError]:
    """Read the lines of a text file in UTF-8, without their ends; also of a ``.gz`` or ``.zst`` file.

    Args:
        path: The file.
        start: The number of the first line, from 0 on.

    Returns:
        An iterator over the lines; in place of one that is not UTF-8, the ValueError.
    """
    return _lines(path, start, lambda line: line.decode().rstrip("\r\n"))


def json_lines(path: Path, start: int) -> Iterator[Any]:
    """Read what the lines of a file of JSON lines contain; also of a ``.gz`` or ``.zst`` file.

    Args:
        path: The file.
        start: The number of the first line, from 0 on.

    Returns:
        An iterator over the values of lines; in place of one that is no JSON, the ValueError.
    """
    return _lines(path, start, _parsed)


def parquet_rows(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dictionaries of Python's values. Row groups before it are not read.

    Args:
        path: The file.
        start: The number of the first row, from 0 on.
    """
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if start < count:
                yield from file.read_row_group(group).slice(start).to_pylist()
            start = max(0, start - count)


_decoder = json.JSONDecoder()


def _parsed(line: bytes) -> Any:
    """Return what a line contains. `json.loads` looks for encodings, too, and takes 1.8 times as long for 500 bytes."""
    text = line.decode().removeprefix("\ufeff").strip(" \t\r\n")
    value, end = _decoder.raw_decode(text)
    return value if end == len(text) else _decoder.decode(text)  # which raises


def _lines(path: Path, start: int, parse: Callable[[bytes], Any]) -> Iterator[Any]:
    """Yield what is made of the lines of a file from a number on, or the error that one raises."""
    with _open(fspath(path)) as file:
        for line in islice(file, start, None):
            try:
                yield parse(line)
            except (ValueError, RecursionError) as error:
                yield error


def _open(path: str) -> Any:
    """Open a file to be read as bytes, decompressed."""
    if path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))  # raises if the file is cut short
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")
