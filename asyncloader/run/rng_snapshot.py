"""The random generators that the order of an epoch is drawn from: noted when it is drawn, to draw it again.

    iter(sampler) ── base seed, and whatever the trainer draws ── the sampler's first `next` ── ...
    └ at_iter                                                     └ at_next

A sampler draws its order in its ``__iter__``, or when it is first read, as torch's do; without workers the trainer may
draw in between. So both moments are noted. A resumed run sets the generators to what they were at each of the two, has
the order drawn again, and leaves out what was done. Then a global generator that the trainer had restored (the state's
``check`` tells) is put back. Any other generator stays where the drawing has left it: that is where the interrupted run
left it, as long as nothing else draws from it.

The generators are the loader's and its samplers'; Python's and numpy's global ones too where samplers are neither
torch's nor provide a state, or where this process reads a stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import repeat, zip_longest
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from asyncloader.protocols import is_stateful, probe
from asyncloader.run.state import LoaderState
from asyncloader.seeding.generators import (
    GLOBAL,
    check_of,
    decode,
    encode,
    is_set_since,
    mark_of,
    set_state,
    state_of,
)

DRAW_NOTHING = (SequentialSampler, DistributedSampler, BatchSampler, _InfiniteConstantSampler)
DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
KNOWN_SAMPLERS = (*DRAW_NOTHING, *DRAW_FROM_TORCH)
"""Torch's samplers: to iterate over one moves its generator, if it has one, and nothing else."""


def draws_once(sampler: Any) -> bool:
    """Whether a sampler draws nothing from a global generator but before its first index."""
    is_known = type(sampler) in KNOWN_SAMPLERS or probe(sampler, "draws_once") is True
    return is_known and probe(sampler, "generator") is not torch.default_generator


Mark = tuple[Any, int]
"""Of a generator, by `mark_of`, and how often loaders have restored it until then."""

_times_restored: Counter[int] = Counter()  # by id


@contextmanager
def restores_forgotten() -> Iterator[None]:
    """Have generators count as restored as often as before, whatever is restored meanwhile and put back afterwards."""
    before = _times_restored.copy()
    try:
        yield
    finally:
        _times_restored.clear()
        _times_restored.update(before)


class RNGSnapshot:
    """The generators that the order of an epoch, and its base seed, are drawn from.

    Args:
        generator: The loader's own, or None for torch's global one.
        samplers: All that the order is made with. Where one is not torch's, nor provides a state, the global
            generators of Python and numpy count as well.
        reads_stream: This process reads an iterable dataset, which may draw its order from any global generator.
    """

    def __init__(self, generator: torch.Generator | None, samplers: list[Any], *, reads_stream: bool = False) -> None:
        generators = [generator or torch.default_generator]
        others = False
        for sampler in samplers:
            if type(sampler) in DRAW_NOTHING:
                continue
            own = probe(sampler, "generator")
            own = own if isinstance(own, torch.Generator) else torch.default_generator
            if not any(own is other for other in generators):
                generators.append(own)
            others |= not (type(sampler) in DRAW_FROM_TORCH or is_stateful(sampler) or draws_once(sampler))
        generators += [each for each in GLOBAL if others or reads_stream if not any(each is own for own in generators)]
        self._generators = generators
        self.is_global: list[bool] = [any(own is each for each in GLOBAL) for own in generators]

    def __len__(self) -> int:
        return len(self._generators)

    def capture(self) -> list[Any]:
        """Take the generators' states as they are: 1 us, and 40 where Python's and numpy's count."""
        return [state_of(each) for each in self._generators]

    def restore(self, states: list[Any], where: list[bool] | None = None) -> None:
        """Set the generators, or those of them that ``where`` names, to states that were captured."""
        for generator, state, is_meant in zip(self._generators, states, where or repeat(True), strict=False):
            if is_meant:
                set_state(generator, state)
                _times_restored[id(generator)] += 1

    def check(self) -> list[int]:
        """Return numbers that tell states of global generators from others, 0 for others' generators.

        2 us, and 50 where Python's and numpy's count.
        """
        pairs = zip(self._generators, self.is_global, strict=True)
        return [check_of(each) if is_global else 0 for each, is_global in pairs]

    def marks(self, where: list[bool]) -> list[Mark | None]:
        """Mark the generators that ``where`` names; return the marks, None for the others."""
        pairs = zip(self._generators, where, strict=False)
        return [(mark_of(each), _times_restored[id(each)]) if is_meant else None for each, is_meant in pairs]

    def set_since(self, marks: list[Mark | None]) -> list[bool]:
        """Return which of the generators were seeded or set since these marks, or had been set before them: None."""
        return [
            mark is None or _times_restored[id(generator)] != mark[1] or is_set_since(generator, mark[0])
            for generator, mark in zip(self._generators, marks, strict=False)
        ]

    def differ(self, states: list[Any], others: list[Any]) -> list[bool]:
        """Return which of the generators' states are other ones."""
        checks = (map(check_of, self._generators, each) for each in (states, others))
        return [one != other for one, other in zip(*checks, strict=False)]

    def as_text(self, states: list[Any]) -> str:
        """Write captured states down as JSON."""
        return json.dumps(list(map(encode, self._generators, states)))

    def text_of(self, known: Any = None, state: Any = None) -> str:
        """Write down where one generator is: the others are where they are when this is read."""
        return json.dumps([encode(each, state) if each is known else None for each in self._generators])

    def from_text(self, text: str) -> list[Any]:
        """Read what `as_text` or `text_of` has written."""
        pairs = zip(self._generators, json.loads(text), strict=False)
        return [state_of(each) if written is None else decode(each, written) for each, written in pairs]


