"""TokenBlocks: flat files and Megatron's; every token where it belongs, bad files named."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, TokenBlocks
from tests.support.nursery import Program

pytestmark = pytest.mark.on_threads

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [7, 0, 1, 12, 3]  # tokens in each


def index_bytes(lengths: Sequence[int], dtype: str, **changed: Any) -> bytes:
    """What Megatron writes beside documents of so many tokens, each of one sequence."""
    size = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *lengths])[:-1] * size
    head = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype], **changed}
    return (
        struct.pack("<9sQBQQ", head["magic"], head["version"], head["code"], len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


def tokens(first: int, count: int, dtype: str) -> bytes:
    return np.arange(first, first + count, dtype=dtype).tobytes()


CONTENT = {
    "0.bin": tokens(0, 23, "uint16"),
    "0.idx": index_bytes(DOCUMENTS, "uint16"),
    "1.bin": tokens(23, 5, "uint16"),
    "1.idx": index_bytes([5], "uint16"),
    "empty.bin": b"",
    "empty.idx": index_bytes([], "uint16"),
}
FILES = ["0.bin", "empty.bin", "1.bin"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in CONTENT.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def paths(folder: Path) -> list[Path]:
    return [folder / name for name in FILES]


def blocks(dataset: TokenBlocks) -> list[list[int]]:
    return [dataset[index].tolist() for index in range(len(dataset))]


ACROSS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [23, 24, 25, 26]]


def test_blocks_run_across_documents(paths: list[Path]) -> None:
    """Flat files and Megatron's; what is left over; overlap; windows."""
    flat, indexed = TokenBlocks(paths, 4, dtype="uint16"), TokenBlocks(paths, 4)
    assert blocks(flat) == blocks(indexed) == ACROSS
    assert (flat.tokens, flat.dtype, indexed.dtype) == (28, np.uint16, np.uint16)
    assert flat[-1].tolist() == ACROSS[-1]
    assert blocks(TokenBlocks(paths[0], 5, stride=4)) == [list(range(at, at + 5)) for at in (0, 4, 8, 12, 16)]
    assert len(TokenBlocks(paths[0], 4, stride=1)) == 20
    assert blocks(TokenBlocks([path.as_uri() for path in paths], 4)) == ACROSS


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 9))
def test_each_block_is_where_it_belongs(lengths: list[int], block_size: int, stride: int) -> None:
    """What a loop over files and positions would cut, whatever is empty or short."""
    expected = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(number)) for number in range(len(lengths))]
        for path, length in zip(paths, lengths, strict=True):
            content = [*range(len(expected), len(expected) + length)]
            path.write_bytes(np.array(content, np.int16).tobytes())
            expected += [content[at : at + block_size] for at in range(0, length - block_size + 1, stride)]
        if expected:
            assert blocks(TokenBlocks(paths, block_size, stride=stride, dtype="int16")) == expected
        else:
            with pytest.raises(ConfigurationError, match="there is no block"):
                TokenBlocks(paths, block_size, stride=stride, dtype="int16")


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_the_same_in_every_loader(loader_class: Any, paths: list[Path], num_workers: int) -> None:
    """Stacked from the files into the batch; a batch may be written to, and the files are as they were."""
    dataset = TokenBlocks(paths, 4)
    for _ in range(2):
        (batch,) = loader_class(dataset, batch_size=6, num_workers=num_workers)
        assert batch.tolist() == ACROSS
        assert batch.dtype is torch.uint16
        batch.zero_()
        dataset[0].zero_()
    assert not batch.is_inference()
    assert paths[0].read_bytes() == CONTENT["0.bin"]


def test_samples_of_a_batch_have_memory_of_their_own(tmp_path: Path) -> None:
    """Blocks that overlap, and one that comes twice, may be changed in place: neither others nor the file change."""
    path = tmp_path / "train.bin"
    path.write_bytes(tokens(0, 1 << 18, "int32"))
    dataset = TokenBlocks(path, 1024, stride=512, dtype="int32")
    first, second, again = dataset.__getitems__([0, 1, 1])
    first.zero_()
    again.fill_(7)
    assert torch.equal(second, torch.arange(512, 1536, dtype=torch.int32))
    found = torch.cat(list(DataLoader(TokenBlocks(path, 1024, dtype="int32"), batch_size=64, num_workers=2)))
    assert torch.equal(found.flatten(), torch.arange(1 << 18, dtype=torch.int32))


