"""pack_collate: samples of a batch, laid one behind the other into blocks, with what attention kernels need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

_NUMBERS = "biufc"
IGNORED = -100
"""torch's `cross_entropy` leaves out targets of this value by default."""


class Block(list[Any]):
    """Samples that fill one block, as :class:`asyncloader.streams.Pack` puts them together."""


def pack_collate(
    samples: Sequence[Any],
    *,
    block_size: int,
    batch_size: int | None = None,
    too_long: Literal["raise", "cut"] = "raise",
    pad_id: int = 0,
    shift_labels: bool = False,
) -> dict[str, Any]:
    """Lay samples one behind the other into blocks: the `collate_fn` for :class:`PackingBatchSampler`.

    Samples are put in as they come, and the next block begins where the next sample does not fit: in the order of
    `PackingBatchSampler` that takes no more blocks than it has planned. :func:`packed` gives it to a loader, with the
    sizes of the sampler; by hand that is ``functools.partial(pack_collate, block_size=2048, batch_size=8)``.

    Args:
        samples: Rows of tokens (tensors, arrays or lists of integers), or dictionaries with such a row under
            "input_ids"; or blocks of these, each of which begins a new block here. Their own "labels" are used if there
            are any; other rows of numbers, one for each token, are laid out alike. Other entries (texts, numbers,
            arrays of several dimensions) are left out.
        block_size: Tokens of a block.
        batch_size: How many blocks to make, also where fewer are needed, so that all batches have one shape; by
            default as many as are needed.
        too_long: Samples longer than a block: "raise", or "cut" to the tokens that fit.
        pad_id: The token that fills the end of a block.
        shift_labels: Let labels be the tokens that come next. By default they are those at the same place, as the
            models of transformers, which shift them, want them.

    Returns:
        "input_ids", int64, blocks × block_size.
        "labels", int64, the same shape: -100 where nothing is to be predicted, in padding and at the first token of a
        sample (the last one, with `shift_labels`), which the sample before it would have to predict.
        "position_ids", int64, the same shape: from 0 in each sample.
        "document_ids", int32, the same shape: the number of the sample in the batch, -1 in padding. For flex attention
        (``document_ids[b, q] == document_ids[b, kv]``) and for masks.
        "cu_seqlens", int32: where samples begin, and at last the end, in the batch laid out as one row; a block's
        padding counts as a sample. With "max_seqlen", an int, the longest: for flash attention's variable lengths.
        And what other rows the samples have, filled with 0, in the dtype that numpy promotes those of all samples to.

    Raises:
        ValueError: if a sample is longer than a block, or all need more than `batch_size` blocks: then their lengths
            are not those that the sampler was given. If a row or labels are not of the length of their "input_ids", a
            sample lacks a row that another one has, or tokens or labels are no integers.
    """
    samples, begins_block = _flat(samples)
    rows = [_rows(sample, f"sample {number} of the batch") for number, sample in enumerate(samples)]
    sizes = _sizes(rows, block_size, too_long)
    starts, num_blocks = _lay_out(sizes, block_size, begins_block)
    if batch_size is not None:
        if num_blocks > batch_size:
            raise ValueError(
                f"{len(samples)} samples of {sum(sizes)} tokens need {num_blocks} blocks of {block_size}, more than "
                f"the batch_size of {batch_size}: their lengths are not those that the sampler was given"
            )
        num_blocks = batch_size
    segments, numbers = _segments(starts, sizes, num_blocks, block_size)
    count = num_blocks * block_size
    flat = {"input_ids": np.full(count, pad_id, np.int64), "labels": np.full(count, IGNORED, np.int64)}
    filled = [number for number, size in enumerate(sizes) if size]  # rows without tokens have no dtype of their own
    for name in _names(rows, filled):
        joined = np.concatenate([rows[number][name][: sizes[number]] for number in filled])
        row = flat.setdefault(name, np.zeros(count, joined.dtype.newbyteorder("=")))
        row[np.concatenate([np.arange(sizes[number]) + starts[number] for number in filled])] = joined
    begins = np.cumsum(segments) - segments
    labels = flat["labels"]
    if shift_labels:
        labels[:-1] = labels[1:]
    # No sample predicts the first token of the next one.
    labels[begins + segments - 1 if shift_labels else begins] = IGNORED
    labels[np.repeat(numbers < 0, segments)] = IGNORED
    flat["position_ids"] = np.arange(count) - np.repeat(begins, segments)
    flat["document_ids"] = np.repeat(numbers, segments).astype(np.int32)
    return {
        **{name: torch.from_numpy(row.reshape(num_blocks, block_size)) for name, row in flat.items()},
        "cu_seqlens": torch.from_numpy(np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)),
        "max_seqlen": int(segments.max(initial=0)),
    }


