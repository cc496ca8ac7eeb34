"""PackingBatchSampler and pack_collate: blocks that are full, and what attention kernels want of them."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import asyncloader
from asyncloader import ConfigurationError
from asyncloader.samplers import PackingBatchSampler, pack_collate, packed
from asyncloader.samplers.best_fit import best_fit
from tests.support import effort

Tokens = list[torch.Tensor]


def documents(lengths: list[int]) -> Tokens:
    """Each token names its document and its place in it."""
    return [torch.arange(length) + 1000 * (number + 1) for number, length in enumerate(lengths)]


def slow_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Look at all blocks for each sample."""
    left: list[int] = []
    blocks = []
    for size in sizes:
        rooms = [room for room in left if room >= size and room]
        if not rooms:
            left.append(capacity)
            rooms = [capacity]
        block = max(number for number, room in enumerate(left) if room == min(rooms))
        left[block] -= size
        blocks.append(block)
    return blocks


@given(sizes=st.lists(st.integers(0, 400), max_size=80), capacity=st.sampled_from([400, 511, 512, 1000]))
def test_each_goes_where_it_leaves_the_least_room(sizes: list[int], capacity: int) -> None:
    """As looking at all blocks finds it; where several have as much room, whichever."""
    sizes.sort(reverse=True)
    found, expected = best_fit(sizes, capacity), slow_best_fit(sizes, capacity)
    filled = [np.bincount(blocks, weights=sizes).tolist() if sizes else [] for blocks in (found, expected)]
    assert sorted(filled[0]) == sorted(filled[1])
    assert max(filled[0], default=0) <= capacity


@pytest.mark.parametrize(("sigma", "block_size"), [(0.5, 4096), (1.0, 8192), (1.5, 8192), (1.0, 2048), (1.0, 65_536)])
def test_blocks_are_full(sigma: float, block_size: int) -> None:
    """Log-normal lengths of 500 tokens on average fill 97 % of blocks and more, counted, and as the sampler says."""
    drawn = np.random.default_rng(1).lognormal(np.log(500) - sigma**2 / 2, sigma, 20_000)
    lengths = drawn.astype(np.int64).clip(1, block_size)
    sampler = PackingBatchSampler(lengths, block_size=block_size)
    blocks = list(sampler)
    assert all(lengths[block].sum() <= block_size for block in blocks)
    fill = lengths.sum() / (len(blocks) * block_size)
    assert fill >= 0.97
    assert abs(sampler.fill - fill) < 1e-9


@settings(deadline=None, max_examples=effort.examples(90))
@given(lengths=st.lists(st.integers(0, 45), min_size=1, max_size=60), batch_size=st.integers(1, 4), data=st.data())
def test_all_tokens_come_once(lengths: list[int], batch_size: int, data: Any) -> None:
    """What is beyond a block is lost with `too_long="cut"`, and no more; nothing of samples that were divided."""
    is_divided = data.draw(st.booleans())
    docs = documents(lengths)
    docs = [part for doc in docs for part in doc.split(16)] if is_divided else docs
    sampler = PackingBatchSampler(list(map(len, docs)), block_size=16, batch_size=batch_size, too_long="cut", window=20)
    collate = partial(pack_collate, block_size=16, batch_size=batch_size, too_long="cut")
    seen: Counter[int] = Counter()
    for batch in DataLoader(docs, batch_sampler=sampler, collate_fn=collate):
        assert batch["input_ids"].shape == (batch_size, 16)
        seen.update(batch["input_ids"][batch["document_ids"] >= 0].tolist())
    assert seen == Counter(token for doc in docs for token in doc[:16].tolist())


@settings(deadline=None, max_examples=effort.examples(150))
@given(lengths=st.lists(st.integers(0, 16), min_size=1, max_size=20), shift=st.booleans())
def test_a_packed_batch_says_where_its_documents_are(lengths: list[int], shift: bool) -> None:
    """In three ways, which agree: ids, positions, boundaries. No label is to be predicted from another document."""
    docs = documents(lengths)
    batch = pack_collate(docs, block_size=16, pad_id=7, shift_labels=shift)
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    bounds = batch["cu_seqlens"].tolist()
    assert (bounds[0], bounds[-1]) == (0, len(ids))
    assert batch["max_seqlen"] == max([end - begin for begin, end in itertools.pairwise(bounds)], default=0)
    found = []
    for begin, end in itertools.pairwise(bounds):
        part = slice(begin, end)
        assert begin // 16 == (end - 1) // 16  # in one block
        assert batch["position_ids"].flatten()[part].tolist() == list(range(end - begin))
        (number,) = set(batch["document_ids"].flatten()[part].tolist())
        if number < 0:
            assert set(ids[part].tolist()) == {7}
            assert set(labels[part].tolist()) == {-100}
            continue
        found.append(number)
        own = docs[number].tolist()
        assert ids[part].tolist() == own
        assert labels[part].tolist() == ([*own[1:], -100] if shift else [-100, *own[1:]])
    assert found == [number for number, length in enumerate(lengths) if length]
    kinds = {name: value.dtype for name, value in batch.items() if name != "max_seqlen"}
    assert kinds == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "document_ids": torch.int32,
        "cu_seqlens": torch.int32,
    }