_ALL_WATCHED = 8
_SHARE = 50
"""To see what an answer draws takes 100 us, which are so many times less than what comes before the next look."""


class OrderDraw:
    """When the order of one run was drawn. Used with the lock of the progress held, or before others know the run.

    Args:
        rng: The generators.
        at_iter: Their states when the samplers were iterated over.
        warn: Says that the sampler draws on, once.
        on_first_read: Called when the sampler is read for the first time: what it draws by is what it is now.

    Attributes:
        is_due: The sampler is read next for the first time, or once more up to where a resumed run begins.
    """

    def __init__(
        self,
        rng: RNGSnapshot,
        at_iter: list[Any],
        warn: Callable[[], object],
        on_first_read: Callable[[], object] = bool,
    ) -> None:
        self._rng = rng
        self._at_iter = at_iter
        self._at_next: list[Any] = []
        self._at_next_text = ""
        self._is_again = self._is_reading = False
        self._put_back = self._set_by_sampler = [False] * len(rng)
        self.is_due: bool = True
        self._warn = warn
        self._on_first_read = on_first_read
        self._draws_on = self._has_states = False
        self._watched_until = 0.0

    def resume(self, state: LoaderState, before: list[Any], check: list[int], set_by_sampler: list[bool]) -> None:
        """Have the order of a state be drawn again: the samplers were iterated over, and are still to be read.

        Args:
            state: The loader's, of the middle of a run.
            before: The generators' states before this run.
            check: What tells them from others.
            set_by_sampler: The generators that the state of a sampler has set.
        """
        same = [here == there for here, there in zip_longest(check, state.check[: len(check)])]
        self._put_back = [is_same and each for is_same, each in zip(same, self._rng.is_global, strict=True)]
        self._set_by_sampler = set_by_sampler
        self._is_again = state.is_drawn
        self._at_next = self._rng.from_text(state.at_next or state.at_iter)
        self._restore_at_next()
        self._rng.restore(before, self._put_back)

    def _restore_at_next(self) -> None:
        self._rng.restore(self._at_next, [not is_set for is_set in self._set_by_sampler])

    @contextmanager
    def first(self) -> Iterator[None]:
        """Read the sampler for the first time, or once more up to where the run begins, inside of this.

        After an interrupt that came before anything was drawn, that is still to be done.
        """
        here = self._rng.capture()
        if self._is_again:
            self._restore_at_next()
        else:
            self._at_next = here
            self._on_first_read()
        self.is_due, self._is_reading = False, True
        try:
            yield
        except Exception:  # the sampler has given its answer
            raise
        except BaseException:
            self.is_due = not any(self._rng.differ(here, self._rng.capture()))
            raise
        finally:
            if self._is_again:
                self._rng.restore(here, self._put_back)
            self._is_reading = False

    def note_state(self) -> None:
        """Note that there is a state of the run: where the sampler draws on, that is said now, or when it is seen."""
        self._has_states = True
        if self._draws_on:
            self._warn()

    def is_watched(self, answers: int) -> bool:
        """Whether to see what the sampler draws for its next answer: a fiftieth of the time at most, after the first 8.

        So in most trainings each answer is watched. Where batches take less than 5 ms, a sampler that draws once in a
        while may be missed until a resume, which draws again all that the state has.
        """
        return not self._draws_on and (answers < _ALL_WATCHED or perf_counter() >= self._watched_until)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See whether global generators are drawn from inside of this: by an answer that an interrupt ends, too."""
        began_at, before = perf_counter(), self._rng.check()
        cost_s = perf_counter() - began_at
        try:
            yield
        finally:
            self._watched_until = perf_counter() + 2 * _SHARE * cost_s
            if self._rng.check() != before:
                self._draws_on = True
                if self._has_states:
                    self._warn()

    def as_plain(self) -> dict[str, Any]:
        """Return what a state says of it: in some microseconds once the order is drawn, before that in 200."""
        now = self._rng.capture() if self.is_due and not self._is_again else None
        is_drawn = self._is_again or not self.is_due  # perhaps since a moment ago, in another thread
        at_next = self._at_next_text or self._rng.as_text(self._at_next if is_drawn else now or [])
        if is_drawn:
            self._at_next_text = at_next
        at_iter = self._at_iter_text
        return {"at_iter": at_iter, "at_next": "" if at_next == at_iter else at_next, "is_drawn": is_drawn}

    def check(self) -> list[int]:
        """Return numbers that tell what generators are now; -1 while one is not where drawing the order leaves it."""
        is_passing = self._is_reading or (self._is_again and self.is_due)
        numbers = zip(self._rng.check(), self._put_back, strict=True)
        return [-1 if is_passing and not is_put_back else number for number, is_put_back in numbers]

    @cached_property
    def _at_iter_text(self) -> str:
        return self._rng.as_text(self._at_iter)
