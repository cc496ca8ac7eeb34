"""Which epochs a loader's samplers and dataset were told by `set_epoch`: by the user, by a state, or by the loader.

    loader.set_epoch ──────────────────┐
    a state that a run begins from ────┼──> of_dataset, of_samplers ──> states, and copies of the dataset in workers
    dataset.set_epoch: its `epoch` ────┘

Samplers and streams of ours count the loader's epochs: where nobody has set one since the last run began, a run begins
the next. Whoever was last counts. Where a sampler or dataset has an attribute ``epoch``, that says it; otherwise it is
what is remembered here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from torch.utils.data import DistributedSampler

from asyncloader.epochs import changed, hears, latest, listeners, numbers, tell
from asyncloader.log import log
from asyncloader.options import Options
from asyncloader.protocols import probe
from asyncloader.run.plan import samplers_within
from asyncloader.run.state import LoaderState


class SetEpochs:
    """What was told. Used in the threads of consumers.

    Lists of epochs have those of samplers first, from the outermost on, and then those of the dataset's listeners: None
    where nothing was told.

    Attributes:
        count: How often the user has set an epoch.
        of_past_run: What the dataset had been told before a past run. Workers that make a batch of that again are told
            this, and no epoch of now.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.of_past_run: list[int | None] = []
        self._told: list[int | None] = []  # by the loader or a state: of those that do not show it
        self._when_loaded: list[int | None] = []
        self._is_set = False  # the epoch that begins, by the user
        self._is_quiet = False  # the loader has told an epoch, or has warned that nobody does

    def set(self, index_sampler: Any, dataset: Any, epoch: int) -> None:
        """Tell samplers and the dataset of an epoch, as `DataLoader.set_epoch` does."""
        things = [*samplers_within(index_sampler), *listeners(dataset)]
        for thing in filter(hears, things):
            thing.set_epoch(epoch)
        self._told = [epoch] * len(things)
        self.count += 1
        self._when_loaded = []  # whatever was known then, this is news
        self._is_quiet = True

    def begin_epoch(self, options: Options, *, last: Sequence[int | None] | None) -> None:
        """Have samplers and streams that count epochs go on to the next one, unless the user has set one.

        Args:
            options: The loader's.
            last: The epochs in the run that is over or was left; None if there was none, or it is resumed.
        """
        counters = counting(_things(options))
        if not self._is_set and last is not None:
            things, now, samplers = _things(options), self.now(options), len(samplers_within(options.index_sampler))
            parts = slice(0, samplers), slice(samplers, None)
            # Another loader with the same sampler may have begun the epoch.
            same = [each for part in parts if [*last[part]] == now[part] for each in things[part]]
            for counter, epoch in [(each, each.epoch + 1) for each in counting(same)]:  # one may set those within
                counter.set_epoch(epoch)
        for counter in counters:
            counter.is_epoch_set = False

    def look(self, options: Options) -> None:
        """Note whether the user has set the epoch that begins, before a state sets that of its own."""
        self._is_set = any(counter.is_epoch_set for counter in counting(_things(options)))

    def warn_of_same_order(self, options: Options, before: Sequence[int | None]) -> None:
        """Warn once, at the second epoch, of what gives the order of the first one, because nobody has told it which.

        Args:
            options: The loader's.
            before: What was told before the epoch that is over.
        """
        if self._is_quiet:
            return
        num_samplers = len(samplers_within(options.index_sampler))
        are_copied = options.has_workers and options.persistent_workers
        told = zip(_things(options), before, self.now(options), strict=False)
        for place, (thing, was, now) in enumerate(told):
            shuffles = isinstance(thing, DistributedSampler) and thing.shuffle
            if was == now and (are_copied and not probe(thing, "counts_epochs") if place >= num_samplers else shuffles):
                self._is_quiet = True
                log.warning(
                    "%s gives the same order in every epoch, it seems: nobody has told it which one begins. Call "
                    "loader.set_epoch(epoch) before each, which reaches copies of a dataset in persistent workers as "
                    "well, in contrast to a call on the dataset itself; or use asyncloader.samplers.ElasticSampler, "
                    "which counts epochs. (counts_epochs = True, as an attribute of a dataset, says that it does.)",
                    type(thing).__name__,
                )
                return

    def note_state(self, state: LoaderState, options: Options) -> None:
        """Note what a state has told samplers and the dataset that a run begins from."""
        self._told = [was if now is None else now for was, now in zip(self.now(options), _told_by(state), strict=False)]

    def note_load(self, options: Options, state: LoaderState | None = None) -> None:
        """Note what is told when a state is loaded: an epoch that is set afterwards goes before the state's.

        An epoch that had been set for the next run when the state was taken is set now.
        """
        for counter in counting(_things(options)):
            counter.is_epoch_set = False
        self._when_loaded = self.now(options)
        if state is not None:
            for place, (thing, epoch) in enumerate(zip(_things(options), state.next_epochs, strict=False)):
                if epoch is not None and hears(thing):
                    thing.set_epoch(epoch)
                    self._when_loaded[place] = None
            self._told = [*latest(self.now(options), state.next_epochs)]

    def now(self, options: Options) -> list[int | None]:
        """Return what samplers and the dataset's listeners were told."""
        return numbers(_things(options), self._told)

    def of_samplers(self, index_sampler: Any) -> list[int | None]:
        """Return what samplers were told."""
        return numbers(samplers_within(index_sampler), self._told)

    def of_dataset(self, options: Options) -> list[int | None]:
        """Return what each of the dataset's listeners was told."""
        return self.of_past_run or self.now(options)[len(samplers_within(options.index_sampler)) :]

    def since_load(self, options: Options) -> tuple[int | None, ...]:
        """Return what was told since a state was loaded; None for those that may have been told nothing."""
        return changed(self.now(options), self._when_loaded)

    def of_another(self, state: LoaderState, options: Options) -> tuple[int | None, ...]:
        """Return what was told since a state was loaded, if that is another epoch than the one the state is in.

        If another had been set when the state was taken, it is in none: each epoch begins at its beginning then.
        """
        chosen = self.since_load(options)
        pairs = zip(chosen, _told_by(state), strict=False)
        is_news = any(now is not None and now != (before or 0) for now, before in pairs)
        # A state of torchdata's does not say which epoch it is in.
        return chosen if (is_news or state.next_epochs) and state.set_epochs and not state.is_between_runs else ()

    def choose(self, chosen: Sequence[int | None], options: Options) -> None:
        """Tell samplers and the dataset of the epoch that was set after a state was loaded."""
        tell(_things(options), chosen)
        self._told = list(chosen)


