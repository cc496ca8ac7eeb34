"""Slabs between a real worker and its parent: lent, leased, used again, given back, never lost, never written over."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils.data import default_collate

from asyncloader import DataLoader
from asyncloader.transport import arena, heap, slab
from asyncloader.transport.codec import Encoder
from asyncloader.transport.free_list import Region
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.tensors import Array
from asyncloader.transport.worker_heap import heap_for_a_worker
from asyncloader.worker import channel as worker_channel
from tests.support import effort, inside
from tests.support.effort import examples
from tests.support.forks import forked
from tests.support.patience import wait_until
from tests.transport.wire import Pool, Worker, bound, receive, worker

FLOATS = 1 << 18  # 1 MiB
MIB = 1 << 20


def large(number: int) -> torch.Tensor:
    return torch.full((FLOATS,), float(number))


def collated(number: int) -> torch.Tensor:
    return default_collate([torch.full((FLOATS // 4,), float(number))] * 4)


def large_and_label(number: int) -> dict[str, torch.Tensor]:
    return {"image": large(number), "label": torch.arange(64) + number}


def of_random_size(number: int) -> tuple[np.ndarray[Any, Any], int]:
    size = random.Random(number).randrange(1000, 4 * FLOATS)
    return np.full(size, number % 251, np.uint8), size


def two_views(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return collated(number).chunk(2)


def array_in_slab(number: int) -> np.ndarray[Any, Any]:
    return collated(number).numpy()


def end_of_an_array_in_slab(number: int) -> np.ndarray[Any, Any]:
    return default_collate([torch.full((FLOATS // 4,), float(number + row)) for row in range(4)]).numpy()[2:]


kept_in_worker: list[torch.Tensor] = []


def collated_and_kept(number: int) -> torch.Tensor:
    """What a collate_fn with a cache does: every fourth batch is the one of four batches ago, the same object."""
    if number >= 4:
        return kept_in_worker[number % 4]
    kept_in_worker.append(collated(number))
    return kept_in_worker[-1]


def collated_in_vain(number: int) -> Any:
    collated(number)
    if number % 2:
        raise KeyError(number)
    return number


def is_in_arena(pool: Pool, tensor: torch.Tensor) -> bool:
    memory = inside.arena(pool)
    return memory is not None and memory.base <= tensor.data_ptr() < memory.base + memory.size


def leased(pool: Pool) -> int:
    pool.drain()
    return pool.leased_bytes


def large_or_collated(number: int) -> torch.Tensor:
    return large(number) if number % 2 else collated(number)


def test_a_large_tensor_comes_in_a_slab(pool: Pool, start_method: str) -> None:
    """Its bytes are not in the payload, its values are right, it can be written, its storage is just as large."""
    with worker(pool, large_or_collated, start_method) as made:
        for number in range(10):
            batch = made.get(number)
            assert made.payload_bytes < 1000
            assert is_in_arena(pool, batch)
            assert torch.equal(batch.view(-1), large(number))
            batch.zero_()
            assert batch.untyped_storage().nbytes() == batch.nbytes
        del batch
    assert leased(pool) == 0


def test_memory_is_used_again(pool: Pool) -> None:
    """A consumer that drops its batches needs two slabs or three however many come."""
    with worker(pool, large) as made:
        made.get(0)
        made.send(1)
        made.send(2)
        for number in range(3, 200):
            made.receive()
            made.send(number)
        made.receive(), made.receive()
    assert pool.reserved_bytes <= 4 * 1.07 * MIB


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_worker_had_is_given_back(pool: Pool, is_killed: bool) -> None:
    """At its end, but for what is in use here, which is given back later; the workers after have its addresses."""
    kept = None
    for number in range(10):
        with worker(pool, large) as made:
            held = made.get(number)
            made.send(number)
            if is_killed:
                made.kill()
        assert pool.reserved_bytes <= (1 if kept is None else 2) * 1.07 * MIB
        kept = held
        del held
    assert kept is not None
    assert (kept == 9).all()
    del kept
    pool.drain()
    assert (pool.reserved_bytes, pool.leased_bytes) == (0, 0)
    assert os.fstat(inside.descriptor(inside.arena(pool))).st_blocks == 0


def test_batches_that_are_kept_stay_as_they_are(pool: Pool) -> None:
    """A program that keeps every batch has every batch."""
    with worker(pool, large) as made:
        kept = [made.get(number) for number in range(30)]
    for number, batch in enumerate(kept):
        assert torch.equal(batch, large(number))
    assert leased(pool) >= 30 * MIB
    del kept, batch
    assert leased(pool) == 0


def test_a_kept_label_holds_no_image(pool: Pool) -> None:
    """Small tensors do not travel in slabs."""
    with worker(pool, large_and_label) as made:
        kept = [made.get(number)["label"] for number in range(50)]
    assert leased(pool) == 0
    assert [int(label[0]) for label in kept] == list(range(50))
    assert pool.reserved_bytes <= 4 * 1.07 * MIB


def test_a_lease_ends_with_the_last_view(pool: Pool) -> None:
    """Views, arrays, and views of arrays hold the slab."""
    with worker(pool, large) as made:
        batch = made.get(3)
        view = batch[10:20].unsqueeze(0)
        array = view.numpy()[..., 1:]
        alias = memoryview(array)
        del batch, view, array
        assert leased(pool) > 0
        assert alias[0, 0] == 3.0
        del alias
        assert leased(pool) == 0


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda batch: batch.numpy(),
    "DLPack": np.from_dlpack,
    "torch by DLPack": torch.from_dlpack,
    "memoryview": lambda batch: memoryview(batch.view(-1).numpy()),
    "array protocol": np.asarray,
}
MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "share_memory_": lambda batch: batch.share_memory_(),
    "torch.multiprocessing": lambda batch: batch.untyped_storage()._share_fd_cpu_(),  # what its pickling does
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("move", MOVES)
def test_who_looks_at_a_batch_sees_it_unchanged_wherever_it_moves(pool: Pool, look: str, move: str) -> None:
    """A storage may move to other memory in place: a slab that arrays still show is not used again; then it is."""
    with worker(pool, large) as made:
        batch = made.get(3)
        there = LOOKS[look](batch)
        MOVES[move](batch)
        del batch
        for number in range(10, 20):
            made.get(number)
        assert (np.asarray(there) == 3).all()
        assert leased(pool) > 0
        del there
        assert leased(pool) == 0


def test_small_tensors_that_move_are_not_freed_under_somebodys_eyes(pool: Pool) -> None:
    """Their memory lives as long as anything shows it."""
    with worker(pool, lambda number: torch.full((1000,), number)) as made:
        batches = [made.get(number) for number in range(50)]
        arrays = [batch.numpy() for batch in batches]
        for batch in batches:
            batch.share_memory_()
        del batch, batches
        others = [bytearray(b"\xff" * 8000) for _ in range(200)]
        assert all((array == number).all() for number, array in enumerate(arrays))
        del others


def test_a_lease_ends_in_another_thread_and_in_a_cycle(pool: Pool) -> None:
    """Where and how the last reference goes makes no difference."""
    with worker(pool, large) as made:
        box = [made.get(0)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert leased(pool) == 0

        gc.disable()
        cycle: list[Any] = [made.get(1)]
        cycle.append(cycle)
        del cycle
        assert leased(pool) > 0
        gc.enable()
        gc.collect()
        assert leased(pool) == 0


def test_leases_end_in_many_threads_at_once(pool: Pool) -> None:
    """Batches are dropped by four threads while the loop thread lends and decodes; every value is right."""
    queue: deque[torch.Tensor] = deque()
    wrong: list[int] = []
    done = threading.Event()

    def consume() -> None:
        held: list[tuple[int, torch.Tensor]] = []
        while not done.is_set() or queue:
            try:
                batch = queue.popleft()
            except IndexError:
                time.sleep(0)
                continue
            held.append((int(batch[0]), batch))
            del batch
            if len(held) > 3:
                number, batch = held.pop(0)
                wrong.extend([number] * (not bool((batch == number).all())))
                del batch

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    with worker(pool, large) as made:
        made.send(0)
        for number in range(1, effort.examples(450)):
            made.send(number)
            queue.append(made.receive())
        made.receive()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert leased(pool) == 0


def test_views_of_one_tensor_come_in_one_slab(pool: Pool) -> None:
    """Two parts of what was collated in one slab are leased together."""
    with worker(pool, two_views) as made:
        first, second = made.get(7)
        assert torch.equal(torch.cat([first.view(-1), second.view(-1)]), large(7))
        assert is_in_arena(pool, first)
        del first
        assert leased(pool) > 0
        assert float(second[0, 0]) == 7.0
        del second
        assert leased(pool) == 0


def test_an_array_over_a_slab_is_not_copied(pool: Pool) -> None:
    """numpy's view of what was collated in a slab is described as well; it arrives writable."""
    with worker(pool, array_in_slab) as made:
        array = made.get(2)
        assert is_in_arena(pool, torch.from_numpy(array))
        array += 1
        assert (array == 3).all()
        del array


