"""Files as shards: lines, JSON lines, Parquet; from any sample on."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path

import pytest

from asyncloader.streams import ShardedStream
from asyncloader.streams.reading import json_lines, parquet_rows, text_lines


def written(path: Path, data: bytes) -> Path:
    """Write a file, compressed as its name says, in two pieces."""
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    else:
        path.write_bytes(b"".join(map(gzip.compress, halves)) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_lines_are_read_from_any_number_on(ending: str, tmp_path: Path) -> None:
    """A bad line of JSON is an error in its place; compressed files are read as they are, to their end."""
    path = written(tmp_path / f"lines.jsonl{ending}", b'\xef\xbb\xbf{"a": 1}\n[2]\r\n{bad\n"last"')
    assert [*text_lines(path, 1)] == ["[2]", "{bad", '"last"']
    first, second, bad, last = json_lines(str(path), 0)
    assert (first, second, type(bad), last) == ({"a": 1}, [2], json.JSONDecodeError, "last")
    assert [*json_lines(path, 3)] == ["last"]
    spaced, two, empty, mark = json_lines(written(tmp_path / f"odd.jsonl{ending}", b' {"a": [1]} \t\n1 2\n\n2\xff'), 0)
    assert (spaced, type(two), type(empty), type(mark)) == ({"a": [1]}, *[json.JSONDecodeError] * 2, UnicodeDecodeError)
    deep, after = json_lines(written(tmp_path / f"deep.jsonl{ending}", b"[" * 100_000 + b"\n1"), 0)
    assert (type(deep), after) == (RecursionError, 1)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_is_cut_short_is_an_error(ending: str, tmp_path: Path) -> None:
    """That names the file and the place."""
    path = written(tmp_path / f"lines.jsonl{ending}", b"".join(b"%d\n" % number for number in range(9000)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises((EOFError, OSError)) as caught:
        [*ShardedStream([path], json_lines)]
    assert f"lines.jsonl{ending}" in caught.value.__notes__[0]


def test_rows_of_parquet_are_read_by_the_group(tmp_path: Path) -> None:
    """From any row on."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"n": [*range(10)]}), path, row_group_size=4)
    for start in range(11):
        assert [row["n"] for row in parquet_rows(path, start)] == [*range(start, 10)]
