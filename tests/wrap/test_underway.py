"""The memory that copies read: it stays until they have passed, whichever threads look."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.wrap.simulated import SimulatedDevice, SimulatedMark


class LooksTwice(SimulatedDevice):
    """Its marks are looked at by another thread as well, in the moment in which they are looked at."""

    others_turn = False

    def mark(self) -> SimulatedMark:
        return LookedAtTwice(self, super().mark())


class LookedAtTwice(SimulatedMark):
    """A mark of that device."""

    def __init__(self, device: LooksTwice, mark: SimulatedMark) -> None:
        self.mark, self._looks = mark, device

    def query(self) -> bool:
        has_passed = self.mark.query()
        if not self._looks.others_turn:
            self._looks.others_turn = True
            self._looks.sweep()
            self._looks.others_turn = False
        return has_passed

    def synchronize(self) -> None:
        self.mark.synchronize()


def test_two_threads_look_at_once() -> None:
    """Neither lets go of what the other one has looked at."""
    device = LooksTwice()
    sources = [torch.full((3,), float(n)) for n in range(3)]
    sent = [device.send(sources.pop(0)) for _ in range(3)]
    (_, first), *_ = sent
    while not first.mark.passed:
        device.copies.advance()
    device.sweep()
    gc.collect()
    device.run()
    assert device.faults == []
    assert [float(batch[0]) for batch, _ in sent] == [0.0, 1.0, 2.0]
    device.sweep()
    assert not device._underway


def test_a_copy_that_is_broken_off_reads_what_it_should() -> None:
    """Where something in the batch raises, or a signal's handler does, the copies that had begun go on."""
    device = SimulatedDevice()

    class Raises:
        x = torch.ones(1)

        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise KeyboardInterrupt

    batch = [torch.ones(3), Raises()]
    found = weakref.ref(batch[0])
    with pytest.raises(KeyboardInterrupt):
        device.send(batch)
    del batch
    gc.collect()
    assert found() is not None
    device.run()
    device.sweep()
    assert device.faults == []
    assert found() is None


class MovesInPlace:
    """Data that are somewhere else after `to`, as those of PyTorch Geometric."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.x = device, torch.arange(3.0)

    def to(self, device: torch.device, non_blocking: bool = False) -> MovesInPlace:
        self.x = self.device.copy(self.x)
        return self


class Notes(MovesInPlace):
    """Such data that have their tensors noted themselves."""

    def record_stream(self, stream: Any) -> None:
        self.device.note_use(self.x)


class Assigns(MovesInPlace):
    """Data whose tensors refer to other memory then, as the parameters of a module do."""

    def to(self, device: torch.device, non_blocking: bool = False) -> MovesInPlace:
        self.x.data = self.device.copy(self.x)
        return self


@pytest.mark.parametrize("kind", [MovesInPlace, Notes, Assigns])
def test_an_object_that_moves_in_place(kind: type[MovesInPlace]) -> None:
    """What it lets go of is kept until it is copied."""
    device = SimulatedDevice()
    batch = {"graph": kind(device)}
    memory = StorageWeakRef(batch["graph"].x.untyped_storage())
    device.send(batch)
    del batch
    gc.collect()
    assert not memory.expired()
    device.run()
    device.sweep()
    assert device.faults == []
    assert memory.expired()


def test_a_change_that_sends_a_batch_itself() -> None:
    """The mark of that one is not taken for that of the batch that is being sent."""
    device = SimulatedDevice()

    def change(batch: Any) -> Any:
        device.send(torch.zeros(1))
        device.run()
        device.sweep()
        return [batch, device.copy(more.pop())]

    more = [torch.ones(2)]
    source = torch.ones(3)
    found = weakref.ref(source)
    batch, _ = device.send(source, change)
    del source
    gc.collect()
    assert found() is not None
    device.run()
    assert len(batch) == 2
    device.sweep()
    assert found() is None
