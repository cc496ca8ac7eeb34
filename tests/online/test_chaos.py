"""Some runs of the chaos of feeds, with fresh seeds; `python -m tests.online.chaos` plays more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.online.history import IN_PARTS, ITEMS, check, is_dropped
from tests.support import effort
from tests.support.nursery import Program


@pytest.mark.timeout(120)
def test_some_runs(run: Callable[..., Program]) -> None:
    """Each comes to its end, with each item trained once."""
    done = run("from tests.online.chaos import main; main()", "--runs", effort.examples(8), timeout_s=110)
    assert done.returncode == 0, done.explain("")


def trained(step: int, *names: str, seat: str = "0 0") -> list[str]:
    """Return the line of a step."""
    return ["trained", str(step), *seat.split(), *names]


def test_what_the_chaos_sees() -> None:
    """Items that are lost, trained twice, or dropped; units that are torn; peers that are given something else."""
    items = [f"{item}.0" for item in range(ITEMS) if not is_dropped(item)]
    begin = [["begin", "0", "1", "1"]]
    steps = [trained(step, *items[4 * step :][:4]) for step in range(-(-len(items) // 4))]
    assert check([*begin, *steps]) == ""
    again = ["begin", "5", "1", "1"]
    assert check([*begin, *steps[:9], again, *steps[5:]]) == ""
    assert check([*begin, *steps[:9], ["begin", "6", "1", "1"], *steps[7:]]).startswith(
        "lost: ['26', '27', '28', '29']"
    )
    assert "twice: ['7']" in check([*begin, *steps, trained(100, "7.0")])
    assert "not put: ['3']" in check([*begin, *steps, trained(100, "3.0")])
    assert "unit 5 is torn" in check([*begin, trained(0, "5.0", "5.2")], IN_PARTS)
    left = [*begin, *steps[:-1], ["begin", "28", "2", "1"], ["end", "0", "0", "1"]]
    assert check(left) == ""
    assert check([*left, ["begin", "28", "1", "1"]]).startswith("lost: ['119']")
    peers = [["begin", "0", "1", "2"], trained(0, "1.0")]
    assert "by [(0, 0)] of 1 x 2" in check(peers)
    assert "peer 1 of rank 0 had ['2.0']" in check([*peers, trained(0, "2.0", seat="0 1")])


def test_what_the_chaos_sees_of_puts() -> None:
    """What was in before the state is trained; what was refused is not; what came later may be lost with the feed."""
    items = [f"{item}.0" for item in range(ITEMS) if not is_dropped(item)]
    lines = [["begin", "0", "1", "1"], trained(0, *items), ["in", "fa"], ["saving", "1"], ["in", "fb"], ["not", "fc"]]
    again = ["begin", "1", "1", "1"]
    assert check([*lines, trained(1, "fa.0", "fb.0")]) == ""
    assert check([*lines, again, trained(1, "fa.0")]) == ""
    assert check([*lines, trained(1, "fa.0")]).startswith("lost: ['fb']")
    assert check([*lines, again]).startswith("lost: ['fa']")
    assert "not put: ['fc']" in check([*lines, again, trained(1, "fa.0", "fc.0")])


PLANTED = """
import sys, tempfile
from pathlib import Path

from asyncloader.online.ledger import Ledger
from tests.online.chaos import play_one

whole = Ledger.state

def state(ledger, done):
    found = whole(ledger, done)()
    lost = {unit.id for batch in [*ledger._batches][max(0, done - ledger.done) :] for unit in batch}
    ready = [number for number in found["ready"] if number not in lost]
    return lambda: {**found, "ready": ready, "units": [unit for unit in found["units"] if unit[0] not in lost]}

Ledger.state = state
for seed in range(30):
    with tempfile.TemporaryDirectory() as folder:
        if found := play_one(seed, Path(folder)):
            sys.exit(found)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_chaos_sees_what_is_lost_in_flight(run: Callable[..., Program]) -> None:
    """States that leave out the batches which were formed and not trained are found within a few runs."""
    done = run(PLANTED, timeout_s=170)
    assert done.returncode == 1, done.explain("")
    assert "lost: ['" in done.err
