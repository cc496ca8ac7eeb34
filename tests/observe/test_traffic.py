"""What connections receive: counted while at least one batch is on its way."""

from __future__ import annotations

import pytest

from asyncloader.observe import traffic as module
from asyncloader.observe.traffic import Received, Traffic


class Clocks:
    """The clock, and the thread's CPU time, which is half of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "thread_time", lambda: self.now / 2)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_two_connections_at_once_take_the_time_of_one(clocks: Clocks) -> None:
    """And what lies between two batches is nobody's."""
    traffic = Traffic()
    for now, step in (
        (1.0, traffic.begin),
        (2.0, traffic.begin),
        (4.0, lambda: traffic.end(100)),
        (6.0, lambda: traffic.end(50)),
        (20.0, traffic.begin),
        (21.0, lambda: traffic.end(7)),
    ):
        clocks.now = now
        step()
    assert traffic.received == Received(157, 6.0, 3.0)


def test_each_end_is_counted_while_others_are_on_their_way(clocks: Clocks) -> None:
    """On a full link there is no moment without any."""
    traffic = Traffic()
    for now in range(10):
        clocks.now = float(now)
        traffic.begin()
        if now:
            traffic.end(1)
            assert traffic.received == Received(now, now, now / 2)


def test_a_run_counts_what_has_come_since_it_began() -> None:
    assert Received(10, 3.0, 2.0).since(Received(4, 1.0, 0.5)) == Received(6, 2.0, 1.5)
