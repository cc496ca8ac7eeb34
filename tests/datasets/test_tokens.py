"""TokenBlocks: flat files and Megatron's, read and by ranges; every token where it belongs, bad files named."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, TokenBlocks
from asyncloader.datasets import tokens as datasets_tokens
from asyncloader.datasets.tokens import Layout
from tests.nursery import Program
from tests.services.fault_server import FaultServer

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
        + np.array(changed.get("documents", range(len(lengths) + 1)), "<i8").tobytes()
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


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(CONTENT) as server:
        yield server


def blocks(dataset: TokenBlocks) -> list[list[int]]:
    return [dataset[index].tolist() for index in range(len(dataset))]


ACROSS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [23, 24, 25, 26]]
BY_DOCUMENT = [
    [0, 1, 2, 3], [4, 5, 6], [7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22],
    [23, 24, 25, 26], [27],
]  # fmt: skip


def test_blocks_run_across_documents_or_not(paths: list[Path]) -> None:
    """Flat files and Megatron's; what is left over; overlap; windows; lengths for a sampler that packs."""
    flat, indexed = TokenBlocks(paths, 4, dtype="uint16"), TokenBlocks(paths, 4)
    assert blocks(flat) == blocks(indexed) == ACROSS
    assert (flat.tokens, flat.dtype, indexed.dtype) == (28, np.uint16, np.uint16)
    by_document = TokenBlocks(paths, 4, by_document=True)
    assert blocks(by_document) == BY_DOCUMENT
    assert by_document.lengths.tolist() == [len(block) for block in BY_DOCUMENT]
    assert by_document[-1].tolist() == [27]
    assert blocks(TokenBlocks(paths[0], 5, stride=4)) == [list(range(at, at + 5)) for at in (0, 4, 8, 12, 16)]
    assert len(TokenBlocks(paths[0], 4, stride=1)) == 20
    assert blocks(TokenBlocks(paths, 5, stride=4, by_document=True))[:3] == [[0, 1, 2, 3, 4], [4, 5, 6], [7]]


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(1, 9),
    st.booleans(),
)
def test_every_layout_has_each_token_where_it_belongs(
    files: list[list[int]], block_size: int, stride: int, by_document: bool
) -> None:
    """What a loop over documents and positions would cut, whatever is empty or short."""
    starts = [np.cumsum([0, *lengths]).astype(np.int64) for lengths in files]
    expected = []
    for number, lengths in enumerate(files):
        begin = 0
        for length in lengths if by_document else [sum(lengths)]:
            for at in range(0, length, stride):
                is_new = at == 0 or at + max(0, block_size - stride) < length  # has a token that the last one has not
                if is_new if by_document else at + block_size <= length:
                    expected.append((number, begin + at, min(begin + at + block_size, begin + length)))
            begin += length
    layout = Layout.of(starts, block_size, stride, by_document)
    assert layout.firsts[-1] == len(expected)
    found = layout.find(np.arange(len(expected)))
    assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == expected


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
    with pytest.raises(ConfigurationError, match=r"0\.idx: 1,099,511,627,776 bytes are more than an index may have"):
        TokenBlocks(folder / "0.bin", 4)


def test_it_travels_by_its_paths(paths: list[Path], start_method: str) -> None:
    """To workers however they are started, and after it was used."""
    dataset = TokenBlocks(paths, 4)
    dataset[0]
    assert len(pickle.dumps(dataset)) < 2000
    (batch,) = DataLoader(dataset, batch_size=6, num_workers=1, multiprocessing_context=start_method)
    assert batch.tolist() == ACROSS


@pytest.mark.parametrize("scanned", [1, 3, 1 << 22])
def test_documents_of_flat_files_end_with_a_token(
    scanned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nanoGPT writes them: the token belongs to the document that it ends; what follows the last one is one too."""
    monkeypatch.setattr(datasets_tokens, "_SCANNED", scanned)
    path = tmp_path / "train.bin"
    for rest in ([], [6, 7]):
        content = [1, 2, 3, 50256, 50256, 4, 5, 50256, *rest]
        path.write_bytes(np.array(content, np.uint16).tobytes())
        options: Any = {"dtype": "uint16", "by_document": True}
        dataset = TokenBlocks(path, 3, end_of_text=50256, **options)
        assert blocks(dataset) == [[1, 2, 3], [50256], [50256], [4, 5, 50256], *[rest] * bool(rest)]
        assert dataset.lengths.tolist() == [3, 1, 1, 3, *[2] * bool(rest)]


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
    refuses(r"0.idx: its documents do not agree", index_bytes(DOCUMENTS, "uint16", documents=[0, 1, 2, 3, 4, 4]))
    damaged = bytearray(whole)
    damaged[34 + 4 * 5 + 8] = 13
    refuses(r"0.idx: sequence 1 begins at byte 13 of the .bin", bytes(damaged))
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
    refuses("where documents begin is told by an .idx", dtype="uint16", by_document=True)
    refuses("end_of_text=50256 for nanoGPT's", dtype="uint16", by_document=True)
    refuses("with by_document=True", dtype="uint16", end_of_text=3)
    refuses("an .idx tells of documents", by_document=True, end_of_text=3)
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
        options = {"dtype": "uint16", "by_document": True, "end_of_text": kind(3)}
        assert blocks(TokenBlocks(paths[0], kind(4), **options))[0] == [0, 1, 2, 3]
    for index in (1.9, "3", np.float32(2.7), torch.tensor(1.0), None, [1]):
        with pytest.raises(TypeError):
            dataset[index]  # type: ignore[index]
    with pytest.raises(TypeError):
        dataset.__getitems__(np.array([1.0]))  # type: ignore[arg-type]
