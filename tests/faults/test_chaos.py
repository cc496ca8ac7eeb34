"""Runs with random faults in random configurations, held against undisturbed ones; `make soak` goes on for longer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from asyncloader.seeding import sample_context
from tests.faults import chaos

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def whose_sample_it_was_does_not_matter() -> Iterator[None]:
    """Between "this is the sample" and the ``try`` that takes it back an interrupt may come: that is harmless."""
    yield
    sample_context.current.set(None)  # type: ignore[arg-type]


FAILED_ONCE = [
    # sys.exit, KeyboardInterrupt in a sample of a stream: the dying worker told the end of its data.
    pytest.param(424261, id="telling stream, sys.exit, 424261"),
    pytest.param(424269, id="async stream, KeyboardInterrupt, 424269", marks=SLOW),
    pytest.param(424590, id="async stream, a batch is missing, 424590", marks=SLOW),
    pytest.param(424700, id="async stream, second epoch, 424700", marks=SLOW),
    pytest.param(900026, id="telling stream, left and begun again, 900026", marks=SLOW),
    pytest.param(900057, id="async stream, KeyboardInterrupt near the end, 900057", marks=SLOW),
    pytest.param(900077, id="async stream, KeyboardInterrupt in the second epoch, 900077", marks=SLOW),
    # A worker that was replaced near the end of an epoch began the next one there.
    pytest.param(424735, id="telling stream, killed after its last batch, 424735", marks=SLOW),
    pytest.param(900007, id="telling stream, killed near the end, 900007", marks=SLOW),
    # A persistent worker that died before it had told a state was not replaced.
    pytest.param(424264, id="telling stream, killed early in the second epoch, 424264", marks=SLOW),
    pytest.param(424561, id="telling stream, killed early in both epochs, 424561"),
]


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_what_failed_once(seed: int) -> None:
    """Runs in which something was lost."""
    assert dict(chaos.soak(seed, runs=1, seconds=float("inf"), place="process", name="disturbed"))


@pytest.mark.parametrize("place", [None, *(pytest.param(each, marks=SLOW) for each in ("process", "thread", "here"))])
def test_disturbed_epochs_are_those_of_an_undisturbed_loader(place: str | None) -> None:
    """A run that nobody has seen, wherever the workers are: somewhere before a commit, in each place at night."""
    first = chaos.seed_of_the_clock()
    assert len(dict(chaos.soak(first, runs=1, seconds=float("inf"), place=place, name="disturbed"))) == 1


@pytest.mark.slow
def test_the_same_runs_each_time() -> None:
    """And as many of them disturbed as there were."""
    played = dict(chaos.soak(first_seed=100, runs=8, seconds=float("inf"), place="process", name="disturbed"))
    assert sum(len(happened) > 1 for happened in played.values()) >= 6


@pytest.mark.parametrize("runs", [1, pytest.param(12, marks=SLOW)])
@pytest.mark.parametrize("name", [name for name in chaos.PROPERTIES if name != "disturbed"])
@pytest.mark.timeout(240)  # one plan of `trained` starts some twenty workers of a fork server: 12 s on an idle machine
def test_properties_hold(name: str, runs: int) -> None:
    """Of states, signals and errors inside: runs that nobody has seen."""
    first = chaos.seed_of_the_clock()
    assert len(dict(chaos.soak(first, runs=runs, seconds=float("inf"), name=name))) == runs


SOAK_S = float(os.environ.get("ASYNCLOADER_SOAK_S", "60"))


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 180)
def test_soak() -> None:
    """New runs for as long as ASYNCLOADER_SOAK_S says; the seed of a failure is in its notes."""
    first = chaos.seed_of_the_clock()
    print(f"first seed {first}")
    played = dict(chaos.soak(first, runs=None, seconds=SOAK_S))
    print(f"{len(played)} runs from seed {first}")
    assert sum(len(happened) > 1 for happened in played.values()) >= 0.7 * len(played) - 3
