"""When a wait for one batch is spoken of: the clock is the test's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.engine.hang_report import FIRST_S, LOOK_S, HangWatch


class Consumer:
    """What a watch is told, look by look, and when it says that a wait has become too long."""

    def __init__(self) -> None:
        self.watch = HangWatch()
        self.now = 1000.0
        self.taken = 0
        self.slowest_s = 0.0
        self.reports: list[float] = []

    def look(self, *, is_waiting: bool = True, after_s: float = LOOK_S) -> None:
        """Look after so many seconds."""
        self.now += after_s
        waited_s = self.watch.look(self.now, self.taken, is_waiting=is_waiting, slowest_s=self.slowest_s)
        if waited_s is not None:
            self.reports.append(waited_s)

    def wait(self, seconds: float) -> list[float]:
        """Wait for one batch, which then comes; return the reports of this wait."""
        before = len(self.reports)
        for _ in range(round(seconds / LOOK_S) + 1):
            self.look()
        self.taken += 1
        return self.reports[before:]


def test_a_long_wait_is_reported_once() -> None:
    """Not before a minute, and not again while it lasts."""
    consumer = Consumer()
    assert consumer.wait(FIRST_S - LOOK_S) == []
    assert consumer.wait(20 * FIRST_S) == [FIRST_S]


def test_slow_batches_move_the_bound() -> None:
    """A batch that is twenty times as slow as the slowest one so far is no common one; less may be."""
    consumer = Consumer()
    consumer.slowest_s = 30.0
    assert consumer.wait(585.0) == []
    assert consumer.wait(615.0) == [600.0]


def test_each_report_doubles_the_bound() -> None:
    """So a loader that always waits long does not fill the log."""
    consumer = Consumer()
    assert [reports for _ in range(40) if (reports := consumer.wait(300.0))] == [[60.0], [120.0], [240.0]]


@pytest.mark.parametrize("away", ["trains", "takes"])
def test_a_wait_ends_when_the_consumer_goes_on(away: str) -> None:
    """A trainer that trains for an hour does not wait; nor does one that was given a batch between two looks."""
    consumer = Consumer()
    for _ in range(100):
        consumer.look()
        consumer.look(is_waiting=away == "takes")
        consumer.taken += 1
    assert consumer.reports == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The program was stopped for a night (Ctrl-Z), and its workers with it."""
    consumer = Consumer()
    consumer.look()
    consumer.look(after_s=40_000.0)
    consumer.look()
    assert consumer.reports == []
    assert consumer.wait(FIRST_S) == [FIRST_S]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.1, 500.0)), max_size=60))
def test_only_one_wait_for_one_batch_is_reported(looks: Iterable[tuple[bool, bool, float]]) -> None:
    """Whatever comes when: a report means a minute of looks at a consumer that waits for the same batch."""
    consumer = Consumer()
    waited_s = 0.0
    for takes, is_waiting, after_s in looks:
        consumer.taken += takes
        before = len(consumer.reports)
        waited_s = waited_s + min(after_s, LOOK_S) if is_waiting and not takes else 0.0
        consumer.look(is_waiting=is_waiting, after_s=after_s)
        assert len(consumer.reports) - before <= (waited_s >= FIRST_S - 1e-6)
