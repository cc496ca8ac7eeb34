"""Which epochs a loader's samplers and dataset were told by `set_epoch`: by the user, by a state, or by the loader.

    loader.set_epoch ── note ──────────┐
    a state that a run begins from ────┼──> of_dataset, of_samplers ──> states, and copies of the dataset in workers
    dataset.set_epoch: its `epoch` ────┘

Samplers of ours count the loader's epochs: where nobody has set one since the last run began, a run begins the next.
Whoever was last counts. Where a sampler or dataset has an attribute ``epoch``, that says it; otherwise it is what is
remembered here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from asyncloader.epochs import Told, listeners, numbers, restore, told
from asyncloader.options import Options
from asyncloader.protocols import probe
from asyncloader.run.checkpoint import is_between_runs
from asyncloader.run.plan import samplers_within

log = logging.getLogger("asyncloader")


class Chosen(NamedTuple):
    """The epochs that each sampler, from the outermost on, and each listener of the dataset were told, or None."""

    samplers: list[int | None]
    dataset: list[int | None]


class SetEpochs:
    """What was told. Used in the threads of consumers; `of_copy` by a copy that is made in any thread.

    Attributes:
        of_past_run: What the dataset had been told before a past run. Workers that make a batch of that again are told
            this, and no epoch of now.
    """

    def __init__(self) -> None:
        self.of_past_run: tuple[Told, ...] = ()
        self._last = Told()  # by the loader
        self._by_state: tuple[list[int | None], list[int | None]] = [], []  # since then, to samplers and to the dataset
        self._is_telling = False  # a copy that is made now may have been told, or not
        self._is_set = False  # the epoch that begins, by the user
        self._has_warned = False
        self._calls_when_loaded = 0
        self._samplers_when_loaded: list[int | None] = []
        self._dataset_when_loaded: tuple[Told, ...] = ()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell samplers and the dataset of an epoch, in what is inside."""
        self._is_telling = True
        try:
            yield
        finally:
            self._is_telling = False

    def note(self, epoch: int) -> None:
        """Note that the loader has told samplers and the dataset of an epoch."""
        self._last = Told(epoch, self._last.calls + 1)
        self._by_state = [], []

    def begin_epoch(self, index_sampler: Any, *, last: Sequence[int | None] | None) -> None:
        """Have samplers that count epochs go on to the next one, unless the user has set one.

        Args:
            index_sampler: The outermost sampler.
            last: The epochs of samplers in the run that is over or was left; None if there was none, or it is resumed.
        """
        samplers = counting(index_sampler)
        # Another loader with the same sampler may have begun the epoch.
        if not self._is_set and last is not None and list(last) == self.of_samplers(index_sampler):
            for sampler, epoch in [(sampler, sampler.epoch + 1) for sampler in samplers]:  # one may set those within
                sampler.set_epoch(epoch)
        for sampler in samplers:
            sampler.is_epoch_set = False

    def look(self, index_sampler: Any) -> None:
        """Note whether the user has set the epoch that begins, before a state sets that of its own."""
        self._is_set = any(sampler.is_epoch_set for sampler in counting(index_sampler))

    def warn_of_same_order(self, options: Options, before: list[int | None], of_dataset: list[int | None]) -> None:
        """Warn once, at the second epoch, of what gives the order of the first one, because nobody has told it which.

        Args:
            options: The loader's.
            before: What samplers were told before the epoch that is over.
            of_dataset: The same of the dataset.
        """
        if self._has_warned or self._last.calls:
            return
        told = zip(before, self.of_samplers(options.index_sampler), strict=False)
        pairs = zip(samplers_within(options.index_sampler), told, strict=False)
        untold = [sampler for sampler, (was, now) in pairs if was == now]
        if any(isinstance(sampler, DistributedSampler) and sampler.shuffle for sampler in untold):
            self._has_warned = True
            log.warning(
                "DistributedSampler gives the same order in every epoch: nobody has called set_epoch. Call "
                "loader.set_epoch(epoch) before each epoch, or use asyncloader.samplers.ElasticSampler, which counts "
                "them."
            )
        copies = zip(listeners(options.dataset), of_dataset, self.of_dataset(options.dataset), strict=False)
        if options.has_workers and options.persistent_workers:
            same = [one for one, was, told in copies if was == told.number and not probe(one, "counts_epochs")]
            if same:
                self._has_warned = True
                log.warning(
                    "%s has set_epoch, and the copies of it in persistent workers were told no epoch: each epoch may "
                    "have the same order. Call loader.set_epoch(epoch) before each, which reaches the workers; a call "
                    "on the dataset itself does not. (counts_epochs = True, as an attribute of the dataset, says that "
                    "it counts by itself.)",
                    type(same[0]).__name__,
                )

    def note_state(self, state: dict[str, Any], options: Options) -> None:
        """Note what a state has told samplers and the dataset that a run begins from."""
        before = self.of_samplers(options.index_sampler), [each.number for each in self.of_dataset(options.dataset)]
        since = state["set_epochs"], state["dataset_epochs"]
        self._by_state = _changed(before[0], since[0]), _changed(before[1], since[1])

    def note_load(self, options: Options) -> None:
        """Note what is told when a state is loaded: an epoch that is set afterwards goes before the state's."""
        self._calls_when_loaded = self._last.calls
        for sampler in counting(options.index_sampler):
            sampler.is_epoch_set = False
        self._samplers_when_loaded = self.of_samplers(options.index_sampler)
        self._dataset_when_loaded = self.of_dataset(options.dataset)

    def of_samplers(self, index_sampler: Any) -> list[int | None]:
        """Return what samplers were told, from the outermost on."""
        return numbers(samplers_within(index_sampler), self._last.number, self._by_state[0])

    def of_dataset(self, dataset: Any) -> tuple[Told, ...]:
        """Return what each of a dataset's listeners was told."""
        return told(dataset, self._last, self._by_state[1])

    def of_copy(self, dataset: Any) -> tuple[Told, ...]:
        """Return what each was told of a copy of the dataset that is made now; nothing while the dataset is told."""
        return () if self._is_telling else self.of_dataset(dataset)

    def of_samplers_since_load(self, index_sampler: Any) -> list[int | None]:
        """Return what samplers were told since a state was loaded; None for those that may have been told nothing."""
        now = self.of_samplers(index_sampler)
        if self._last.calls > self._calls_when_loaded:  # all of them, even if it is the number that they had
            return now
        pairs = zip(now, self._samplers_when_loaded, strict=False)
        return [epoch if epoch != before else None for epoch, before in pairs]

    def of_another(self, state: dict[str, Any], options: Options) -> Chosen | None:
        """Return what was told since a state was loaded, if that is another epoch than the one the state is in."""
        if is_between_runs(state):
            return None
        dataset = zip(self.of_dataset(options.dataset), self._dataset_when_loaded, strict=False)
        chosen = Chosen(
            self.of_samplers_since_load(options.index_sampler),
            [now.number if now != before else None for now, before in dataset],
        )
        is_news = _is_news(chosen.samplers, state["set_epochs"]) or _is_news(chosen.dataset, state["dataset_epochs"])
        return chosen if is_news else None

    def is_another(self, state: dict[str, Any], index_sampler: Any) -> bool:
        """Whether samplers were told another epoch since a state was loaded than the one that the state is in."""
        chosen = self.of_samplers_since_load(index_sampler)
        return not is_between_runs(state) and _is_news(chosen, state["set_epochs"])

    def choose(self, chosen: Chosen, options: Options) -> None:
        """Tell samplers and the dataset of the epoch that was set after a state was loaded."""
        with self.telling():
            restore(samplers_within(options.index_sampler), chosen.samplers)
            restore(listeners(options.dataset), chosen.dataset)
            self._by_state = chosen.samplers, chosen.dataset

    def since_load(self, state: dict[str, Any] | None, options: Options) -> tuple[Told, ...]:
        """Return what the dataset was told since a state of the end of a run was loaded; nothing for other states."""
        now = self.of_dataset(options.dataset)
        is_news = state is not None and is_between_runs(state) and now != self._dataset_when_loaded
        return now if is_news else ()


def counting(index_sampler: Any) -> list[Any]:
    """List the samplers whose epochs the loader counts: `is_epoch_set` says whether the user has set the next one."""
    return [each for each in samplers_within(index_sampler) if isinstance(probe(each, "is_epoch_set"), bool)]


def _is_news(chosen: list[int | None], known: Sequence[int | None]) -> bool:
    pairs = zip(chosen, chain(known, repeat(None)), strict=False)
    return any(now is not None and now != (before or 0) for now, before in pairs)


def _changed(before: list[int | None], since: Sequence[int | None]) -> list[int | None]:
    return [was if now is None else now for was, now in zip(before, chain(since, repeat(None)), strict=False)]