def test_a_part_of_an_array_over_a_slab_begins_where_it_began(pool: Pool) -> None:
    """What lies before it in the slab is not taken for it."""
    with worker(pool, end_of_an_array_in_slab) as made:
        array = made.get(5)
        assert is_in_arena(pool, torch.from_numpy(array))
        assert [set(row) for row in array.tolist()] == [{7.0}, {8.0}]
        del array


def test_what_a_worker_keeps_is_not_written_over(pool: Pool) -> None:
    """A collate_fn that caches what it collated in slabs finds it unchanged, and returns it again."""
    with worker(pool, collated_and_kept) as made:
        for number in range(60):
            batch = made.get(number)
            assert torch.equal(batch.view(-1), large(number % 4)), number
        del batch
    assert leased(pool) == 0


def test_what_is_collated_in_vain_is_used_again(pool: Pool) -> None:
    """A slab whose batch failed, or was not returned, serves the next one."""
    with worker(pool, collated_in_vain) as made:
        for number in range(60):
            if number % 2:
                with pytest.raises(KeyError):
                    made.get(number)
            else:
                assert made.get(number) == number
    assert pool.reserved_bytes <= 2 * 1.07 * MIB


def test_random_sizes_held_for_random_times(pool: Pool) -> None:
    """Memory does not grow past what is held and what is lent, nothing leaks, every byte is right."""
    chance = random.Random(0)
    held: dict[int, Any] = {}
    most = 0
    with worker(pool, of_random_size) as made:
        made.send(0)
        for number in range(1500):
            made.send(number + 1)
            array, size = made.receive()
            assert array.shape == (size,)
            held[number] = array
            del array
            for old in [n for n in held if chance.random() < 0.012]:
                assert (held.pop(old) == old % 251).all()
            most = max(most, sum(kept.nbytes for kept in held.values()))
            assert pool.reserved_bytes <= 1.3 * most + 24 * MIB
        made.receive()
    assert most > 45 * MIB
    for old, array in held.items():
        assert (array == old % 251).all()
    held.clear()
    del array
    assert leased(pool) == 0


