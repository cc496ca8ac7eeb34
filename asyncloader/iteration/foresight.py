"""The next run over the data, begun while the last batches of this one are taken: ``prefetch_epochs``.

    run n: everything is made, the last batches wait to be taken
      └─ foresee: draw the first keys of run n + 1, put back what that has moved ──> Run n + 1 ──> session, workers
    iter(loader): draws run n + 1 as ever ── the same keys, seeds and epochs? ─ yes ──> its batches are there
                                                                             └─ no ───> they are dropped, begin anew

Nothing that was foreseen is relied on: the run is drawn as it is without this, at the moment at which it is, and then
compared. So it does not matter what the trainer does between two runs, nor how well it was guessed.

All of it happens in the consumer's thread: samplers are the user's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.epochs import Told, epoch_of
from asyncloader.iteration.plan import Plan, samplers_within, set_epochs
from asyncloader.iteration.rng_snapshot import KNOWN_SAMPLERS, RNGSnapshot
from asyncloader.observe.notices import warn
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.settings import Settings
from asyncloader.workers.protocol.messages import EpochSpec
from asyncloader.workers.protocol.snapshot import Pace

_BY_EPOCH = (DistributedSampler, ElasticSampler)


class Guess:
    """What `set_epoch` will have been called with when the next run begins: it goes on as between the last two.

    Before that can be known, samplers that shuffle by epoch are taken to be told the next number.

    Args:
        settings: Of the first run.
        told: What the dataset has heard.
    """

    def __init__(self, settings: Settings, told: Sequence[Told]) -> None:
        samplers = samplers_within(settings.index_sampler)
        self._steps = [int(isinstance(sampler, _BY_EPOCH)) for sampler in samplers]
        self._told_steps = [int(bool(each.calls)) for each in told]

    def learn(
        self,
        epochs: Sequence[int | None],
        told: Sequence[Told],
        next_epochs: Sequence[int | None],
        next_told: Sequence[Told],
    ) -> None:
        """See what samplers and the dataset had been told when a run was over, and when the next one began."""
        self._steps = [_step(*pair) for pair in zip(epochs, next_epochs, strict=False)]
        self._told_steps = [_step(was.number, now.number) for was, now in zip(told, next_told, strict=False)]

    def samplers(self, now: Sequence[int | None]) -> list[int | None]:
        """Return what samplers will have been told, who have been told this."""
        return [_plus(*pair) for pair in zip(now, self._steps, strict=True)]

    def dataset(self, told: Sequence[Told]) -> tuple[Told, ...]:
        """Return what the dataset will have been told, which has been told this."""
        steps = zip(told, self._told_steps, strict=True)
        return tuple(Told(_plus(each.number, step), each.calls + bool(step)) for each, step in steps)


class Foresight:
    """What one iterator over the data knows of its next run.

    Args:
        settings: Of the first run.
        told: What the dataset has heard.
    """

    def __init__(self, settings: Settings, told: Sequence[Told]) -> None:
        self._guess = Guess(settings, told)
        self._over: tuple[list[int | None], Sequence[Told]] | None = None  # what was told when this run was over
        self._foreseen: _Foreseen | None = None
        self._is_due = deque([True])  # of several threads that take, one begins the next run

    def foresee(
        self,
        settings: Settings,
        told: Sequence[Told],
        begin: Callable[..., Run],
    ) -> None:
        """Begin the next run, once, with the keys of its first batches.

        Args:
            settings: What it will be made with, if nobody changes them.
            told: What the dataset has heard.
            begin: Begins a run, of which it is given the keys of the first batches, the progress in which they are
                counted as read, what the dataset will have heard, and whether there are no other batches.
        """
        try:
            self._is_due.pop()
        except IndexError:
            return
        epochs = set_epochs(settings.index_sampler)
        self._over = epochs, told
        progress = Progress(knows_places=settings.knows_places)
        keys, is_whole = _draw(settings, self._guess.samplers(epochs), settings.window, progress)
        if keys:
            run = begin(keys, progress, self._guess.dataset(told), is_whole=is_whole)
            self._foreseen = _Foreseen(run, keys, is_whole, settings)

    def compare(self, settings: Settings, spec: EpochSpec, plan: Iterator[Any]) -> tuple[Run | None, Iterator[Any]]:
        """Return the run that was begun ahead, if it is the one that begins now, and the keys that are to be read.

        Args:
            settings: What is iterated over now.
            spec: Of the run that begins now.
            plan: The keys of its batches.
        """
        foreseen, self._foreseen = self._foreseen, None
        if self._over is not None:
            self._guess.learn(*self._over, set_epochs(settings.index_sampler), spec.epochs)
        self._is_due = deque([True])
        if foreseen is None or not foreseen.is_of(settings, spec):
            return None, plan
        keys = list(islice(plan, len(foreseen.keys) + foreseen.is_whole))
        return (foreseen.run, plan) if keys == foreseen.keys else (None, chain(keys, plan))


class _Foreseen(NamedTuple):
    """A run that was begun before it was asked for.

    Attributes:
        run: What workers are at.
        keys: Of its first batches.
        is_whole: There are no others.
        settings: What it is made with.
    """

    run: Run
    keys: list[Any]
    is_whole: bool
    settings: Settings

    def is_of(self, settings: Settings, spec: EpochSpec) -> bool:
        """Whether its batches are those of another run, as far as their keys are the same."""
        return _seen_by_workers(self.run.epoch) == _seen_by_workers(spec) and _same(self.settings, settings)


def make_foresight(settings: Settings, told: Sequence[Told]) -> Foresight | None:
    """Return what begins next runs ahead; warn and return None where none can be."""
    known = (*KNOWN_SAMPLERS, ElasticSampler)
    unknown = [each for each in samplers_within(settings.index_sampler) if type(each) not in known]
    if not unknown:
        return Foresight(settings, told)
    warn(
        f"prefetch_epochs has no effect: drawing the order of {type(unknown[0]).__name__} ahead might move more than "
        "random generators"
    )
    return None


def _draw(settings: Settings, epochs: Sequence[int | None], count: int, progress: Progress) -> tuple[list[Any], bool]:
    """Draw the keys of the first batches of a run, and whether they are all; leave generators and samplers as they are.

    Args:
        settings: What is iterated over.
        epochs: What samplers will have been told, from the outermost on.
        count: How many batches to draw.
        progress: Where they are counted.
    """
    index_sampler = settings.index_sampler
    samplers = samplers_within(index_sampler)
    rng = RNGSnapshot(settings.generator, samplers)
    generators, attributes = rng.capture(), [dict(vars(sampler)) for sampler in samplers]
    try:
        for sampler, epoch in zip(samplers, epochs, strict=True):
            if epoch is not None and epoch_of(sampler) != epoch:
                sampler.set_epoch(epoch)
        plan = Plan(index_sampler, iter(index_sampler), progress, Pace(), is_batched=settings.auto_collation)
        keys = list(islice(plan, count))
        return keys, len(keys) < count
    finally:
        for sampler, before in zip(samplers, attributes, strict=True):
            vars(sampler).update(before)
            for name in vars(sampler).keys() - before.keys():
                delattr(sampler, name)
        rng.restore(generators)


def _plus(number: int | None, step: int) -> int | None:
    return None if number is None else number + step


def _step(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else now - before


def _seen_by_workers(spec: EpochSpec) -> EpochSpec:
    """Return of a run what its batches are made from: not its number, nor how often the dataset was told something."""
    return spec._replace(number=0, epochs=tuple(Told(each.number) for each in spec.epochs))


def _same(one: Settings, other: Settings) -> bool:
    """Whether batches are made alike; how many workers make them does not matter."""
    if one is other:
        return True
    names = [each.name for each in dataclasses.fields(Settings) if each.name != "num_workers"]
    pairs = ((getattr(one, name), getattr(other, name)) for name in names)
    plain = (bool, int, float, str)
    return all(a is b or (isinstance(a, plain) and type(a) is type(b) and a == b) for a, b in pairs)
