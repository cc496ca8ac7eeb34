"""A device that is not there: copies that happen when a test says so, or when somebody waits for them.

    stream of the copies:  copy 7 │ mark 7 │ copy 8 │ mark 8        `advance` does the first thing in a stream,
    the program's stream:  step 6 │ wait for mark 7 │ step 7         if that waits for no mark that has not passed

As on a device, a copy reads the memory of the host when it happens; the memory on the device is used again as soon as
nothing refers to it, unless another stream was noted with it; and a step computes when it is its turn. What a program
gets wrong is therefore seen in what steps read, or is in `faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from asyncloader.wrap.device import StreamDevice
from asyncloader.wrap.moving import tensors_in


class SimulatedMark:
    """A place in a stream."""

    def __init__(self, device: SimulatedDevice, passed: bool) -> None:
        self._device = weakref.ref(device)
        self.passed = passed

    def passes(self) -> bool:
        self.passed = True
        return True

    def query(self) -> bool:
        self.check()
        return self.passed

    def synchronize(self) -> None:
        device = self.check()
        device.blocked += not self.passed
        while not self.passed:
            assert device.advance_any(), "nobody ends this wait"

    def check(self) -> SimulatedDevice:
        device = self._device()
        assert device is not None
        device.check()
        return device


class Stream:
    """What a device is asked for, in order."""

    def __init__(self) -> None:
        self.asked: deque[Callable[[], bool]] = deque()  # each does it, and says whether it could
        self._advancing = threading.RLock()  # several threads may wait for marks

    def advance(self) -> bool:
        with self._advancing:
            if not self.asked or not self.asked[0]():
                return False
            self.asked.popleft()
            return True


class Block:
    """Memory on the device."""

    def __init__(self, nbytes: int) -> None:
        self.memory = (ctypes.c_ubyte * nbytes)()
        self.address = ctypes.addressof(self.memory)
        self.noted: set[Stream] = set()
        self.is_free = False


class SimulatedDevice(StreamDevice):
    """A device on which nothing happens by itself.

    Attributes:
        faults: What a real device would have got wrong without a word.
        blocked: How often a thread was blocked until a mark had passed.
        pids: Processes that have used it.
        threads: Names of threads that have.
        most: How many bytes programs had on the device at most.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies, self.steps = Stream(), Stream()
        self._current = threading.local()
        self.faults: list[str] = []
        self.blocked = self.most = 0
        self.pids: set[int] = set()
        self.threads: set[str] = set()
        self.generator = torch.Generator()
        self.blocks: list[Block] = []
        self._waiting: list[tuple[Block, list[SimulatedMark]]] = []

    def check(self) -> None:
        self.pids.add(os.getpid())
        self.threads.add(threading.current_thread().name)

    # --------------------------------------------------------------------------------------------- what it does

    def advance_any(self) -> bool:
        """Do something, if there is something to be done that can be."""
        return self.steps.advance() or self.copies.advance()

    def run(self) -> None:
        """Do all that was asked for."""
        while self.advance_any():
            pass
        assert not self.steps.asked
        assert not self.copies.asked

    def step(self, batch: Any, see: Callable[[Any], object]) -> None:
        """Ask for a step, in which a program computes with a batch. The program need not keep the batch until then."""
        found = [batch] if isinstance(batch, torch.Tensor) else tensors_in(batch)
        tensors = [(each.data_ptr(), each.shape, each.dtype) for each in found]

        def compute() -> bool:
            see([_at(*each) for each in tensors])
            return True

        self.steps.asked.append(compute)

    @property
    def on_device(self) -> int:
        """How many blocks of memory programs have at the moment, those that steps have yet to read included."""
        self._take_back()
        return sum(not block.is_free for block in self.blocks)

    # ------------------------------------------------------------------------------------- in the place of torch

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return (self.generator,)

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.steps)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.check()
        before = self.current
        self._current.stream = self.copies
        try:
            yield
        finally:
            self._current.stream = before

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check()
        return self.asked_for(tensor, lambda source: source)

    def asked_for(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a tensor on the device, which has its contents when the current stream comes to that."""
        stream, source, sample = self.current, weakref.ref(tensor), make(torch.zeros_like(tensor))
        shape, dtype = sample.shape, sample.dtype
        on_device = self.block_of(tensor)
        where = tensor.data_ptr(), tensor.shape, tensor.dtype
        block, made = self._allocate(sample)

        def copy() -> bool:
            if on_device is not None:
                _at(block.address, shape, dtype).copy_(make(_at(*where)))
            elif (there := source()) is None:
                self.faults.append("memory of the host was let go of before the copy from it")
            else:
                _at(block.address, shape, dtype).copy_(make(there))
            return True

        stream.asked.append(copy)
        return made

    def mark(self) -> SimulatedMark:
        self.check()
        stream = self.current
        mark = SimulatedMark(self, passed=not stream.asked)
        if not mark.passed:
            stream.asked.append(mark.passes)
        return mark

    def wait(self, mark: Any) -> None:
        self.check()
        self.current.asked.append(lambda: mark.passed)

    def note_use(self, data: Any) -> None:
        self.check()
        if not isinstance(data, torch.Tensor):
            data.record_stream(self.current)
        elif (block := self.block_of(data)) is not None:
            block.noted.add(self.current)

    # ------------------------------------------------------------------------------------------------- its memory

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the memory that a tensor has on the device; None for one of the host."""
        at = tensor.data_ptr()
        return next((each for each in self.blocks if each.address <= at < each.address + len(each.memory)), None)

    def _allocate(self, like: torch.Tensor) -> tuple[Block, torch.Tensor]:
        self._take_back()
        nbytes = max(1, like.nbytes)
        block = next((each for each in reversed(self.blocks) if each.is_free and len(each.memory) == nbytes), None)
        if block is None:
            block = Block(nbytes)
            self.blocks.append(block)
        block.is_free = False
        block.noted = set()
        self.most = max(self.most, self.on_device)
        exporter = (ctypes.c_ubyte * nbytes).from_address(block.address)
        weakref.finalize(exporter, self._drop, block).atexit = False
        tensor = torch.frombuffer(exporter, dtype=torch.uint8)
        return block, (
            tensor[: like.nbytes].view(like.dtype).view(like.shape) if like.nbytes else torch.empty_like(like)
        )

    def _drop(self, block: Block) -> None:
        """Note that nothing refers to memory, and how far the streams that were noted have to come."""
        marks = []
        for stream in block.noted:
            marks.append(mark := SimulatedMark(self, passed=not stream.asked))
            if stream.asked:
                stream.asked.append(mark.passes)
        self._waiting.append((block, marks))

    def _take_back(self) -> None:
        """Use memory again that nothing refers to, when the streams that were noted have come so far."""
        for block, marks in self._waiting:
            block.is_free = all(mark.passed for mark in marks)
        self._waiting = [each for each in self._waiting if not each[0].is_free]


def _at(address: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over memory, as the device sees it, whoever may use that by now."""
    count = max(1, int(torch.Size(shape).numel()))
    exporter = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(exporter, dtype=dtype)[: int(torch.Size(shape).numel())].view(shape)