def test_over_the_budget_batches_come_inline(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps more than the budget gets everything, and slabs again when memory is free again."""
    bound(monkeypatch, pool, 8 * MIB)
    with worker(pool, large) as made:
        kept = [made.get(number) for number in range(20)]
        assert pool.reserved_bytes <= 8 * MIB
        in_arena = [is_in_arena(pool, batch) for batch in kept]
        assert 4 <= sum(in_arena) <= 8
        assert not in_arena[-1]
        for number, batch in enumerate(kept):
            assert torch.equal(batch, large(number))
        del kept, batch
        assert is_in_arena(pool, made.get(0))


def sent_and_returned(owner: heap.Heap, count: int) -> None:
    """Send so many batches of 1 MiB, and have them back from the trainer."""
    batches = [owner.allocate(MIB) for _ in range(count)]
    offsets = [np.frombuffer(batch, np.uint8).ctypes.data - owner.arena.base for batch in batches if batch is not None]
    for offset in offsets:
        owner.send(offset)
    batches.clear()
    owner.returned(offsets)


def test_surplus_is_given_back_when_demand_falls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two periods in which less was used, what they did not use has gone, in small steps."""
    record = heap_for_a_worker(pool)
    owner = record.hand_over(1)
    assert owner is not None
    sent_and_returned(owner, 40)
    assert pool.reserved_bytes == 40 * MIB
    now = time.monotonic()
    for step in range(40):
        monkeypatch.setattr(heap, "monotonic", lambda at=now + step: at)
        sent_and_returned(owner, 1)
    assert pool.reserved_bytes < 12 * MIB
    record.reclaim()


def test_a_persistent_worker_that_waits_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two epochs; a batch that is held stays as it is, and the next epoch is as ever."""
    monkeypatch.setattr(worker_channel, "SILENCE_S", 0.2)
    pool, held = slab.slab_pool(), None
    before = pool.reserved_bytes
    samples = [torch.full((FLOATS,), float(number)) for number in range(16)]
    loader = DataLoader(samples, 1, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert (batch == number).all()
            held = batch if held is None else held
        del batch
        wait_until(lambda: pool.reserved_bytes - before < 2 * MIB)  # 1 MiB is in use, of some eight
        assert held is not None
        assert (held == 0).all()
    loader.close()


def test_memory_that_cannot_be_given_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes punch no holes: the next worker uses what is there."""
    monkeypatch.setattr(arena.Arena, "punch", lambda *args: False)
    for number in range(5):
        with worker(pool, large) as made:
            assert torch.equal(made.get(number), large(number))
        assert pool.reserved_bytes == MIB


def test_an_epoch_after_the_other_finds_its_memory(pool: Pool) -> None:
    """New workers for each epoch, with the last batch of the last one still in hand."""
    batch = None
    for _ in range(12):
        with worker(pool, large) as made:
            for number in range(5):
                batch = made.get(number)
    assert batch is not None
    assert pool.reserved_bytes <= 5 * 1.07 * MIB
    del batch


def test_the_loop_hears_of_a_lease_that_ends_while_nobody_uses_slabs(pool: Pool) -> None:
    """It would sleep on; but with a worker somebody comes by anyway."""
    loop = Mock()
    with worker(pool, large) as made:
        pool.loop = loop
        kept = [made.get(0), made.get(1)]
        kept.pop()
        loop.call_soon_threadsafe.assert_not_called()
    kept.clear()
    loop.call_soon_threadsafe.assert_called_once_with(pool.drain)


# --------------------------------------------------------------------------------------------------------- forks
@pytest.fixture
def process_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlabPool]:
    """The pool of the process for the time of a test: only that one is told of forks."""
    made = Pool()
    monkeypatch.setattr(slab, "_pools", {os.getpid(): made})
    yield made
    inside.arena(made).close()


