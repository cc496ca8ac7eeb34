"""Which epochs a loader's samplers and dataset were told by `set_epoch`: by the user, by a state, or by the loader.

    loader.set_epoch ── note ──────────┐
    a state that a run begins from ────┼──> of_dataset, of_samplers ──> states, and copies of the dataset in workers
    dataset.set_epoch: its `epoch` ────┘

Samplers of ours count the loader's epochs: where nobody has set one since the last run began, a run begins the next.
Whoever was last counts. Where a sampler or dataset has an attribute ``epoch``, that says it; otherwise it is what is
remembered here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from asyncloader.epochs import changed, listeners, numbers, tell
from asyncloader.options import Options
from asyncloader.protocols import probe
from asyncloader.run.plan import samplers_within
from asyncloader.run.state import LoaderState

log = logging.getLogger("asyncloader")


class Chosen(NamedTuple):
    """The epochs that each sampler, from the outermost on, and each listener of the dataset were told, or None."""

    samplers: list[int | None]
    dataset: list[int | None]


class SetEpochs:
    """What was told. Used in the threads of consumers.

    Attributes:
        of_past_run: What the dataset had been told before a past run. Workers that make a batch of that again are told
            this, and no epoch of now.
    """

    def __init__(self) -> None:
        self.of_past_run: list[int | None] = []
        self._number: int | None = None  # by the loader, last
        self._by_state = Chosen([], [])  # since then
        self._is_set = False  # the epoch that begins, by the user
        self._has_warned = False
        self._is_told_since_load = False  # by the loader, be it the number that all have shown
        self._when_loaded = Chosen([], [])

    def note(self, epoch: int) -> None:
        """Note that the loader has told samplers and the dataset of an epoch."""
        self._number, self._is_told_since_load = epoch, True
        self._by_state = Chosen([], [])

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
        if self._has_warned or self._number is not None:
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
            same = [one for one, was, told in copies if was == told and not probe(one, "counts_epochs")]
            if same:
                self._has_warned = True
                log.warning(
                    "%s has set_epoch, and the copies of it in persistent workers were told no epoch: each epoch may "
                    "have the same order. Call loader.set_epoch(epoch) before each, which reaches the workers; a call "
                    "on the dataset itself does not. (counts_epochs = True, as an attribute of the dataset, says that "
                    "it counts by itself.)",
                    type(same[0]).__name__,
                )

    def note_state(self, state: LoaderState, options: Options) -> None:
        """Note what a state has told samplers and the dataset that a run begins from."""
        before = self._now(options)
        since = state.set_epochs, state.dataset_epochs
        self._by_state = Chosen(*map(_merged, before, since))

    def note_load(self, options: Options) -> None:
        """Note what is told when a state is loaded: an epoch that is set afterwards goes before the state's."""
        for sampler in counting(options.index_sampler):
            sampler.is_epoch_set = False
        self._is_told_since_load, self._when_loaded = False, self._now(options)

    def _now(self, options: Options) -> Chosen:
        return Chosen(self.of_samplers(options.index_sampler), self.of_dataset(options.dataset))

    def of_samplers(self, index_sampler: Any) -> list[int | None]:
        """Return what samplers were told, from the outermost on."""
        return numbers(samplers_within(index_sampler), self._number, self._by_state.samplers)

    def of_dataset(self, dataset: Any) -> list[int | None]:
        """Return what each of a dataset's listeners was told."""
        return self.of_past_run or numbers(listeners(dataset), self._number, self._by_state.dataset)

    def since_load(self, options: Options) -> Chosen:
        """Return what was told since a state was loaded; None for those that may have been told nothing."""
        now = self._now(options)
        if self._is_told_since_load:
            return now
        return Chosen(*(list(changed(*pair)) for pair in zip(now, self._when_loaded, strict=True)))

    def of_another(self, state: LoaderState, options: Options) -> Chosen | None:
        """Return what was told since a state was loaded, if that is another epoch than the one the state is in."""
        chosen = self.since_load(options)
        is_news = _is_news(chosen.samplers, state.set_epochs) or _is_news(chosen.dataset, state.dataset_epochs)
        # A state of torchdata's does not say which epoch it is in.
        return chosen if is_news and state.set_epochs and not state.is_between_runs else None

    def choose(self, chosen: Chosen, options: Options) -> None:
        """Tell samplers and the dataset of the epoch that was set after a state was loaded."""
        tell(samplers_within(options.index_sampler), chosen.samplers)
        tell(listeners(options.dataset), chosen.dataset)
        self._by_state = chosen


def counting(index_sampler: Any) -> list[Any]:
    """List the samplers whose epochs the loader counts: `is_epoch_set` says whether the user has set the next one."""
    return [each for each in samplers_within(index_sampler) if isinstance(probe(each, "is_epoch_set"), bool)]


def _is_news(chosen: list[int | None], known: Sequence[int | None]) -> bool:
    pairs = zip(chosen, chain(known, repeat(None)), strict=False)
    return any(now is not None and now != (before or 0) for now, before in pairs)


def _merged(before: list[int | None], since: Sequence[int | None]) -> list[int | None]:
    return [was if now is None else now for was, now in zip(before, chain(since, repeat(None)), strict=False)]
