"""Programs without standard input, output or error: daemons, and jobs of some schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.faults.programs import NUMBERS
from tests.support.nursery import Program

Run = Callable[..., Program]

SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations((0, 1, 2), size)]

AWAITED = """
from asyncloader.typing import AsyncDataset

class Awaited(AsyncDataset):
    def __len__(self):
        return 40
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return index
"""

TRAIN = """
def train(dataset, **options):
    return [index for batch in DataLoader(dataset, batch_size=4, **options) for index in batch.tolist()]

def close(*closed):
    for number in closed:
        os.close(number)

def report(*epochs):
    with open("epochs", "w") as file:
        file.write(repr([epoch == list(range(40)) for epoch in epochs]))
"""

pytestmark = pytest.mark.interpreter


def assert_right(program: Program, epochs: int) -> None:
    assert program.returncode == 0, program.explain("it did not end well")
    assert (program.folder / "epochs").read_text() == repr([True] * epochs)


@pytest.mark.parametrize(
    "closed",
    [pytest.param(subset, id=str(subset), marks=[pytest.mark.slow] * (len(subset) == 2)) for subset in SUBSETS],
)
def test_closed_before_the_first_loader(run: Run, closed: tuple[int, ...]) -> None:
    """No loop, channel or pipe gets the number of one: libuv aborts at its end, and children close what 0 is."""
    source = NUMBERS + AWAITED + TRAIN + f"close{closed}\n"
    source += "report(train(Numbers(), num_workers=2), train(Awaited(), num_workers=2), train(Awaited()))"
    assert_right(run(source), 3)


@pytest.mark.parametrize("closed", [(0,), (0, 1, 2)], ids=str)
def test_closed_between_two_loaders(run: Run, closed: tuple[int, ...]) -> None:
    """A program that becomes a daemon when it has trained already."""
    source = NUMBERS + TRAIN + f"first = train(Numbers(), num_workers=2)\nclose{closed}\n"
    assert_right(run(source + "report(first, train(Numbers(), num_workers=2))"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("closed", SUBSETS, ids=str)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_with_workers_that_are_not_forked(run: Run, method: str, closed: tuple[int, ...]) -> None:
    """They inherit what stands in the place of these."""
    source = NUMBERS + TRAIN + "if __name__ == '__main__':\n"
    source += f"    close{closed}\n    report(train(Numbers(), num_workers=2, multiprocessing_context={method!r}))"
    assert_right(run(source), 1)