def test_a_child_of_the_trainer_sees_its_batches_unchanged(process_pool: Pool) -> None:
    """What was leased at a fork is never used again; what the child drops changes nothing in the parent."""
    pool = process_pool
    with worker(pool, large) as made:
        batch = made.get(5)
        address = batch.data_ptr()
        go, child_has = os.pipe(), os.pipe()

        def look_again() -> bool:
            nonlocal batch
            os.read(go[0], 1)  # until the parent has dropped the batch and received others
            right = bool((batch.numpy() == 5).all())  # torch's threads are not in the child
            del batch
            return right and not inside.leases_ended(pool)

        child = forked(look_again)
        del batch
        for number in range(20):
            assert made.get(number).data_ptr() != address
        os.write(go[1], b"x")
        assert child.wait() == 0
    for fd in (*go, *child_has):
        os.close(fd)
    pool.drain()
    assert pool.leased_bytes == 0
    assert pool.reserved_bytes == pytest.approx(MIB, rel=0.1)  # the one that the child might still look at


@pytest.mark.parametrize("how", ["fork", "program"])
def test_what_a_child_might_look_at_is_used_again_when_it_has_ended(how: str) -> None:
    """Or when it runs another program: forks of a trainer that holds a batch do not add up.

    Of 1 MiB each there may be at once: the batch that is held, two that are ready, one in work, three on loan to the
    worker for the next ones, and those three that were held or ready at the latest fork; a few more, if the worker is
    ahead of this process. 30 forks would add up to more than 30.
    """
    before = slab.slab_pool().reserved_bytes
    iterator = iter(DataLoader([torch.zeros(FLOATS)] * 40, num_workers=1, max_buffered_bytes=0))
    reserved = []
    for _ in range(30):
        batch = next(iterator)
        if how == "fork":
            assert forked(lambda: True).wait() == 0
        else:
            subprocess.run(["true"], check=True, preexec_fn=os.getpid)
        wait_until(lambda: not inside.has_forks(slab.slab_pool()))  # the loop has heard of its end
        reserved.append(slab.slab_pool().reserved_bytes)
    del batch
    iterator.close()
    assert max(reserved) - before < 20 * MIB


