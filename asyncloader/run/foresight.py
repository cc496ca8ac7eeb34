"""The next run over the data, begun while the last batches of this one are taken: ``prefetch_epochs``.

    run n: everything is made, the last batches wait to be taken
      └─ foresee: draw the first keys of run n + 1, from copies of samplers and generators ──> Run n + 1 ──> session
    iter(loader): draws run n + 1 as ever ── the same keys, seeds and epochs? ─ yes ──> its batches are there
                                                                             └─ no ───> they are dropped, begin anew

Nothing that was foreseen is relied on: the run is drawn as it is without this, at the moment at which it is, and then
compared. So it does not matter what the trainer does between two runs, nor how well it was guessed; and nothing of the
user's is moved ahead of time, also where a Ctrl-C ends the drawing.

All of it happens in the consumer's thread: samplers are the user's.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise, repeat
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler

from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.epochs import Told, epoch_of
from asyncloader.messages.indices import listed
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.snapshot import Pace
from asyncloader.observe.notices import warn
from asyncloader.options import Options
from asyncloader.run.plan import Plan, samplers_within
from asyncloader.run.rng_snapshot import KNOWN_SAMPLERS
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.seeding.turns import untouched

log = logging.getLogger("asyncloader")

_BY_EPOCH = (DistributedSampler, ElasticSampler)


class Guess:
    """A guess at the calls of `set_epoch` before the next run: epochs change as they did between the last two runs.

    Before the second run, samplers that shuffle by epoch are expected to be told the next number. The dataset is
    expected to be told nothing, because a wrong guess would really be told to its copies.

    Args:
        samplers: From the outermost on.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._steps: list[Told | None] = [Told(int(isinstance(sampler, _BY_EPOCH))) for sampler in samplers]

    def learn(self, before: Sequence[Told], now: Sequence[Told]) -> None:
        """Learn from the epochs of samplers and dataset at the end of a run, and at the beginning of the next one."""
        self._steps = [_step(*pair) for pair in zip(before, now, strict=False)]

    def next(self, now: Sequence[Told]) -> list[Told] | None:
        """Return the expected epochs of samplers and dataset that are at these; None if nobody can know."""
        steps = [*self._steps, *repeat(Told(0), len(now) - len(self._steps))]
        known = [step for step in steps if step is not None]
        return [_plus(*pair) for pair in zip(now, known, strict=False)] if len(known) == len(steps) else None


class Foresight:
    """The knowledge of one iterator over the data about its next run.

    Args:
        options: The options of the first run.

    Attributes:
        told_in_vain: A run was begun ahead and dropped that has told copies of the dataset of an epoch. Copies have to
            be told the epoch of the run that begins, even if it is that one: batches were made since.
    """

    def __init__(self, options: Options) -> None:
        self.told_in_vain = False
        self._guess = Guess(samplers_within(options.index_sampler))
        self._tells = True  # copies of the dataset, ahead of time
        self._over: list[Told] | None = None  # what samplers and dataset were told when this run was over
        self._foreseen: _Foreseen | None = None
        self._is_due = deque([True])  # of several threads that take, one begins the next run

    def foresee(
        self,
        options: Options,
        told: Sequence[Told],
        told_before: Sequence[Told],
        begin: Callable[..., Run],
    ) -> None:
        """Begin the next run, once, with the keys of its first batches.

        Not if copies of the dataset would be told of it, and once were of one that did not come. Not if keys cannot be
        drawn either: whatever a sampler raises belongs to the next run, which draws them when it begins.

        Args:
            options: The options of the next run, if nobody changes them.
            told: The epochs that the dataset was told.
            told_before: The epochs that its copies were told in the run that is over.
            begin: Begins a run, of which it is given the keys of the first batches, the progress in which they are
                counted as read, what the dataset will have been told, and whether there are no other batches.
        """
        try:
            self._is_due.pop()
        except IndexError:
            return
        samplers = _told_samplers(options)
        self._over = [*samplers, *told]
        if (expected := self._guess.next(self._over)) is None:
            return
        next_epochs, next_told = [each.number for each in expected[: len(samplers)]], tuple(expected[len(samplers) :])
        if not (self._tells or next_told == told_before):
            return
        progress = Progress(knows_places=options.knows_places)
        try:
            keys, is_whole = _first_keys(options, next_epochs, options.window, progress)
            text = _written(keys)
        except Exception:
            log.debug("The next epoch could not be drawn ahead of its time.", exc_info=True)
            return
        if keys:
            self._foreseen = foreseen = _Foreseen(options, next_told != told_before, text, len(keys), is_whole)
            foreseen.run = begin(keys, progress, next_told, is_whole=is_whole)

    def compare(self, options: Options, epoch: EpochSpec, plan: Iterator[Any]) -> tuple[Run | None, Iterator[Any]]:
        """Return the run that was begun ahead, if it is the one that begins now, and the keys that are to be read.

        Args:
            options: The loader's, now.
            epoch: The run that begins now.
            plan: The keys of its batches.
        """
        foreseen, self._foreseen = self._foreseen, None
        over, self._over = self._over, None
        if over is not None:
            self._guess.learn(over, [*_told_samplers(options), *epoch.epochs])
        self._is_due = deque([True])
        self.told_in_vain = False
        if foreseen is None:
            return None, plan
        if foreseen.is_of(options, epoch):
            keys, error = _read(plan, foreseen.batches + foreseen.is_whole)
            if error is None and foreseen.has(keys):
                return foreseen.run, plan
            plan = chain(keys, _raised(error), plan)
        self.told_in_vain = foreseen.tells
        self._tells = self._tells and not foreseen.tells
        return None, plan


