"""Memory of dropped batches is used again in the trainer's process, and never while somebody may look at it."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from asyncloader.transport.collate import recycling_collate
from asyncloader.transport.recycle import RECYCLED_MIN, Recycler
from tests.support import inside
from tests.support.forks import forked

SHAPE = (64, 64, 80)  # 4 samples are 5 MiB


def samples(value: float, num: int = 4) -> list[torch.Tensor]:
    return [torch.full(SHAPE, value) for _ in range(num)]


def test_what_is_not_torchs_default_is_left_alone() -> None:
    """A user's function is called as it is."""

    def mine(batch: object) -> object:
        return batch

    assert recycling_collate(mine) is mine


def test_memory_of_a_dropped_batch_is_used_again() -> None:
    """The next batch lies where the last one lay; not while a view of that is alive."""
    collate = recycling_collate(default_collate)
    batch = collate(samples(1.0))
    address = batch.data_ptr()
    view = batch[1:].numpy()
    del batch
    assert collate(samples(2.0)).data_ptr() != address
    del view
    batch = collate(samples(3.0))
    assert batch.data_ptr() == address
    assert torch.equal(batch, default_collate(samples(3.0)))


@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_an_array_of_a_batch_that_moved_stays_as_it_is(kind: Any) -> None:
    """`share_memory_` takes the batch elsewhere; its old memory is not used again while somebody looks at it."""
    collate = recycling_collate(default_collate)
    batch = collate([kind(SHAPE)] * 4)
    array = batch.numpy()
    batch.share_memory_()
    del batch
    others = [collate([kind(SHAPE) * 2] * 4) for _ in range(3)]
    assert (array == 1).all()
    del others


def test_kept_batches_stay_as_they_are() -> None:
    """Whoever keeps all batches has all batches."""
    collate = recycling_collate(default_collate)
    kept = [collate(samples(float(i))) for i in range(20)]
    assert all(bool((batch == i).all()) for i, batch in enumerate(kept))


def test_batches_outlive_the_loader() -> None:
    """The memory goes with the last of them."""
    collate = recycling_collate(default_collate)
    batch = collate(samples(5.0))
    del collate
    gc.collect()
    assert bool((batch == 5).all())


def test_small_batches_and_odd_ones_are_torchs() -> None:
    """Below the threshold, of several dtypes, requiring grad: the same as default_collate."""
    collate = recycling_collate(default_collate)
    assert torch.equal(collate([1, 2]), torch.tensor([1, 2]))
    mixed = [torch.ones(SHAPE), torch.ones(SHAPE, dtype=torch.float64)]
    assert collate(mixed).dtype == default_collate(mixed).dtype == torch.float64
    assert collate([torch.ones(SHAPE, requires_grad=True)] * 2).requires_grad
    with pytest.raises(RuntimeError, match="equal size"):
        collate([torch.ones(SHAPE), torch.ones(SHAPE)[1:]])


def test_the_users_own_map_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions to torch's map count, also those made later."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    collate = recycling_collate(default_collate)
    monkeypatch.setitem(default_collate_fn_map, complex, lambda batch, *, collate_fn_map=None: "complex")
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map=None: "tensor")
    assert collate([(1j, torch.ones(2), np.ones(2))] * 2) == ["complex", "tensor", "tensor"]


def test_what_is_not_needed_any_more_is_freed() -> None:
    """Blocks that some batches did not use go."""
    recycler = Recycler()
    for size in (8, 4, 2):
        for _ in range(6):
            recycler.begin_batch()
            held = [recycler.allocate(size << 20) for _ in range(size)]
            del held
    assert inside.free_bytes(recycler) == 4 << 20


def test_random_sizes_do_not_grow() -> None:
    """At most the blocks of the last few batches wait."""
    recycler = Recycler()
    chance = random.Random(0)
    for _ in range(1000):
        recycler.begin_batch()
        recycler.allocate(chance.randrange(RECYCLED_MIN, 4 << 20))
        assert inside.free_bytes(recycler) <= 6 * 1.25 * (4 << 20)


def test_many_threads_share_a_loader() -> None:
    """Each batch is right while four threads collate, keep and drop."""
    collate = recycling_collate(default_collate)
    wrong: list[float] = []

    def work(first: int) -> None:
        held: list[tuple[float, torch.Tensor]] = []
        for i in range(60):
            value = float(first * 1000 + i)
            held.append((value, collate(samples(value, 1 + i % 3))))
            if len(held) > 2:
                old, batch = held.pop(0)
                wrong.extend([old] * (not bool((batch == old).all())))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_goes_on() -> None:
    """Child and parent have their own copies from the fork on."""
    collate = recycling_collate(default_collate)
    batch = collate(samples(1.0))

    def collate_here() -> bool:
        nonlocal batch
        torch.set_num_threads(1)
        del batch
        mine = [collate(samples(float(i))).numpy() for i in range(3)]
        return all((a == i).all() for i, a in enumerate(mine))

    assert forked(collate_here).wait() == 0
    assert bool((batch == 1).all())