def test_a_fork_with_nothing_on_lease_costs_nothing(process_pool: Pool) -> None:
    """Free regions are used again after a fork."""
    pool = process_pool
    with worker(pool, large) as made:
        for number in range(20):
            made.get(number)
            assert forked(lambda: True).wait() == 0
    pool.drain()
    assert pool.reserved_bytes == 0


def test_a_batch_that_comes_right_before_a_fork_is_unchanged_in_the_child(
    process_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has the slab, and what stands guard over it the address, of one that had ended."""
    pool, make_pipe = process_pool, os.pipe
    pool.loop = Mock()
    batches = [receive(pool, MIB)]
    hung_up: list[int] = []

    def pipe() -> tuple[int, int]:
        batches.append(receive(pool, MIB))  # the loop has a turn
        ends = make_pipe()
        hung_up.append(ends[0])
        return ends

    monkeypatch.setattr(os, "pipe", pipe)
    batches.clear()
    pool.before_fork()
    monkeypatch.undo()
    pool.after_fork()
    batches.clear()
    pool.drain()
    assert pool.reserved_bytes == MIB  # the child has it
    for fd in hung_up:
        os.close(fd)


def test_a_lease_that_ends_while_a_thread_is_about_to_fork(pool: Pool) -> None:
    """The loop may take it back after that thread has listed it, and before it is asked whether its tensors live."""
    memory = receive(pool, MIB)
    (lease,) = inside.leases(pool)
    assert lease() is not None
    del memory
    pool.drain()
    assert lease() is None


def test_a_handler_that_raises_before_a_fork_uncovers_no_batch(
    process_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes down what the hook raises, and forks."""
    pool = process_pool
    pool.loop = Mock()
    batch = receive(pool, MIB)
    monkeypatch.setattr(os, "pipe", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pool.before_fork()
    pool.after_fork()
    del batch
    pool.drain()
    assert pool.reserved_bytes == MIB  # the child has it


def test_a_pool_that_is_made_while_a_thread_forks(process_pool: Pool) -> None:
    """Another thread makes it, between the hooks. Whether the child has what was leased is not known."""
    pool = process_pool
    pool.loop = Mock()
    batch = receive(pool, MIB)
    pool.after_fork()
    del batch
    pool.drain()
    assert pool.reserved_bytes == MIB


def test_a_worker_forked_while_batches_are_on_lease(process_pool: Pool) -> None:
    """They are not used again before that worker, and what it has forked in turn, have ended; then they are."""
    pool = process_pool
    loop = pool.loop = Mock(call_soon_threadsafe=lambda call, *args: call(*args))
    with worker(pool, large) as first:
        batch = first.get(1)
        address = batch.data_ptr()
        with worker(pool, large) as second:
            del batch
            addresses = {second.get(number).data_ptr() for number in range(10)}
            addresses |= {first.get(number).data_ptr() for number in range(10)}
            assert address not in addresses
    ((reading, on_ended, fork),) = [call.args for call in loop.add_reader.call_args_list]
    assert os.read(reading, 1) == b""  # it has hung up
    on_ended(fork)
    pool.drain()
    assert pool.reserved_bytes == 0


def collated_beside_a_child(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collates twice, and a process that it forks does as well, in between and afterwards."""

    def collate() -> bool:
        return float(default_collate([torch.full((FLOATS,), -1.0)] * 2)[0, 0]) == -1

    first, child = default_collate(samples), forked(collate)
    second = default_collate(samples)
    assert child.wait() == 0
    return first, second


def test_a_child_of_a_worker_writes_to_none_of_its_slabs() -> None:
    """A collate function may fork: the child has a copy of the worker's heap, and not the heap."""
    samples = [torch.full((FLOATS,), float(number)) for number in range(6)]
    for number, batches in enumerate(DataLoader(samples, 2, num_workers=1, collate_fn=collated_beside_a_child)):
        for batch in batches:
            assert (batch[0] == 2 * number).all()
            assert (batch[1] == 2 * number + 1).all()


watching: list[tuple[Any, int]] = []
"""In a worker: its children, and the ends of pipes that tell each to look."""


def collated_for_a_child(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate, and fork a process that looks at the batch much later; with the last batch, say what they have seen."""
    batch, wanted = default_collate(samples), samples[0][0].item()
    reading, writing = os.pipe()
    watching.append((forked(lambda: os.read(reading, 1) == b"x" and bool((batch.numpy() == wanted).all())), writing))
    if wanted < 11:
        return batch
    for _, end in watching:
        os.write(end, b"x")
    return torch.tensor([child.wait() for child, _ in watching])


def test_a_child_of_a_worker_sees_the_batches_of_that_moment() -> None:
    """The worker goes on in other memory, also when the trainer has returned that batch."""
    samples = [torch.full((FLOATS,), float(number // 2)) for number in range(24)]
    *batches, seen = map(torch.clone, DataLoader(samples, 2, num_workers=1, collate_fn=collated_for_a_child))
    assert [batch[0, 0].item() for batch in batches] == [*range(11)]
    assert seen.tolist() == [0] * 12


def test_a_child_has_a_pool_of_its_own() -> None:
    """And it works there."""

    def check() -> bool:
        child_pool = slab.slab_pool()
        with worker(child_pool, large) as made:
            batch = made.get(4)
            return child_pool is not parent_pool and is_in_arena(child_pool, batch) and float(batch[-1]) == 4

    parent_pool = slab.slab_pool()
    assert forked(check).wait() == 0


# ----------------------------------------------------------------------------------------------------- fall-backs
def test_without_any_arena_everything_comes_inline() -> None:
    """No descriptor to be had, or no address space: slower, and that is all."""
    pool = Pool(create_arena=lambda size: None)
    with worker(pool, large_and_label) as made:
        batch = made.get(1)
        assert torch.equal(batch["image"], large(1))
        batch["image"].zero_()
    assert (pool.reserved_bytes, pool.leased_bytes) == (0, 0)


def test_a_region_without_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot reserve goes inline, and leaves the parent alone for a while."""
    monkeypatch.setattr(arena.Arena, "reserve", lambda self, offset, length: False)
    pool = Pool()
    with worker(pool, large) as made:
        for number in range(20):
            batch = made.get(number)
            assert torch.equal(batch, large(number))
            assert not is_in_arena(pool, batch)
    pool.close()


def test_a_payload_that_names_a_slab_of_somebody_else(pool: Pool) -> None:
    """Or one that the trainer has not let go of yet: an error, and not the wrong data."""
    with worker(pool, large) as made:
        made.get(0)
        made.send(1)
        payload = made._connection.recv()[1]
        other = heap_for_a_worker(pool)
        with pytest.raises(LookupError, match="not this worker's"):
            other.decode(payload)
        batch = made.heap.decode(payload)
        with pytest.raises(LookupError, match="not this worker's"):
            made.heap.decode(payload)
        other.reclaim()
        del batch
    assert leased(pool) == 0


def test_workers_one_after_the_other_and_side_by_side(pool: Pool) -> None:
    """Three workers share the pool, one is killed in the middle of things and replaced."""
    workers = [Worker(pool, large_and_label) for _ in range(3)]
    for number in range(24):
        for made in workers:
            made.send(number)
        if number == 12:
            workers[1].kill()
            workers[1] = Worker(pool, large_and_label)
            workers[1].send(number)
        for made in workers:
            assert bool((made.receive()["image"] == number).all())
    for made in workers:
        made.close()
    assert leased(pool) == 0
    assert pool.reserved_bytes <= 14 * MIB


def test_forks_while_batches_come_and_go(process_pool: Pool) -> None:
    """Whenever a child is forked, what it has of the trainer's batches stays as it was, while the parent goes on."""
    pool = process_pool
    current: deque[tuple[int, torch.Tensor]] = deque(maxlen=3)
    done = threading.Event()

    def go_on(made: Worker) -> None:
        number = 0
        while not done.is_set():
            current.append((number, made.get(number)))
            number += 1

    def check() -> bool:
        held = [(number, batch.numpy()) for number, batch in current]
        return all((array == number).all() for _ in range(20) for number, array in held)

    with worker(pool, large) as made:
        thread = threading.Thread(target=go_on, args=(made,))
        thread.start()
        right = [forked(check).wait() == 0 for _ in range(effort.examples(21))]
        done.set()
        thread.join()
    current.clear()
    assert all(right)
    assert leased(pool) == 0


# ------------------------------------------------------------------------------------------------- who may write where
class Player:
    """A worker in this process: its heap, and the messages between it and the parent that have not been read."""

    def __init__(self, pool: Pool, num_workers: int) -> None:
        self.record = heap_for_a_worker(pool)
        heap = self.record.hand_over(num_workers)
        assert heap is not None
        self.heap = copy.deepcopy(heap, {id(heap.arena): heap.arena})  # as another process has it
        self.encoder = Encoder(self.heap)
        self.payloads: list[tuple[int, bytes]] = []
        self.returned: list[list[int]] = []
        self.kept: list[tuple[int, Array]] = []
        self.views: list[tuple[int, int, int]] = []  # what its process has of the parent's batches, if it is a fork
        self.forks: list[Any] = []  # the fork itself, for as long as it has some


def stamp(array: Array, number: int) -> None:
    array[:8] = array[-8:] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)


def view_of(number: int, array: Array) -> tuple[int, int, int]:
    return number, array.ctypes.data, array.nbytes


class Owners(RuleBasedStateMachine):
    """Workers make batches, keep some, end, are killed and followed by others; the parent receives, drops and forks.

    Messages are read late or never. Whatever happens in whichever order: a batch that the parent, a fork of it or a
    worker looks at stays as it is, and each byte of a heap has one place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(heap, "monotonic", lambda: self.now)
        self.pool = Pool()
        bound(self.patch, self.pool, 48 * MIB)
        self.loop = Mock(call_soon_threadsafe=lambda call, *args: call(*args))
        self.pool.loop = self.loop
        self.workers: list[Player] = []
        self.held: list[tuple[int, Array]] = []
        self.forks: list[tuple[Any, list[tuple[int, int, int]]]] = []
        self.count = 0

    def number(self) -> int:
        self.count += 1
        return self.count

    def views(self) -> list[tuple[int, int, int]]:
        """What a fork has of the trainer's batches, but for those of which it has a copy."""
        there = inside.arena(self.pool)
        return [view_of(*each) for each in self.held if 0 <= each[1].ctypes.data - there.base < there.size]

    @precondition(lambda self: len(self.workers) < 3)
    @rule(is_forked=st.booleans())
    def start(self, is_forked: bool) -> None:
        made = Player(self.pool, 3)
        if is_forked:
            made.views, made.forks = self.forked(is_dropped=False)
        self.workers.append(made)

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        nbytes=st.sampled_from([MIB, MIB, MIB, 9 * MIB]),
        is_collated=st.booleans(),
        is_kept=st.booleans(),
        is_sent=st.sampled_from([True, True, True, False]),
        is_received=st.booleans(),
    )
    def make(
        self, data: st.DataObject, nbytes: int, is_collated: bool, is_kept: bool, is_sent: bool, is_received: bool
    ) -> None:
        made = self.worker(data)
        number = self.number()
        with made.encoder:
            memory = made.encoder.allocate(nbytes) if is_collated else None
        array = np.ndarray((nbytes,), np.uint8, memory)
        stamp(array, number)
        if is_sent:
            made.payloads.append((number, b"".join(map(bytes, made.encoder.encode([array, array[100:]])))))
        if is_kept:
            made.kept.append((number, array))
        while is_received and made.payloads:
            self.decode(made, is_wanted=True)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """A batch that the worker has kept, and may have sent before."""
        made = self.worker(data)
        for number, array in made.kept[-1:]:
            made.payloads.append((number, b"".join(map(bytes, made.encoder.encode([array, array[100:]])))))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        del self.worker(data).kept[:-2]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_wanted=st.booleans())
    def receive(self, data: st.DataObject, is_wanted: bool) -> None:
        made = self.worker(data)
        if made.payloads:
            self.decode(made, is_wanted)

    def decode(self, made: Player, is_wanted: bool) -> None:
        number, payload = made.payloads.pop(0)
        batch = made.record.decode(payload)[0]
        if is_wanted:
            self.held.append((number, batch[0]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_all=st.booleans())
    def drop(self, data: st.DataObject, is_all: bool) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        del self.held[slice(None) if is_all else slice(at, at + 1)]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_read=st.sampled_from([True, True, True, False]))
    def send_tickets(self, data: st.DataObject, is_read: bool) -> None:
        made = self.worker(data)
        made.returned.append(made.record.returned())
        while is_read and made.returned:
            made.heap.returned(made.returned.pop(0))

    @rule()
    def come_round(self) -> None:
        """All is received, dropped and returned: the next batches are made in memory that was used."""
        for made in self.workers:
            while made.payloads:
                self.decode(made, is_wanted=True)
        self.held.clear()
        for made in self.workers:
            made.returned.append(made.record.returned())
            while made.returned:
                made.heap.returned(made.returned.pop(0))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_killed=st.booleans(), num_read=st.integers(0, 3))
    def end(self, data: st.DataObject, is_killed: bool, num_read: int) -> None:
        made = self.worker(data)
        self.workers.remove(made)
        if not is_killed:
            made.heap.trim()
        while made.payloads and (not is_killed or num_read):
            num_read -= 1
            self.decode(made, is_wanted=bool(num_read % 2))
        made.record.reclaim()
        for fork in made.forks:
            self.pool._on_fork_ended(fork)

    @precondition(lambda self: len(self.forks) < 3)
    @rule(is_dropped=st.booleans())
    def fork(self, is_dropped: bool) -> None:
        """In the child are all batches of that moment, whatever other threads do before and after."""
        views, forks = self.forked(is_dropped=is_dropped)
        self.forks += [(fork, views) for fork in forks]

    def forked(self, *, is_dropped: bool) -> tuple[list[tuple[int, int, int]], list[Any]]:
        """Fork; return what the child has of the batches here, and what tells its end."""
        self.loop.add_reader.reset_mock()
        self.pool.before_fork()
        views = self.views()
        if is_dropped:
            del self.held[:1]
            self.pool.drain()
        self.pool.after_fork()
        return views, [call.args[2] for call in self.loop.add_reader.call_args_list]

    @precondition(lambda self: self.forks)
    @rule()
    def end_fork(self) -> None:
        self.pool._on_fork_ended(self.forks.pop(0)[0])

    @rule(seconds=st.sampled_from([0.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def drain(self) -> None:
        self.pool.drain()

    def worker(self, data: st.DataObject) -> Player:
        return self.workers[data.draw(st.integers(0, len(self.workers) - 1))]

    @invariant()
    def nothing_is_written_over(self) -> None:
        seen = [view_of(*each) for each in self.held]
        for made in self.workers:
            seen += made.views + [view_of(*each) for each in made.kept]
        for _, views in self.forks:
            seen += views
        for number, address, nbytes in seen:
            for at in (address, address + nbytes - 8):
                assert ctypes.string_at(at, 8) == number.to_bytes(8, "little")

    @invariant()
    def each_byte_has_one_place(self) -> None:
        for made in self.workers:
            first, length, sent = made.record._first, made.record._length, made.record._sent
            places = sorted([*made.heap.regions(), made.heap._cold, Region(first + length, 0)])
            assert places[0].offset >= first
            assert all(one.offset + one.capacity <= two.offset for one, two in pairwise(places))
            assert sent.keys() <= made.heap._sent.keys()
        for record in self.pool.ownerless:
            used = record._sent.values()
            assert all(one.offset + one.capacity <= two.offset for one, two in pairwise(sorted(used, key=OFFSET)))

    def teardown(self) -> None:
        self.held.clear()
        while self.forks:
            self.end_fork()
        while self.workers:
            made = self.workers.pop()
            made.payloads.clear()
            made.record.reclaim()
            for fork in made.forks:
                self.pool._on_fork_ended(fork)
        self.pool.close()
        self.patch.undo()


OFFSET = attrgetter("offset")
Owners.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
TestOwners = Owners.TestCase
