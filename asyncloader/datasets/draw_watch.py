"""Find out whether samples are random: whether generators have moved while the first ones of them were made.

    before = watch.begin() ── the sample is made ──> watch.end(before) ──> {"numpy.random", "transform.py_random"}

Comparing all states takes 0.1 ms, so only the first samples are watched.
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any, NamedTuple

from asyncloader.seeding.generators import GLOBAL, check_of
from asyncloader.seeding.own_generators import generators_of
from asyncloader.seeding.sample_context import current

_WATCHED = 4


class Before(NamedTuple):
    """The generators before a sample was made.

    Attributes:
        states: A checksum of each generator's state, by name.
        blocks: How many blocks of the sample had been seeded.
        muddled: How often others had drawn, perhaps.
    """

    states: dict[str, Any]
    blocks: int
    muddled: int


class DrawWatch:
    """Watches the first samples that one copy of a dataset makes.

    Args:
        dataset: Whose samples.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._left = _WATCHED
        self._own: dict[str, Any] | None = None
        self._muddled = 0

    def begin(self) -> Before | None:
        """Note the states before a sample is made; None when enough were watched."""
        if not self._left:
            return None
        self._left -= 1
        if self._own is None:
            self._own = generators_of(self._dataset)
        sample = current.get(None)
        return Before(self._states(), 0 if sample is None else sample.num_blocks, self._muddled)

    def end(self, before: Before | None) -> list[str]:
        """Return what was drawn from meanwhile, as far as it is certain."""
        if before is None:
            return []
        sample, now = current.get(None), self._states()
        moved = [name for name, state in now.items() if name in before.states and before.states[name] != state]
        is_muddled = self._muddled != before.muddled
        was_seeded = sample is not None and sample.num_blocks != before.blocks  # that moves generators as well
        if is_muddled or was_seeded or not _is_alone():
            moved = [name for name in moved if name == _SAMPLE_RNG]
        if moved:
            self._left = 0
        return moved

    def muddle(self) -> None:
        """Note that others may have drawn: what moves until then is no sample's for certain."""
        self._muddled += bool(self._left)

    def _states(self) -> dict[str, Any]:
        sample = current.get(None)
        states = {
            _SAMPLE_RNG: sample is not None and sample.has_generator,
            **dict(zip(("torch", "random", "numpy.random"), map(check_of, GLOBAL), strict=True)),
        }
        return states | {path: check_of(generator) for path, generator in (self._own or {}).items()}


_SAMPLE_RNG = "asyncloader.sample_rng()"


def _is_alone() -> bool:
    """Whether nobody draws beside the samples: in a worker process, and where the trainer makes them itself."""
    return multiprocessing.parent_process() is not None or threading.current_thread() is threading.main_thread()
