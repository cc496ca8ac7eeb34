"""Tests whose subject is time, on machines that do other things as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

TRIES = 3


def best_of_three(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test again, up to three times in all, if what it measured is not what it asks for."""

    @functools.wraps(test)
    def tried(*args: Any, **kwargs: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return tried