CUT_WHILE_IN_USE = """
import os, sys
from asyncloader.datasets import FetchError, TokenBlocks
dataset = TokenBlocks(sys.argv[1], 1 << 16, dtype="uint16")
blocks = dataset.__getitems__([0, 1, 100])
os.truncate(sys.argv[1], 10)
assert blocks[2].sum() == 0
try:
    dataset[100]
except FetchError as error:
    assert "was changed since this dataset was made" in str(error)
    print("whole")
"""


def test_a_file_that_is_cut_while_it_is_in_use_is_an_error(run: Callable[..., Program], tmp_path: Path) -> None:
    """Not the end of the process, as it is of a mapped file (SIGBUS); what has been read is there."""
    path = tmp_path / "train.bin"
    np.zeros(1 << 23, np.uint16).tofile(path)
    done = run(CUT_WHILE_IN_USE, path)
    assert (done.returncode, done.out) == (0, "whole\n"), done.explain("")


def test_what_lies_in_the_place_of_an_index_is_not_waited_for(folder: Path) -> None:
    """A pipe, a device without an end, a file of a terabyte."""
    index = folder / "0.idx"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(OSError, match="is no regular file"):
        TokenBlocks(folder / "0.bin", 4)
    index.unlink()
    index.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is no regular file"):
        TokenBlocks(folder / "0.bin", 4)
    index.unlink()
    index.touch()
    os.truncate(index, 1 << 40)
    with pytest.raises(ConfigurationError, match=r"0\.idx: no index of Megatron's"):
        TokenBlocks(folder / "0.bin", 4)


def test_it_travels_by_its_paths(paths: list[Path], start_method: str) -> None:
    """To workers however they are started, and after it was used."""
    dataset = TokenBlocks(paths, 4)
    dataset[0]
    assert len(pickle.dumps(dataset)) < 2000
    (batch,) = DataLoader(dataset, batch_size=6, num_workers=1, multiprocessing_context=start_method)
    assert batch.tolist() == ACROSS


def test_what_is_wrong_with_a_file_is_said_at_construction(folder: Path) -> None:
    """By its name and the place in it."""

    def refuses(words: str, index: bytes | None = None, name: str = "0.bin", **options: Any) -> None:
        if index is not None:
            (folder / "0.idx").write_bytes(index)
        with pytest.raises(ConfigurationError, match=words):
            TokenBlocks(folder / name, **{"block_size": 4, **options})
        (folder / "0.idx").write_bytes(CONTENT["0.idx"])

    whole = CONTENT["0.idx"]
    refuses(r"0.idx: no index of Megatron's", whole[:5])
    refuses(r"0.idx: truncated: ends at byte 100 of 142", whole[:100])
    refuses(r"0.idx: no index of Megatron's.*begins with b'TNTIDX", b"TNTIDX" + whole[6:])
    refuses(r"0.idx: .*version 2, dtype 8", index_bytes(DOCUMENTS, "uint16", version=2))
    refuses(r"0.idx: .*version 1, dtype 7", index_bytes(DOCUMENTS, "uint16", code=7))
    refuses(r"0.idx: tells of 23 tokens of 4 bytes, but the .bin has 46", index_bytes(DOCUMENTS, "int32"))
    refuses(r"0.idx: tells of 22 tokens", index_bytes([22], "uint16"))
    (folder / "odd.bin").write_bytes(b"12345")
    refuses(r"odd.bin: truncated, or of another dtype: 5 bytes", name="odd.bin", dtype="uint16")
    refuses(r"odd.idx: is not there; for flat files, without it, say dtype", name="odd.bin")
    refuses("there is no block of 24 tokens in 23 tokens of 1 file", block_size=24)
    refuses("block_size should be an integer of at least 1", block_size=0)
    refuses("stride should be", stride=True)
    refuses("whole numbers, which <f4 is not", dtype="float32")
    for dtype in ("bool", "m8[s]", [("token", "u2")], (np.uint16, 2), "S2", object):
        refuses("whole numbers, which .* is not", dtype=dtype)
    refuses(r"little-endian whole numbers, which >u2 is not", dtype=">u2")
    (folder / "1.bin").write_bytes(tokens(0, 5, "int32"))
    (folder / "1.idx").write_bytes(index_bytes([5], "int32"))
    with pytest.raises(ConfigurationError, match=r"of one dtype, but got .*int32.* in .*0.idx.*1.idx"):
        TokenBlocks([folder / "0.bin", folder / "1.bin"], 4)
    with pytest.raises(ConfigurationError, match=r"s3://bucket/0.bin: TokenBlocks reads local files"):
        TokenBlocks("s3://bucket/0.bin", 4, dtype="uint16")
    with pytest.raises(ConfigurationError, match="there are no files"):
        TokenBlocks([], 4)
    with pytest.raises(FileNotFoundError):
        TokenBlocks(folder / "none.bin", 4, dtype="uint16")
    with pytest.raises(IndexError, match="no block 5: there are 5"):
        TokenBlocks(folder / "0.bin", 4)[5]


