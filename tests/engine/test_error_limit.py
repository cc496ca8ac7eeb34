"""How many samples may raise: counted in the order of batches, over the whole epoch."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.progress import Progress
from asyncloader.messages.failure import BadSample, CapturedError
from asyncloader.observe.faults import Faults
from tests.support import inside


def bad(*keys: int) -> list[BadSample]:
    """Samples that have raised."""
    error = CapturedError.capture(ValueError("bad"), "in a test")
    return [BadSample(key, 0, error) for key in keys]


def limit(max_errors: Any, *, length: int = 10, batch_size: int = 2, before: int = 0, position: int = 0) -> ErrorLimit:
    """The limit of a run over so many samples, which goes on at a batch with so many bad samples before."""
    loader = DataLoader(range(length), batch_size, on_error="skip", max_errors=max_errors)  # type: ignore[arg-type]
    return ErrorLimit(inside.options(loader), Progress(position, bad_count=before), Faults())


@pytest.mark.parametrize(("max_errors", "allowed"), [(0, 0), (3, 3), (0.0, 0), (0.3, 3), (1.0, 10)])
def test_a_count_or_a_share_of_the_samples(max_errors: float, allowed: int) -> None:
    """As many are let pass; the next one is raised, and names the limit."""
    counts = limit(max_errors)
    assert [counts.count(bad(key), key) for key in range(allowed)] == [None] * allowed
    error = counts.count(bad(7), allowed)
    assert isinstance(error, ValueError)
    assert f"{allowed + 1} samples have raised in this epoch, more than max_errors={max_errors}." in error.__notes__


def test_no_limit() -> None:
    """Nothing is raised without one."""
    assert limit(None).count(bad(*range(2000)), 0) is None


def test_bad_samples_before_a_state_count() -> None:
    """A run that goes on with an epoch has what it had left."""
    assert limit(3, before=2).count(bad(1), 2) is None
    assert limit(3, before=3).count(bad(1), 3) is not None


def test_an_interrupted_batch_is_counted_once() -> None:
    """It is judged once more when it is taken again."""
    faults = Faults()
    settings = inside.options(DataLoader(range(4), on_error="skip", max_errors=2))  # type: ignore[arg-type]
    counts = ErrorLimit(settings, Progress(), faults)
    for _ in range(2):
        assert [counts.count(bad(key), before) for before, key in enumerate((5, 7))] == [None, None]
    assert (faults.bad_count, list(faults.bad_samples)) == (2, [5, 7])
