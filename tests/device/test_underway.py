"""The memory that copies read: it stays until they have passed, whatever interrupts, and whichever threads look."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests import effort
from tests.device.simulated import SimulatedDevice, SimulatedMark
from tests.faults.test_interrupts_everywhere import CtrlC, RealCtrlC

pytestmark = pytest.mark.usefixtures("sigint_raises")


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
    while not first.mark.passed:  # type: ignore[attr-defined]
        device.copies.advance()
    device.sweep()
    gc.collect()
    device.run()
    assert device.faults == []
    assert [float(batch[0]) for batch, _ in sent] == [0.0, 1.0, 2.0]
    device.finish()
    assert not device._underway


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)
@pytest.mark.parametrize("kind", [CtrlC, RealCtrlC])
def test_an_interrupt_while_a_batch_is_sent(kind: type[CtrlC]) -> None:
    """At any moment: what has begun reads what it should; all memory is let go of in the end."""
    device, moment, uninterrupted = SimulatedDevice(), 0, 0
    while uninterrupted < 3:
        moment += random.SystemRandom().randint(1, 7) if effort.is_quick else 1
        batch, interrupt = [torch.ones(3), torch.zeros(2)], kind(moment)
        alive = [weakref.ref(each) for each in batch]
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            device.send(batch)
        uninterrupted += interrupt.left > 0
        del batch
        gc.collect()
        device.run()
        assert device.faults == [], moment
        device.send(torch.ones(1))
        device.finish()
        gc.collect()
        assert [each() for each in alive] == [None, None], moment
    assert not device._underway


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
    device.finish()
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
    device.finish()
    assert found() is None