@dataclasses.dataclass
class _Foreseen:
    """A run that was begun before it was asked for.

    Attributes:
        options: The options that its batches are made with.
        tells: Copies of the dataset are told of an epoch in it.
        text: The keys of its batches, written down.
        batches: How many were begun.
        is_whole: The run has no other batches.
        run: The run itself; None if a Ctrl-C came before it was noted here.
    """

    options: Options
    tells: bool
    text: bytes
    batches: int
    is_whole: bool
    run: Run | None = None

    def has(self, keys: list[Any]) -> bool:
        """Whether these are the keys of its batches."""
        try:
            return _written(keys) == self.text
        except Exception:
            return False

    def is_of(self, options: Options, epoch: EpochSpec) -> bool:
        """Whether its batches are those of another run, as far as their keys are the same."""
        # A run's number says nothing of what its batches are made from.
        is_alike = self.run is not None and self.run.epoch._replace(number=epoch.number) == epoch
        return is_alike and _same(self.options, options)


def make_foresight(options: Options) -> Foresight | None:
    """Return what begins next runs ahead; warn and return None where none can be."""
    known = (*KNOWN_SAMPLERS, ElasticSampler)
    unknown = [each for each in samplers_within(options.index_sampler) if type(each) not in known]
    if not unknown:
        return Foresight(options)
    warn(
        f"prefetch_epochs has no effect: drawing the order of {type(unknown[0]).__name__} ahead might move more than "
        "random generators"
    )
    return None


def _told_samplers(options: Options) -> list[Told]:
    """Return what `set_epoch` has told samplers, from the outermost on, where their attribute ``epoch`` says so."""
    return [Told(epoch_of(sampler)) for sampler in samplers_within(options.index_sampler)]


def _first_keys(
    options: Options, epochs: Sequence[int | None], count: int, progress: Progress
) -> tuple[list[Any], bool]:
    """Draw the keys of the first batches of a run; return them, and whether they are all.

    Args:
        options: The loader's.
        epochs: The expected epochs of the samplers, from the outermost on.
        count: How many batches to draw.
        progress: Where they are counted.
    """
    sampler = _apart(samplers_within(options.index_sampler), epochs)
    plan = Plan(sampler, iter(sampler), progress, Pace(), is_batched=options.auto_collation)
    keys = list(islice(plan, count))
    return keys, len(keys) < count


def _apart(samplers: Sequence[Any], epochs: Sequence[int | None]) -> Any:
    """Return a copy of the outermost sampler that gives what it would give, and moves no generator but copies.

    Args:
        samplers: From the outermost on.
        epochs: Their expected epochs.
    """
    copies = [copy.copy(sampler) for sampler in samplers]
    for sampler, within in pairwise(copies):
        sampler.sampler = within
    for sampler, epoch in zip(copies, epochs, strict=True):
        if epoch is not None and epoch_of(sampler) != epoch:
            sampler.set_epoch(epoch)
        if hasattr(sampler, "generator"):
            sampler.generator = _generator_apart(sampler)
    return copies[0]


def _generator_apart(sampler: Any) -> torch.Generator:
    """Return a generator that gives what the sampler would draw, from its own generator or the global one.

    A RandomSampler without one seeds a new one by the first number that it draws from the global one.
    """
    own: torch.Generator | None = sampler.generator
    generator = torch.default_generator if own is None else own
    apart = torch.Generator(generator.device)
    with untouched():
        apart.set_state(generator.get_state())
    if own is None and isinstance(sampler, RandomSampler):
        seed = torch.empty((), dtype=torch.int64).random_(generator=apart)
        apart.manual_seed(int(seed))
    return apart


class _Writer(pickle.Pickler):
    """Writes keys down: the same for two only if they are, types and dtypes included, and as they are at this moment.

    They are not compared themselves: what ``==`` says of two tensors is a tensor, and a key that is a part of the
    sampler's own indices changes with them.
    """

    def reducer_override(self, thing: Any) -> Any:
        """Write of a tensor what is in it, and not all that it is a view of."""
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        numbers = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ([str(thing.dtype), list(thing.shape), numbers],)


def _written(keys: list[Any]) -> bytes:
    """Return the keys of batches as bytes that tell them from others."""
    text = io.BytesIO()
    _Writer(text, pickle.HIGHEST_PROTOCOL).dump([listed(each) for each in keys])
    return text.getvalue()


def _read(plan: Iterator[Any], count: int) -> tuple[list[Any], Exception | None]:
    """Read so many batches of keys, or until the sampler raises, or ends."""
    keys: list[Any] = []
    try:
        while len(keys) < count:
            keys.append(next(plan))
    except StopIteration:
        pass
    except Exception as error:
        return keys, error
    return keys, None


def _raised(error: Exception | None) -> Iterator[Any]:
    """Raise in the place of a batch of keys what the sampler has raised there."""
    if error is not None:
        raise error
    yield from ()


def _plus(now: Told, step: Told) -> Told:
    return Told(None if now.number is None else now.number + (step.number or 0), now.calls + step.calls)


def _step(before: Told, now: Told) -> Told | None:
    """Return by how much number and calls have changed; None if this was the first call, or the first number."""
    if (now.calls and not before.calls) or (before.number is None and now.number is not None):
        return None
    number = 0 if before.number is None or now.number is None else now.number - before.number
    return Told(number, now.calls - before.calls)


def _same(one: Options, other: Options) -> bool:
    """Whether batches are made alike; how many workers make them does not matter."""
    if one is other:
        return True
    names = [each.name for each in dataclasses.fields(Options) if each.name != "num_workers"]
    pairs = ((getattr(one, name), getattr(other, name)) for name in names)
    plain = (bool, int, float, str)
    return all(a is b or (isinstance(a, plain) and type(a) is type(b) and a == b) for a, b in pairs)