def test_attention_over_a_packed_block_is_that_of_each_document() -> None:
    """With a mask of document ids, as flex attention makes it, and over the boundaries, as flash attention cuts."""
    torch.manual_seed(0)
    batch = pack_collate(documents([5, 3, 6, 4]), block_size=10)
    values = torch.randn(2, 1, 10, 8)
    ids = batch["document_ids"]
    mask = (ids[:, :, None] == ids[:, None, :]) & torch.ones(10, 10).tril().bool()
    attend = torch.nn.functional.scaled_dot_product_attention
    masked = attend(values, values, values, attn_mask=mask[:, None])
    rows, cut = values.reshape(1, 20, 8), []
    bounds = batch["cu_seqlens"].tolist()
    for begin, end in itertools.pairwise(bounds):
        part = rows[:, begin:end]
        cut.append(attend(part, part, part, is_causal=True))
    torch.testing.assert_close(masked.reshape(1, 20, 8), torch.cat(cut, dim=1))


def test_dictionaries_keep_their_labels_and_other_rows() -> None:
    """Labels of their own, as of prompts that are not to be predicted; what is no row of numbers is left out."""
    samples = [
        {
            "input_ids": [1, 2, 3],
            "labels": [-100, -100, 3],
            "weight": np.array([0.5, 1, 1], dtype=np.float32),
            "id": "a",
            "words": ["x", "y", "z"],
            "image": torch.zeros(3, 2),
            "turns": [[1, 2], [3]],
            "tools": [],
            "number": torch.tensor(3),
        },
        {"input_ids": [4, 5], "labels": [4, 5], "weight": np.array([2, 2], dtype=np.float32), "id": "b"},
    ]
    batch = pack_collate(samples, block_size=8)
    assert batch["labels"].tolist() == [[-100, -100, 3, -100, 5, -100, -100, -100]]
    assert batch["weight"].tolist() == [[0.5, 1, 1, 2, 2, 0, 0, 0]]
    assert batch["weight"].dtype == torch.float32
    assert batch.keys() == {
        *("input_ids", "labels", "weight", "position_ids", "document_ids", "cu_seqlens", "max_seqlen")
    }


NUMBERS: list[Any] = [
    [1, 2],
    [0.5, 0.25],
    [True, False],
    torch.tensor([1, 2], dtype=torch.uint8),
    torch.tensor([300, 70_000]),
    torch.tensor([0.5, 0.25], dtype=torch.float32),
    torch.tensor([0.5, 0.25], dtype=torch.float16),
    np.array([-1, 2], ">i4"),
    np.array([0.5, 1e300]),
    np.array([1j, 2], np.complex64),
    np.array([1, 65_535], np.uint16),
    np.array([-1, 1], np.int8),
]


@pytest.mark.parametrize("one", range(len(NUMBERS)))
def test_rows_have_the_dtype_that_numpy_promotes_to(one: int) -> None:
    """That of all samples, whichever comes first: no number becomes another one because of the sample before it."""
    for other in NUMBERS:
        rows = [np.asarray(NUMBERS[one]), np.asarray(other)]
        expected = np.concatenate(rows)
        samples = [{"input_ids": [5, 6], "row": row} for row in (NUMBERS[one], other)]
        row = pack_collate(samples, block_size=4)["row"]
        assert row.numpy().dtype == expected.dtype.newbyteorder("=")
        assert row[0].tolist() == expected.tolist()


def test_samples_without_tokens_have_no_dtype() -> None:
    """An empty list, whose dtype is float, changes none; nor does it lack a row."""
    batch = pack_collate(
        [{"input_ids": [], "row": []}, {"input_ids": [5], "row": [7]}, {"input_ids": []}], block_size=2
    )
    assert batch["row"].dtype == torch.int64
    assert batch["row"].tolist() == [[7, 0]]
    assert pack_collate([[], []], block_size=2, batch_size=1)["input_ids"].tolist() == [[0, 0]]