def test_a_file_that_was_changed_is_an_error(paths: list[Path]) -> None:
    """Before it is read, in a worker as well as here."""
    dataset = TokenBlocks(paths, 4)
    paths[0].write_bytes(CONTENT["0.bin"] + b"\0\0")
    with pytest.raises(FetchError, match=r"0.bin: was changed since this dataset was made"):
        next(iter(DataLoader(dataset, batch_size=2, num_workers=1)))


def test_a_file_that_is_changed_after_it_was_read_is_an_error(paths: list[Path]) -> None:
    """Overwritten in place it has the same size and other tokens; other files go on."""
    dataset = TokenBlocks(paths, 4)
    dataset.__getitems__(range(len(dataset)))
    paths[0].write_bytes(tokens(100, 23, "uint16"))
    os.utime(paths[0], ns=(1, 1))
    for read in (lambda: dataset[0], lambda: dataset.__getitems__([5, 0])):
        with pytest.raises(FetchError, match=r"0.bin: was changed since this dataset was made"):
            read()
    assert dataset[5].tolist() == ACROSS[5]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "<u2", "i2", "u4", "i4", "i8", "=i8", int])
def test_tokens_of_every_dtype(tmp_path: Path, dtype: Any) -> None:
    """Come as they are in the file."""
    bounds = np.iinfo(dtype)
    values = np.array([bounds.min, 0, 1, bounds.max], dtype)
    values.tofile(tmp_path / "a.bin")
    assert TokenBlocks(tmp_path / "a.bin", 4, dtype=dtype)[0].tolist() == values.tolist()


def test_numbers_of_blocks_are_whole(paths: list[Path]) -> None:
    """Those of numpy and torch are, also for sizes; a fraction or a text is not taken for the number it is near to."""
    dataset = TokenBlocks(paths, 4)
    for index in (3, np.uint8(3), np.array(3), torch.tensor(3)):
        assert dataset[index].tolist() == ACROSS[3]  # type: ignore[index]
    for indices in (np.array([3, -1]), torch.tensor([3, -1]), range(3, 6, 2)):
        assert [block.tolist() for block in dataset.__getitems__(indices)] == [ACROSS[3], ACROSS[5]]  # type: ignore[arg-type]
    assert dataset.__getitems__([]) == []
    for kind in (np.int64, np.uint8, torch.tensor):
        options: Any = {"block_size": kind(4), "stride": kind(5)}
        assert blocks(TokenBlocks(paths, **options)) == blocks(TokenBlocks(paths, 4, stride=5))
    for index in (1.9, "3", np.float32(2.7), torch.tensor(1.0), None, [1]):
        with pytest.raises(TypeError):
            dataset[index]  # type: ignore[index]
    with pytest.raises(TypeError):
        dataset.__getitems__(np.array([1.0]))  # type: ignore[arg-type]
