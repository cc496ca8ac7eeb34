"""Random programs of what trainers do with iterators and states, against a model of what has to be delivered.

A program begins iterators, reads them, looks at a batch beside them, drops, closes and ends them, leaves loops, takes
states, loads these into the same loader or a fresh one, and sets epochs. Each batch and each state has to be the one of
the model, or a warning has to say that there is doubt.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.wrap import LoaderWrapper
from tests.support import effort
from tests.support.patience import wait_until
from tests.wrap.ahead import Ahead

SAMPLES, SIZE = 22, 4
BATCHES = -(-SAMPLES // SIZE)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "divided": lambda: DistributedSampler(range(SAMPLES), 1, 0),  # type: ignore[arg-type]
}
OPTIONS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2, "worker_backend": "thread"},
    "taken ahead": {},
}


class Taken:
    """An iterator, and what the model says of it."""

    def __init__(self, iterator: Any, epoch: int, at: int, beside: list[Taken], now: int) -> None:
        self.iterator = iterator
        self.epoch, self.at = epoch, at
        self.beside = beside
        self.used = now
        self.gone: int | None = None
        self.has_ended = False


class Program:
    """Runs steps on a loader, and on the model."""

    def __init__(self, seed: int, sampler: str, options: str) -> None:
        self.draw = random.Random(seed)
        self.make_sampler, self.kind = SAMPLERS[sampler], options
        self.whole = [self.batches_of(epoch) for epoch in range(4)]
        self.steps: list[str] = []
        self.warnings: list[str] = []
        self.states: list[tuple[Any, tuple[int, int] | None]] = []
        self.begin_with(self.make())

    def make(self) -> Any:
        loader: Any = DataLoader(range(SAMPLES), SIZE, sampler=self.make_sampler(), **OPTIONS[self.kind])  # type: ignore[arg-type]
        return LoaderWrapper(loader, Ahead) if self.kind == "taken ahead" else loader

    def batches_of(self, epoch: int) -> list[list[int]]:
        sampler = self.make_sampler()
        sampler.set_epoch(epoch)
        keys = list(sampler)
        return [keys[first : first + SIZE] for first in range(0, SAMPLES, SIZE)]

    def begin_with(self, loader: Any) -> None:
        self.loader, self.epoch, self.now = loader, 0, 0
        self.taken: list[Taken] = []
        self.loaded: tuple[int, int] | None = None
        self.is_told = False

    def run(self, count: int) -> None:
        choices = [self.iterate] * 3 + [self.read] * 6 + [self.look] * 2 + [self.drop] * 2 + [self.close, self.end]
        choices += [self.leave_loop] * 2 + [self.loop, self.save, self.save, self.save, self.load, self.set_epoch]
        for _ in range(count):
            step = self.draw.choice(choices)
            self.now += 1
            self.steps.append(step.__name__)
            step()

    # ------------------------------------------------------------------------------------------------------- steps

    @property
    def alive(self) -> list[Taken]:
        return [each for each in self.taken if each.gone is None]

    def begin(self) -> Taken:
        """Begin an iterator, which is read once: some samplers learn only then which epoch it is."""
        if self.loaded is None or (self.is_told and self.epoch != self.loaded[0]):
            epoch, at = self.epoch, 0
        else:
            epoch, at = self.loaded
        self.loaded, self.is_told, self.epoch = None, False, epoch
        taken = Taken(iter(self.loader), epoch, at, self.alive, self.now)
        self.taken.append(taken)
        self.next(taken)
        return taken

    def next(self, taken: Taken) -> None:
        batch = next(taken.iterator, None)
        expected = None if taken.at == BATCHES else self.whole[taken.epoch][taken.at]
        assert (None if batch is None else batch.tolist()) == expected
        taken.used = self.now
        if batch is None:
            taken.has_ended, taken.gone = True, taken.gone or self.now
        else:
            taken.at += 1

    def iterate(self) -> None:
        self.begin()

    def read(self) -> None:
        if self.alive:
            self.next(self.draw.choice(self.alive))

    def look(self) -> None:
        self.let_go(self.begin())

    def let_go(self, taken: Taken) -> None:
        self.now += 1
        iterator, taken.iterator = weakref.ref(taken.iterator) if taken.iterator is not None else None, None
        if iterator is not None:
            wait_until(lambda: iterator() is None)  # the loop's thread may be at something of it
        taken.gone = taken.gone or self.now

    def drop(self) -> None:
        if self.taken:
            self.let_go(self.draw.choice(self.taken))

    def close(self) -> None:
        if self.alive:
            taken = self.draw.choice(self.alive)
            taken.iterator.close()
            taken.gone = self.now
            if taken.at < BATCHES:
                with pytest.raises(LoaderClosedError):
                    next(taken.iterator)

    def end(self) -> None:
        if self.alive:
            taken = self.draw.choice(self.alive)
            while not taken.has_ended:
                self.next(taken)

    def leave_loop(self) -> None:
        taken = self.begin()
        for _ in range(self.draw.randrange(BATCHES - taken.at + 1)):
            self.next(taken)
        self.let_go(taken)

    def loop(self) -> None:
        taken = self.begin()
        while not taken.has_ended:
            self.next(taken)
        self.let_go(taken)

    def set_epoch(self) -> None:
        for each in self.alive:  # a sampler that is told in the middle of an epoch says what it likes
            self.let_go(each)
        self.epoch, self.is_told = self.draw.randrange(4), True
        self.loader.set_epoch(self.epoch)

    def current(self) -> tuple[Taken | None, bool]:
        """Return the iterator that is spoken of, and whether it is another one, perhaps.

        A wrapper speaks of its newest iterator that is alive, whichever was read last; or of the last one that was.
        """
        if self.kind == "taken ahead" and self.taken:
            return (self.alive or sorted(self.taken, key=attrgetter("gone")))[-1], False
        known = self.taken
        while known:
            newest = known[-1]
            older = [each for each in known[:-1] if each in newest.beside]
            if newest.gone is None:
                return newest, any(each.gone is None and each.used > newest.used for each in older)
            rivals = [each for each in older if each.gone is None or each.gone > newest.gone]
            if not rivals:
                return newest, False
            last = max(rivals, key=lambda each: each.used)
            if last.used <= newest.gone:
                return last, last.used < newest.used
            known = older
        return None, False

    def save(self) -> None:
        self.warnings.clear()
        self.loader._runs.warned.clear()
        state = self.loader.state_dict()
        current, is_doubtful = self.current()
        place: tuple[int, int] | None = self.loaded
        if place is not None and self.is_told and self.epoch != place[0]:
            place = (self.epoch, 0)  # the epoch that was loaded is left: that one begins
        if current is not None and self.loaded is None:
            place = (current.epoch, 0) if current.has_ended else (current.epoch, current.at)
        if current is None and self.loaded is None:
            place = (self.epoch, 0)
        assert place is not None
        fresh = self.make()
        fresh.load_state_dict(state)
        if not place[1]:  # an epoch that is set is no part of a state between two runs
            fresh.set_epoch(place[0])
        rest = [batch.tolist() for batch in fresh]
        has_warned = any("two of its iterators" in text for text in self.warnings)
        if rest != self.whole[place[0]][place[1] :] or is_doubtful:
            # The loader sees late that an iterator came to its end which was dropped; others may be gone by then, too.
            newest = self.taken[-1:]
            is_seen_late = any(each.has_ended and each.iterator is None for each in newest) and len(rest) == BATCHES
            is_unsaid = is_doubtful and is_seen_late
            assert has_warned or is_unsaid, (place, rest)
        else:
            self.states.append((state, place))

    def load(self) -> None:
        if not self.states:
            return
        state, place = self.draw.choice(self.states)
        held = [each.iterator for each in self.taken if each.iterator is not None and not each.has_ended]
        if is_fresh := self.draw.random() < 0.5:
            self.begin_with(self.make())
        self.loader.load_state_dict(state)
        for each in [] if is_fresh else held:
            with pytest.raises(LoaderClosedError):
                next(each)
        assert place is not None
        self.taken, self.loaded, self.is_told, self.epoch = [], place, False, place[0]
        if not place[1]:
            self.epoch, self.is_told = self.draw.randrange(4), True
            self.loader.set_epoch(self.epoch)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_programs(sampler: str, options: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each batch and each state is that of the model, or a warning says that there is doubt."""
    for _ in range(effort.examples(60 if options == "no workers" else 15)):
        seed = random.SystemRandom().randrange(1 << 32)
        program = Program(seed, sampler, options)

        class Heard(logging.Handler):
            def emit(self, record: logging.LogRecord, program: Program = program) -> None:
                program.warnings.append(record.getMessage())

        heard = Heard()
        logging.getLogger("asyncloader").addHandler(heard)
        try:
            program.run(40)
        except BaseException as error:
            error.add_note(f"seed {seed}, {sampler}, {options}: {' '.join(program.steps)}")
            raise
        finally:
            logging.getLogger("asyncloader").removeHandler(heard)
            program.loader.close()