BAD_ROWS = {
    "labels": ({"labels": [-100, 7]}, "sample 1 of the batch: 'labels' has 2 items, but there are 3 input_ids"),
    "a label": ({"labels": 1}, "sample 1 of the batch: 'labels' has no items, but there are 3 input_ids"),
    "texts": ({"labels": "abc"}, "sample 1 of the batch: 'labels' has no items"),
    "a row": ({"row": torch.ones(4)}, "sample 1 of the batch: 'row' has 4 items, but there are 3 input_ids"),
    "no row": ({}, "sample 1 of the batch has no row 'row', which sample 0 has"),
    "floats": ({"input_ids": [0.5, 1, 2]}, "sample 1 of the batch: 'input_ids' should be one row of integers"),
    "float labels": ({"labels": [0.5, 1, 2]}, "'labels' should be one row of integers, but is float64"),
    "two dimensions": ({"input_ids": [[1, 2, 3]]}, r"'input_ids' should be one row of integers.* \(1, 3\)"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_that_do_not_fit_their_tokens(bad: str) -> None:
    """Are told with the number of the sample, not left out; whichever sample they are in."""
    sample, error = BAD_ROWS[bad]
    good = {"input_ids": [1], "row": [1]}
    with pytest.raises(ValueError, match=error):
        pack_collate(
            [
                good,
                {
                    "input_ids": [1, 2, 3],
                    **({"row": [1, 2, 3]} if bad != "no row" and bad != "two dimensions" else {}),
                    **sample,
                },
            ],
            block_size=8,
        )


def test_what_does_not_fit_is_told() -> None:
    """A sample that is too long, and samples whose lengths are not those that were planned with."""
    with pytest.raises(ValueError, match="sample 1 of the batch has 20 tokens, and a block has 16: divide it in the"):
        pack_collate(documents([3, 20]), block_size=16)
    with pytest.raises(ValueError, match="2 samples of 20 tokens need 2 blocks of 16, more than the batch_size of 1"):
        pack_collate(documents([10, 10]), block_size=16, batch_size=1)
    with pytest.raises(ConfigurationError, match=r'sample 1 has 20 tokens, and a block has 16: .*too_long="cut"'):
        PackingBatchSampler([3, 20], block_size=16)
    with pytest.raises(ConfigurationError, match="batch_size should be an integer of at least 1, but got True"):
        PackingBatchSampler([3, 20], block_size=16, batch_size=True)


@pytest.mark.parametrize("loader_class", [DataLoader, asyncloader.DataLoader])
@pytest.mark.parametrize("too_long", ["raise", "cut"])
def test_sizes_are_said_once(loader_class: Any, too_long: Any) -> None:
    """`packed` gives any loader the dataset, the sampler and the collation that belong together."""
    lengths = [5, 3, 9, 2] if too_long != "raise" else [5, 3, 4, 2]
    rows = documents(lengths)
    sampler = PackingBatchSampler(lengths, block_size=6, batch_size=2, too_long=too_long)
    batches = list(loader_class(**packed(rows, sampler, pad_id=99), num_workers=1))
    assert {batch["input_ids"].shape for batch in batches} == {(2, 6)}
    tokens = Counter(token for batch in batches for token in batch["input_ids"].flatten().tolist() if token != 99)
    whole = Counter(token for row in rows for token in row[:6].tolist())
    assert tokens == whole


def test_what_does_not_fit_together_is_refused() -> None:
    """Another shape and unpacked rows used to come in silence, or as a riddle."""
    rows = documents([5, 3, 4, 2])
    sampler = PackingBatchSampler([5, 3, 4, 2], block_size=6, batch_size=2)

    def refuses(words: str, collate: Any, sampler: PackingBatchSampler = sampler) -> None:
        with pytest.raises(ConfigurationError, match=words + r".*DataLoader\(\*\*packed\(dataset, sampler\)"):
            asyncloader.DataLoader(rows, batch_sampler=sampler, collate_fn=collate)

    refuses("needs a collate_fn that packs", None)
    refuses("has block_size=6, and pack_collate block_size=7", partial(pack_collate, block_size=7))
    refuses("has block_size=6, and pack_collate block_size=None", pack_collate)
    refuses("has batch_size=2, and pack_collate batch_size=3", partial(pack_collate, block_size=6, batch_size=3))
    cuts = PackingBatchSampler([5, 3, 4, 2], block_size=4, too_long="cut")
    refuses("has too_long='cut', and pack_collate too_long='raise'", partial(pack_collate, block_size=4), cuts)
    for fits in (list, partial(pack_collate, block_size=6), partial(pack_collate, block_size=6, batch_size=2)):
        asyncloader.DataLoader(rows, batch_sampler=sampler, collate_fn=fits)
