"""A run as its loader remembers it: it makes its states, and says whether its iterator is in use.

A state says how far the run is, when its order was drawn, and where samplers and datasets are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from asyncloader.engine.progress import Progress, SamplerState
from asyncloader.epochs import EpochNotice
from asyncloader.log import log
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.snapshot import WorkerStart, as_plain, dataset_here
from asyncloader.observe.meter import Meter
from asyncloader.options import Options
from asyncloader.run.fits import describe
from asyncloader.run.plan import keeps_place, order_generators, own_state, samplers_within, written
from asyncloader.run.rng_snapshot import OrderDraw
from asyncloader.run.set_epochs import counting, next_epochs
from asyncloader.run.state import LoaderState
from asyncloader.seeding.own_generators import Key


def nobody() -> None:
    """Stand for an iterator that nobody was given yet."""


@dataclass(eq=False)
class Checkpointer:
    """Makes states of one run, and outlives its iterator. Held by that and by the loader.

    Attributes:
        options: The loader's.
        progress: How far it is.
        order: When its order was drawn.
        key: Base seed, runs that had it before, and rank of the data: batches are seeded by them.
        common: What all states in the run have in common: its number, its seeds, the epochs of samplers, what has to
            fit.
        notice: What `set_epoch` had told the dataset when it began.
        warned: The warnings that the loader has logged about its states, once each.
        is_resumed: It has begun from a state of the middle of a run.
        left_out: How many batches are still to be read and dropped, or ALL: see `LoaderState.left_out`.
        meter: Counts what happens in it; None before it is made.
        iterator: Refers to its iterator; returns None if that is gone.
    """

    options: Options
    progress: Progress
    order: OrderDraw
    key: tuple[int, int, int]
    common: LoaderState
    notice: EpochNotice
    warned: set[str]
    is_resumed: bool = False
    left_out: int = 0
    meter: Meter | None = None
    iterator: Callable[[], Any] = nobody
    _begun_at: float = field(default_factory=perf_counter)

    @property
    def used_at(self) -> float:
        """When the run began, or has given a batch last."""
        return self._begun_at if self.meter is None else max(self._begun_at, self.meter.taken_at)

    @property
    def given(self) -> int:
        """How many batches the run has given."""
        progress = self.progress
        return progress.now.position + len(progress.now.ahead) - progress.began[0]

    @property
    def is_alive(self) -> bool:
        """Whether the run may give another batch."""
        iterator = self.iterator()
        return iterator is not None and not (iterator.is_closed or self.progress.end_is_known)

    @property
    def was_a_look(self) -> bool:
        """Whether the run was left after a batch, or before it."""
        return self.given <= 1 and not (self.progress.end_is_known or self.is_alive)

    def epoch_spec(self, number: int, starts: dict[int, WorkerStart] | None) -> EpochSpec:
        """Return the run in the form that workers receive, as that of this number in their pool."""
        run = self.common
        notice = self.notice if self.options.has_workers else EpochNotice()  # without, the dataset has been told
        return EpochSpec(number, self.key, run.shared_seed, starts, notice, 0, run.epoch, run.generator_keys)

    def state(self, newest: Checkpointer | None = None) -> LoaderState:
        """Return the state as of what was yielded so far.

        Args:
            newest: The run that has read the sampler last, for a look beside this one: the next run comes after that.
        """
        state = self._after_the_run(newest or self) if self.progress.finished else self._within_the_run()
        if untold := self.progress.now.untold:
            warn_once(
                self.warned,
                f"The state of the dataset could not be taken ({untold}). "
                + (
                    "It is not in states of the loader."
                    if not self.options.is_iterable
                    else "To resume from here, batches since the last one are read again and dropped."
                ),
            )
        self.order.note_state()
        return state

    def carried(self) -> dict[int, WorkerStart] | None:
        """Return where the datasets are that outlast the run, for the next one; None if none does, or has a state."""
        options, ends, workers = self.options, self.progress.ends, self.progress.now.workers
        if not options.keeps_dataset or workers is None or (self.progress.finished and counting([options.dataset])):
            return None  # a stream whose epochs are counted needs no more than the number of the next one
        if not options.is_iterable:
            if options.persistent_workers:
                return workers
            return {0: dataset_here(options.dataset, options.snapshot_every)}
        return {worker: WorkerStart(0, ends.get(worker)) for worker in workers} if ends else None

    def samplers_after(self) -> SamplerState:
        """Return where samplers are before the next run, which iterates over them anew; None if they say it."""
        progress, index_sampler = self.progress, self.options.index_sampler
        if not (progress.finished or keeps_place(index_sampler)):
            return SamplerState(None)
        asked = progress.now.position + 1 if progress.finished else progress.asked  # the end is an answer
        # The next iterator may make use of a state that was loaded, and after which nothing is read. So one answer is
        # read again at least, if there was one.
        at = max(progress.began[0], asked - 1)
        samplers = progress.sampler_state(at)
        answers = samplers.drawn + asked - at
        has_no_state = samplers.passes and answers and not progress.sampler_states
        if samplers.state is None or has_no_state:
            return SamplerState(None)
        return SamplerState(samplers.state, 0, (*samplers.passes, answers))

    def _after_the_run(self, newest: Checkpointer) -> LoaderState:
        samplers = newest.samplers_after()
        if samplers.state is None:
            samplers = SamplerState(own_state(self.options.index_sampler))
        run, keeps_seed = self.common, self.options.persistent_workers
        state = _between_runs(self.options, run.epoch + 1, samplers, self.carried(), self.notice.epochs)
        seeds: dict[str, Any] = {"base_seed": run.base_seed, "reruns": run.reruns + 1, "shared_seed": run.shared_seed}
        return replace(
            state, finished=True, generators=run.generators, has_past=keeps_seed, **seeds if keeps_seed else {}
        )

    def at_beginning(self) -> LoaderState:
        """Return a state as of the beginning of the run, which `LoaderState.moved_to` takes on to any batch of it."""
        position, sample = self.progress.began
        return self._of_the_run(self.progress.sampler_state(position), position=position, sample=sample)

    def _within_the_run(self) -> LoaderState:
        progress, now = self.progress, None
        while now is not progress.now:  # another thread has taken a batch meanwhile: what belongs to that is read again
            now = progress.now
            # Where places are counted, those that were done with before the run, and were not read again yet, are not.
            position = min(now.position, progress.read) if progress.knows_places else now.position
            samplers, sample = progress.sampler_state(position), progress.first_sample(position)
        return self._of_the_run(
            samplers,
            position=position,
            ahead=[*range(position, now.position), *sorted(now.ahead)],
            check=self.order.check(),
            bad_count=now.bad_count,
            sample=sample,
            workers=as_plain(now.workers),
            next_worker=now.next_worker,
            left_out=self.left_out,
        )

    def _of_the_run(self, samplers: SamplerState, **how_far: Any) -> LoaderState:
        run = self.common
        fits = dict(run.fits or describe(self.options))
        if self.progress.sizes_differ:
            fits["batch_size"] = "changed in the middle of the epoch"  # which fits no loader
        return replace(
            run,
            **self.order.as_plain(),
            set_epochs=list(run.set_epochs),
            dataset_epochs=list(self.notice.epochs),
            **_of_samplers(self.options, samplers),
            fits=fits,
            **how_far,
        )


def warn_once(warned: set[str], text: str, *counts: int) -> None:
    """Log a warning about states, unless the loader has logged it before."""
    if text not in warned:
        warned.add(text)
        log.warning(text, *counts)


def warn_of_draws(index_sampler: Any, warned: set[str]) -> None:
    """Say that a sampler cannot be resumed exactly which draws while it is read, beside whatever else draws."""
    kinds = " over ".join(type(each).__name__ for each in samplers_within(index_sampler))
    warn_once(
        warned,
        f"The sampler ({kinds}) draws from global random generators while it is read, and not only when it begins: "
        "after a resume the rest of an epoch may be other samples than it would be, and some may come twice. Give the "
        "sampler a generator of its own, a seed, or a state (state_dict, load_state_dict).",
    )


def initial_state(options: Options, epoch: int, generators: dict[str, Key]) -> LoaderState:
    """Return the state of a loader that was not iterated over since so many runs."""
    here = WorkerStart() if options.has_workers else dataset_here(options.dataset, options.snapshot_every)
    samplers = SamplerState(own_state(options.index_sampler))
    state = _between_runs(options, epoch, samplers, None if here == WorkerStart() else {0: here})
    return replace(state, generators=json.dumps(generators))


def _between_runs(
    options: Options,
    epoch: int,
    samplers: SamplerState,
    workers: dict[int, WorkerStart] | None,
    last: Sequence[int | None] = (),
) -> LoaderState:
    """Return a state from which a run of this number begins, after one in which the dataset had been told these."""
    rng = order_generators(options)
    return LoaderState(
        epoch=epoch,
        at_iter=rng.as_text(rng.capture()),
        next_epochs=next_epochs(options, last),
        **_of_samplers(options, samplers),
        workers=as_plain(workers),
        fits=describe(options),  # anew: between two runs the trainer may change its samplers
    )


def _of_samplers(options: Options, samplers: SamplerState) -> dict[str, Any]:
    """Return what a state says of samplers."""
    states = written(options.index_sampler, samplers.state)
    return {"samplers": states, "drawn": samplers.drawn, "passes": list(samplers.passes)}
