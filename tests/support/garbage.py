"""When garbage is collected: not while a test counts lines, or raises at one of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Have no garbage collected: of other tests there are generators that would run, and end, in this very moment."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
