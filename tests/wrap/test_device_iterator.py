"""Batches on their way to a device that is simulated: every order of its copies and of the program's steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import DataLoader, to_device
from asyncloader.errors import LoaderClosedError
from asyncloader.transport.recycle import Recycler
from asyncloader.wrap.device_iterator import DeviceIterator
from tests.wrap.simulated import SimulatedDevice


def on_device(iterator: Any, device: SimulatedDevice, prefetch: int) -> DeviceIterator:
    """Return an iterator over batches on a device."""
    return DeviceIterator(iterator, device, prefetch, None)


NBYTES = 1 << 14  # less than torch would use threads for


def in_recycled_memory(count: int) -> Iterator[torch.Tensor]:
    """Yield batches in memory that is used again as soon as it may be: batch i is full of i."""
    recycler = Recycler()
    for number in range(count):
        memory = recycler.allocate(NBYTES)
        assert memory is not None
        batch = torch.frombuffer(memory, dtype=torch.uint8)
        batch.fill_(number)
        del memory
        yield batch
        del batch


ORDER = st.lists(st.sampled_from(["next", "next", "copy", "copies", "step", "keep"]), min_size=8, max_size=60)


@given(depth=st.integers(0, 3), order=ORDER, count=st.integers(0, 30), closes=st.booleans())
def test_steps_read_what_was_sent_in_any_order(depth: int, order: list[str], count: int, closes: bool) -> None:
    """Whatever the device does first: no memory is used again before its copy, or its step."""
    device = SimulatedDevice()
    batches = on_device(in_recycled_memory(count), device, depth)
    seen: list[int] = []
    asked, kept, is_over = 0, [], False
    for action in order:
        if action == "copy":
            device.copies.advance()
        elif action == "copies":
            while device.copies.advance():
                pass
        elif action == "step":
            device.steps.advance()
        elif not is_over:
            try:
                batch = next(batches)
            except StopIteration:
                is_over = True
                continue
            device.step(batch, lambda tensors: seen.append(read(tensors[0])))
            asked += 1
            if action == "keep":
                kept.append(batch)
            del batch
    if closes:
        batches.close()
    del batches
    device.run()
    assert seen == list(range(asked))
    assert device.faults == []
    assert device.most <= 2 + 2 * depth + len(kept)
    for batch in kept:
        device.step(batch, lambda tensors: seen.append(read(tensors[0])))
    device.run()
    device.sweep()
    assert len(seen) == asked + len(kept)


def read(tensor: torch.Tensor) -> int:
    """Return the number that a batch is full of; -1 if it has several."""
    first = int(tensor[0])
    return first if bool((tensor == first).all()) else -1


class OwnWay:
    """A type of a user's that moves itself.

    Args:
        tensor: In it.
        copy: Copies a tensor to the device.
        raises: It raises when its copy has begun.
    """

    def __init__(self, tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor], *, raises: bool) -> None:
        self.tensor = tensor
        self._copy = copy
        self._raises = raises

    def to(self, device: torch.device) -> OwnWay:
        moved = OwnWay(self._copy(self.tensor), self._copy, raises=False)
        if self._raises:
            raise ZeroDivisionError(device)
        return moved


RAISED = {"is odd": TypeError, "raises in to": ZeroDivisionError, "raises": OSError}
PARTS = ["tensor", "dict", "shares", "own way", *RAISED]


class Scripted:
    """An iterator whose batches are as a script says: batch i is full of i. It goes on after an error.

    Attributes:
        asked: How many times it was asked for a batch.
        is_closed: A generator of its batches has ended.
    """

    def __init__(self, script: list[str], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._script = script
        self._copy = copy
        self._shared = torch.zeros(4)
        self.asked = 0
        self.is_closed = False

    def __iter__(self) -> Scripted:
        return self

    def __next__(self) -> Any:
        if self.asked >= len(self._script):
            raise StopIteration
        part = self._script[self.asked]
        number = torch.full((4,), float(self.asked))
        self.asked += 1
        if part == "raises":
            raise OSError(self.asked)
        if part in ("own way", "raises in to"):
            return OwnWay(number, self._copy, raises=part != "own way")
        more: Any = {"dict": [], "shares": self._shared, "is odd": {torch.ones(1)}}
        return number if part == "tensor" else {"more": more[part], "number": number}

    def generator(self) -> Iterator[Any]:
        """Yield the batches; the first error ends it."""
        try:
            yield from self
        finally:
            self.is_closed = True

    async def later(self) -> AsyncIterator[Any]:
        """Yield them asynchronously."""
        try:
            for batch in self:
                await asyncio.sleep(0)
                yield batch
        finally:
            self.is_closed = True

    def expected(self, *, ends: bool) -> list[Any]:
        """Return what a program is to see: the numbers of batches, and errors in their places."""
        script = self._script
        if ends and "raises" in script:
            script = script[: script.index("raises") + 1]
        return [RAISED.get(part, number) for number, part in enumerate(script)]


def take(iterator: Any, runner: asyncio.Runner) -> Any:
    """Take a batch, in a loop if that is how it comes; return the error in its place, or StopIteration at the end."""

    async def taken() -> Any:
        return await anext(iterator)

    try:
        return runner.run(taken()) if hasattr(iterator._inner, "__anext__") else next(iterator)
    except (StopIteration, StopAsyncIteration):
        return StopIteration
    except Exception as error:
        return type(error)


@given(
    kind=st.sampled_from(["iterator", "generator", "later"]),
    script=st.lists(st.sampled_from(PARTS), max_size=10),
    depth=st.integers(0, 4),
    order=st.lists(st.sampled_from(["next", "next", "copy", "copies", "step"]), max_size=40),
    closes=st.booleans(),
)
def test_any_iterable_in_any_order(kind: str, script: list[str], depth: int, order: list[str], closes: bool) -> None:
    """What a loop over the iterable itself sees comes in its place, and memory stays for all copies that have begun."""
    device = SimulatedDevice()
    made = Scripted(script, device.copy)
    expected = made.expected(ends=kind != "iterator")
    seen: list[int] = []
    wanted: list[int] = []
    with asyncio.Runner() as runner:
        iterator = on_device(made if kind == "iterator" else getattr(made, kind)(), device, depth)
        taken = 0
        for action in order:
            if action == "next":
                batch = take(iterator, runner)
                assert made.asked <= taken + 1 + depth
                of_place = expected[taken] if taken < len(expected) else StopIteration
                taken += 1
                if isinstance(of_place, int):
                    number = batch["number"] if isinstance(batch, dict) else getattr(batch, "tensor", batch)
                    device.step(number, lambda tensors: seen.append(read(tensors[0])))
                    wanted.append(of_place)
                    del number
                else:
                    assert batch is of_place
                del batch
            elif action == "step":
                device.steps.advance()
            else:
                while device.copies.advance() and action == "copies":
                    pass
        if closes:
            runner.run(iterator.aclose()) if kind == "later" else iterator.close()
            assert take(iterator, runner) in (LoaderClosedError, StopIteration)  # which it was told before
            assert made.is_closed or not made.asked or kind == "iterator"
        del iterator
        # An error that nobody has taken refers to the frames that it came through, and they to the iterator.
        assert made.is_closed or not made.asked or kind != "generator" or RAISED.keys() & set(script)
    device.run()
    assert seen == wanted
    assert device.faults == []


def test_the_next_batch_is_copied_before_the_step_on_this_one_is_asked_for() -> None:
    """So the device does both at once; and no thread waits for anything."""
    device = SimulatedDevice()
    batches = on_device(iter([torch.full((4,), float(i)) for i in range(4)]), device, 1)
    next(batches)
    assert len(device.blocks) == 2
    while device.copies.advance():
        pass
    assert [float(block.memory[3]) for block in device.blocks] == [0.0, 63.0]  # 1.0, as a float's last byte
    assert device.blocked == 0


def test_programs_that_ask_for_steps_faster_than_the_device_does_them_wait() -> None:
    """Otherwise batches would fill the device."""
    device = SimulatedDevice()
    for batch in on_device(iter([torch.full((4,), float(i)) for i in range(50)]), device, 1):
        device.step(batch, lambda tensors: None)
        del batch
    assert device.blocked >= 40
    assert device.most <= 4
    device.run()


async def test_waiting_for_steps_does_not_block_the_loop() -> None:
    """The thread of the loop never waits for the device."""
    device = SimulatedDevice()

    async def batches() -> AsyncIterator[torch.Tensor]:
        for number in range(20):
            yield torch.full((4,), float(number))

    seen: list[float] = []
    async for batch in to_device(batches(), device):  # type: ignore[arg-type]
        device.step(batch, lambda tensors: seen.append(float(tensors[0][0])))
        del batch
    device.run()
    assert seen == [float(number) for number in range(20)]
    assert device.blocked
    assert "MainThread" in device.threads  # which asks for copies
    assert len(device.threads) > 1


def test_any_iterable_can_be_iterated_over_again() -> None:
    """As often as that allows; it has the length of that."""
    device = SimulatedDevice()
    batches = to_device([torch.ones(2), torch.zeros(2)], device)  # type: ignore[arg-type]
    assert len(batches) == 2
    for _ in range(3):
        seen: list[float] = []
        for batch in batches:
            device.step(batch, lambda tensors, seen=seen: seen.append(float(tensors[0][0])))  # type: ignore[misc]
        device.run()
        assert seen == [1.0, 0.0]


def test_an_iterable_that_raises_does_so_in_its_turn() -> None:
    """After the batches before, which were sent ahead; and it is asked on then, as it would have been."""

    def batches() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        yield torch.ones(1)
        raise OSError("the end of the tape")

    device = SimulatedDevice()
    iterator = on_device(batches(), device, 3)
    assert len(next(iterator)) == len(next(iterator)) == 1
    with pytest.raises(OSError, match="the end of the tape"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    device.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_batch_that_cannot_be_moved_is_an_error_in_its_place(depth: int) -> None:
    """It names the type and where that is; the batches around it arrive."""
    device = SimulatedDevice()
    odd = {"pictures": torch.ones(2), "masks": [{torch.ones(1)}]}
    iterator = on_device(iter([torch.zeros(2), odd, torch.ones(2)]), device, depth)
    next(iterator)
    with pytest.raises(TypeError, match=r"a builtins\.set of the batch has tensors, and cannot be moved to"):
        next(iterator)
    assert next(iterator).shape == (2,)
    device.run()
    assert device.faults == []


class Interrupt(BaseException):
    """What a handler of a signal raises."""


@pytest.mark.covering(2)
@pytest.mark.parametrize("call", ["copy", "mark", "wait", "note_use", "sweep", "hand_over", "send"])
@pytest.mark.parametrize("at", [0, 1, 3, 5])
@pytest.mark.parametrize("source", ["any iterator", "a loader", "workers"])
def test_an_interrupt_anywhere_loses_no_batch(monkeypatch: pytest.MonkeyPatch, source: str, call: str, at: int) -> None:
    """Whatever call to the device it comes in: the next call of the program gets the batch that this one was to get."""
    device = SimulatedDevice()
    data = [torch.full((2,), float(i)) for i in range(6)]
    how: dict[str, Any] = {"num_workers": 1, "worker_backend": "thread"} if source == "workers" else {}
    loader: Any = data if source == "any iterator" else DataLoader(data, None, **how)  # type: ignore[arg-type]
    batches = to_device(loader, device, 1)  # type: ignore[arg-type]
    iterator = iter(batches)
    left = [at]
    as_it_was = getattr(device, call)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise Interrupt
        return as_it_was(*args, **kwargs)

    monkeypatch.setattr(device, call, interrupted)
    seen: list[float] = []
    interrupts = taken = 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Interrupt:
            interrupts += 1
            assert source == "any iterator" or batches.state_dict()["position"] == taken
            continue
        taken += 1
        assert source == "any iterator" or batches.state_dict()["position"] == taken
        device.step(batch, lambda tensors: seen.append(float(tensors[0][0])))
    device.run()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert device.faults == []
    assert interrupts == (left[0] < 0)


async def test_an_iterator_that_is_left_is_closed() -> None:
    """`close` and `aclose` reach the iterator, and let go of what copies read."""
    ended: list[str] = []

    def batches() -> Iterator[torch.Tensor]:
        with contextlib.ExitStack() as stack:
            stack.callback(ended.append, "batches")
            for number in range(9):
                yield torch.full((2,), float(number))

    device = SimulatedDevice()
    with on_device(batches(), device, 1) as iterator:
        next(iterator)
    assert ended == ["batches"]

    async def later() -> AsyncIterator[torch.Tensor]:
        try:
            for number in range(9):
                yield torch.full((2,), float(number))
        finally:
            ended.append("later")

    async with on_device(later(), device, 1) as iterator:
        await anext(iterator)
    assert ended == ["batches", "later"]
    await asyncio.sleep(0)
    device.run()
