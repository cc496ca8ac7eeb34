"""Some runs of the chaos of feeds, with fresh seeds; `python -m tests.online.chaos` plays more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.online.chaos import ITEMS, check
from tests.support import effort
from tests.support.nursery import Program


@pytest.mark.timeout(120)
def test_some_runs(run: Callable[..., Program]) -> None:
    """Each comes to its end, with each item trained once."""
    done = run("from tests.online.chaos import main; main()", "--runs", effort.examples(8), timeout_s=110)
    assert done.returncode == 0, done.explain("")


def test_what_the_chaos_sees() -> None:
    """Items that are lost, or trained twice."""
    steps = [["trained", str(step), *map(str, range(4 * step, 4 * step + 4))] for step in range(ITEMS // 4)]
    assert check(steps) == ""
    assert check([*steps[:9], ["begin", "5"], *steps[5:]]) == ""
    assert check([*steps[:9], ["begin", "5"], *steps[6:]]) == "lost: [20, 21, 22, 23]; trained twice: []"
    assert check([*steps, ["trained", str(ITEMS), "7"]]) == "lost: []; trained twice: [7]"


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


@pytest.mark.timeout(180)
def test_the_chaos_sees_what_is_lost_in_flight(run: Callable[..., Program]) -> None:
    """States that leave out the batches which were formed and not trained are found within a few runs."""
    done = run(PLANTED, timeout_s=170)
    assert done.returncode == 1, done.explain("")
    assert "lost: [" in done.err
