"""What the library's log has told while a run was played: where something cannot be exact, it must say so."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

DRAWS_ON = "draws from global random generators while it is read, and not only when it begins"
"""A sampler draws each step from a global generator, so a resume may not be exact."""
READ_IN_TURNS = "two iterators of the loader have read it in turns"
"""A sampler with one place for all of its iterators has been read by two, so states may not be exact."""


@contextlib.contextmanager
def told(text: str) -> Iterator[list[str]]:
    """Collect the warnings inside that contain a text, also where the log is silent otherwise."""
    found: list[str] = []
    log = logging.getLogger("asyncloader")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: text in record.getMessage())
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = log.propagate and before[0] <= logging.WARNING
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