def _flat(samples: Sequence[Any]) -> tuple[list[Any], set[int]]:
    """Return the samples that are in blocks, or are given as they are, and which of them begin a block in any case."""
    flat: list[Any] = []
    begins: set[int] = set()
    for each in samples:
        if isinstance(each, Block):
            begins.add(len(flat))
            flat += each
        else:
            flat.append(each)
    return flat, begins


def _sizes(rows: list[dict[str, NDArray[Any]]], block_size: int, too_long: str) -> list[int]:
    """Return how many tokens of each sample are laid out."""
    sizes = [len(row["input_ids"]) for row in rows]
    for number, size in enumerate(sizes):
        if size > block_size and too_long == "raise":
            raise ValueError(
                f"sample {number} of the batch has {size} tokens, and a block has {block_size}: divide it in the "
                'dataset, or give too_long="cut"'
            )
    return [min(size, block_size) for size in sizes]


def _rows(sample: Any, whose: str) -> dict[str, NDArray[Any]]:
    """Return a sample's rows as arrays, "input_ids" and "labels" among them.

    Raises:
        ValueError: Labels, or a row of numbers, are not as many as there are tokens; or tokens, or labels, are no row
            of integers.
    """
    held = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    found = {name: _as_array(value) for name, value in held.items() if value is not None}
    tokens = found["input_ids"]
    length = len(tokens) if tokens.ndim else 0
    rows = {"labels": tokens, "input_ids": tokens}
    for name, row in found.items():
        if row.ndim and len(row) == length:
            rows[name] = row
        elif name == "labels" or (row.ndim == 1 and row.size and row.dtype.kind in _NUMBERS):
            raise ValueError(
                f"{whose}: {name!r} has {len(row) if row.ndim else 'no'} items, but there are {length} input_ids: a "
                "row has one item for each token. Leave other numbers out of the sample"
            )
    for name in ("input_ids", "labels"):
        if rows[name].ndim != 1 or (length and rows[name].dtype.kind not in "biu"):
            raise ValueError(
                f"{whose}: {name!r} should be one row of integers, but is {rows[name].dtype} of shape "
                f"{rows[name].shape}"
            )
    return {name: row for name, row in rows.items() if row.ndim == 1 and row.dtype.kind in _NUMBERS}


def _as_array(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # rows of several lengths in one
        return np.empty(())


def _names(rows: list[dict[str, NDArray[Any]]], filled: list[int]) -> set[str]:
    """Return which rows the samples have.

    Raises:
        ValueError: A sample lacks a row.
    """
    found = {name: number for number in filled for name in rows[number]}
    for number in filled:
        if missing := found.keys() - rows[number].keys():
            name = min(missing)
            raise ValueError(f"sample {number} of the batch has no row {name!r}, which sample {found[name]} has")
    return {*found}


def _lay_out(sizes: list[int], block_size: int, begins_block: set[int]) -> tuple[list[int], int]:
    """Return where each sample begins, in all blocks one behind the other, and how many blocks there are."""
    starts = []
    end = 0
    for number, size in enumerate(sizes):
        if end % block_size + size > block_size or number in begins_block:
            end += -end % block_size
        starts.append(end)
        end += size
    return starts, -(-end // block_size)


def _segments(
    starts: list[int], sizes: list[int], num_blocks: int, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lengths of all that is in the blocks, and the number of the sample it is; -1 for padding.

    Samples do not reach over the end of a block; padding is one segment in each block that has some.
    """
    own = np.flatnonzero(sizes)
    begins = np.array(starts, np.int64)[own]
    ends = begins + np.array(sizes, np.int64)[own]
    bounds = np.unique(np.concatenate([begins, ends, np.arange(num_blocks + 1) * block_size]))
    before = np.searchsorted(begins, bounds[:-1], side="right") - 1  # the last sample that begins up to there
    is_sample = (before >= 0) & (bounds[:-1] < np.append(ends, 0)[before])
    return np.diff(bounds), np.where(is_sample, np.append(own, 0)[before], -1)