def _things(options: Options) -> list[Any]:
    """List the samplers and the listeners of the dataset."""
    return [*samplers_within(options.index_sampler), *listeners(options.dataset)]


def _told_by(state: LoaderState) -> Iterator[int | None]:
    return chain(state.set_epochs, state.dataset_epochs, repeat(None))


def counting(things: Iterable[Any]) -> list[Any]:
    """List those whose epochs the loader counts, of samplers and datasets: those that say whether the next is set."""
    return [each for each in things if isinstance(probe(each, "is_epoch_set"), bool)]


def next_epochs(options: Options, last: Sequence[int | None] = ()) -> list[int | None]:
    """Return which epochs are next of those that count: of samplers where one was set, of datasets in any case.

    Otherwise the samplers' own states say it. Lists with no epoch are empty.

    Args:
        options: The loader's.
        last: The epochs of the dataset's listeners in the run that is over.
    """
    of_samplers = [
        each.epoch if counting([each]) and each.is_epoch_set else None
        for each in samplers_within(options.index_sampler)
    ]
    pairs = zip(listeners(options.dataset), chain(last, repeat(None)), strict=False)
    of_dataset = [
        each.epoch + (not each.is_epoch_set and each.epoch == before) if counting([each]) else None
        for each, before in pairs
    ]
    found = of_samplers + of_dataset
    return found if any(epoch is not None for epoch in found) else []
