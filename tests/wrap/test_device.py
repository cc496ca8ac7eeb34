"""Devices by their names, and the device that is simulated: what it says of others is worth something."""

from __future__ import annotations

import pytest
import torch

from asyncloader import ConfigurationError
from asyncloader.engine.finisher import accelerator
from asyncloader.wrap.device import Device, StreamDevice, find
from tests.wrap.simulated import SimulatedDevice

WITHOUT = pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without an accelerator")


def test_the_cpu_is_where_batches_are() -> None:
    """Whatever they consist of, and without a word about streams."""
    thing = object()
    assert find("cpu").send(thing) == (thing, None)
    assert type(find(torch.device("cpu"))) is Device
    assert find("cpu").send(2, lambda number: number + 1) == (3, None)


@WITHOUT
def test_without_an_accelerator() -> None:
    """ "auto" is the CPU then, and nothing is pinned."""
    assert find("auto").device.type == "cpu"
    assert accelerator() is None
    for name in ("cuda", "cuda:3", "xpu", "meta", torch.device("cuda", 1)):
        with pytest.raises(ConfigurationError, match=f"torch sees no device '{name}' here"):
            find(name)


class Module:
    """What torch has for a kind of device that is not there."""

    Stream = object

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 4


def test_a_device_is_one_for_all_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the index of the current one, if no other is named; so there is one stream for copies."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr("asyncloader.wrap.device.accelerator", lambda: torch.device("cuda", 2))
    monkeypatch.setattr("asyncloader.wrap.device._devices", {})
    assert isinstance(find("cuda"), StreamDevice)
    assert find("cuda") is find("cuda:2") is find(torch.device("cuda", 2)) is find("auto")
    assert find("cuda:1") is not find("cuda:2")
    with pytest.raises(ConfigurationError, match="'cuda:4'"):
        find("cuda:4")
    monkeypatch.delattr(Module, "Stream")
    assert type(find("xpu:1")) is Device


# ------------------------------------------------------------------------------------------- the one that is simulated
def test_a_copy_from_memory_that_is_gone_is_seen() -> None:
    """The instrument measures."""
    device = SimulatedDevice()
    source = torch.ones(3)
    device.copy(source)
    del source
    device.run()
    assert device.faults == ["memory of the host was let go of before the copy from it"]


def test_memory_that_is_used_again_too_early_is_seen() -> None:
    """By the step that reads it."""
    device = SimulatedDevice()
    sources, seen = [torch.ones(3), torch.zeros(3)], []
    with device.copying():
        first, mark = device.copy(sources[0]), device.mark()
    device.wait(mark)
    device.step(first, lambda tensors: seen.append(float(tensors[0][0])))
    del first
    with device.copying():
        other = device.copy(sources[1])
    while device.copies.advance():
        pass
    device.run()
    assert other.shape == (3,)
    assert seen == [0.0]


def test_memory_whose_use_was_noted_waits() -> None:
    """For the steps of that stream."""
    device = SimulatedDevice()
    sources, seen = [torch.ones(3), torch.zeros(3)], []
    with device.copying():
        first, mark = device.copy(sources[0]), device.mark()
    device.hand_over(first, mark)
    device.step(first, lambda tensors: seen.append(float(tensors[0][0])))
    del first
    with device.copying():
        other = device.copy(sources[1])
    device.run()
    assert seen == [1.0]
    assert other[0] == 0
    assert device.on_device == 1


def test_a_step_before_its_copy_is_seen() -> None:
    """Where nothing waits for the copy."""
    device = SimulatedDevice()
    seen: list[float] = []
    source = torch.ones(3)
    with device.copying():
        there = device.copy(source)
    device.step(there, lambda tensors: seen.append(float(tensors[0][0])))
    device.run()  # steps first, if they can be
    assert seen == [0.0]
