"""How far one run over the data is. Passive: the plan and the consumer write, states are made of it.

    keys held ──> made ──> in hand ── now = a later place: counted ──> given

A batch is counted last, when it is made and nothing is left but to give it: by one assignment, which no handler of a
signal and no other thread can be in the middle of. So a state, which may be made by a handler in the middle of `next`,
or in another thread, reads `now` once and needs no lock of a call. Until the assignment an interrupt loses nothing: the
keys stay with the plan, and the batch in hand with the iterator, for the next call.

Progress outlives its iterator, so that a loader can tell the state of a run that was left with ``break``. Therefore it
refers to no iterator, and to no worker.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from asyncloader.engine.tracks import Progressing
from asyncloader.log import log
from asyncloader.messages.snapshot import Frozen, Untold, WorkerStart
from asyncloader.options import Options
from asyncloader.seeding.sample_context import Placed
from asyncloader.weak import while_alive

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class SamplerState(NamedTuple):
    """Where samplers are: so many answers after a state of theirs.

    A sampler may keep its place over epochs, and put it back no sooner than its next iterator is read. So a state of a
    pass that was over, or left, is not that of the pass after it: ``passes`` says what was read before that one.

    Attributes:
        state: The state; None if samplers provide none.
        passes: How many answers each earlier iterator has given since the state, its end included. Then each was
            dropped.
        drawn: How many batches the present iterator has given since the state, or since its beginning.
    """

    state: Frozen | None
    drawn: int = 0
    passes: tuple[int, ...] = ()


NO_SAMPLERS = SamplerState(None)


class Place(NamedTuple):
    """How far the consumers of a run are. Never changed: with another batch they are at another place.

    Attributes:
        position: In order, how many batches of the plan are done with.
        ahead: Numbers of later batches that are done with: they came out of order, or an earlier one is on its way.
        bad_count: Samples of the epoch that had raised.
        tracks: Where workers are, for datasets that they have a place or a state in; for others nothing.
        next_worker: The worker that gets the first batch.
        untold: Why the state of a dataset could not be taken.
    """

    position: int
    ahead: frozenset[int]
    bad_count: int
    tracks: dict[int, Progressing]
    next_worker: int | None
    untold: str

    @property
    def workers(self) -> dict[int, WorkerStart] | None:
        """Where each worker would begin; None where they have no place."""
        return {worker: track.start for worker, track in self.tracks.items()} or None

    def after(
        self,
        batch: int,
        worker: int = -1,
        in_stream: int = -1,
        snapshot: Any = None,
        keys: Any = None,
        bad_count: int = 0,
        *,
        in_order: bool = True,
    ) -> Place:
        """Return the place at which another batch is done with: given, or an error in its place, or left out.

        Args:
            batch: Number of the batch in the plan; -1 for an error beside it.
            worker: The worker that made it; -1 for none.
            in_stream: Number of the batch in the stream of its worker.
            snapshot: The dataset's state after it, if one was taken.
            keys: Where they may be needed to make the batch again.
            bad_count: Samples of it that had raised.
            in_order: All batches before it are done with.
        """
        position, ahead, bad, tracks, next_worker, untold = self
        if batch >= position:
            if in_order:
                position = batch + 1
            else:
                ahead |= {batch}
        if ahead:
            while position in ahead:
                position += 1
            ahead = frozenset(each for each in ahead if each > position)
        if tracks and worker >= 0:
            if isinstance(snapshot, Untold):
                untold = snapshot.reason
            track = copy.copy(tracks[worker])
            track.done(in_stream, snapshot, keys)
            tracks, next_worker = {**tracks, worker: track}, worker + 1
        return _new(Place, (position, ahead, bad + bad_count, tracks, next_worker, untold))


class Progress:
    """How much of one run was read and taken.

    Args:
        position: Where the run begins.
        ahead: Numbers of later batches that are done with.
        tracks: Where workers are at the beginning, for datasets that they have a place or a state in.
        next_worker: The worker that gets the first batch.
        bad_count: Samples that had raised before, and were left out or replaced.
        sample: Number of the first sample of the batch at ``position`` in the order of the epoch.
        knows_places: Batches are to know such numbers.
        samplers: Where samplers are.

    Attributes:
        knows_places: Numbers of samples in the order of the epoch are counted.
        samplers_before: Where samplers were before the run.
        began: The number of the batch at which it began, and of the first sample of that.
        lock: Held by whoever reads the sampler, of those that may: consumers, and whoever brings keys.
        now: How far consumers are. Written by the consumer whose turn it is, by one assignment.
        end_is_known: A consumer has been told that there is no more.
        is_broken: An error has ended the run, which has not come to its end.
        sizes_differ: The size of batches was changed inside the run.
        ends: By worker, the state of a stream after its end.
        follower: Called by a consumer that asks for its next batch.
    """

    end_is_known: bool

    def __init__(
        self,
        position: int = 0,
        ahead: Iterable[int] = (),
        *,
        in_order: bool = True,
        tracks: dict[int, Progressing] | None = None,
        next_worker: int | None = None,
        bad_count: int = 0,
        sample: int = 0,
        knows_places: bool = False,
        samplers: SamplerState = NO_SAMPLERS,
    ) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.now: Place = Place(position, frozenset(ahead), bad_count, tracks or {}, next_worker, "")
        self.began: tuple[int, int] = position, sample
        self.read = position  # batches of keys that the plan has given out
        self.asked = position  # answers of the sampler: batches, or its end; not of those that draw once
        self.asked_alone: int | None = None  # before another run of the loader began, which reads the same sampler
        self._firsts = {position: sample}  # of batches that were read, and of the next: the number of the first sample
        self.knows_places = knows_places
        self.sampler_states: deque[tuple[int, Frozen]] = deque()  # each after so many batches of keys
        self.samplers_before = samplers
        if samplers.state is not None and not samplers.passes:
            self.sampler_states.append((position - samplers.drawn, samplers.state))
        self.end_is_known = self.is_broken = self.sizes_differ = False
        self.follower: Callable[[], object] = bool  # nobody follows
        self.ends: dict[int, Frozen] = {}
        self.in_order = in_order

    def counts_simply(self, options: Options) -> bool:
        """Whether nothing but the position of `now` changes from batch to batch, where all goes well or is raised."""
        return self.in_order and options.on_error == "raise" and not (self.now.tracks or self.now.ahead)

    @property
    def finished(self) -> bool:
        """Whether everything was taken, and a consumer knows it."""
        return self.end_is_known and not self.is_broken

    def note_end(self) -> None:
        """Note that a consumer is told that there is no more."""
        is_first, self.end_is_known = not self.end_is_known, True
        if is_first and 0 < self.began[0] == self.now.position:
            log.warning(
                "The loaded state was taken after the last batch of its epoch: what is left of that is nothing. The "
                "next epoch begins with the next iterator."
            )

    def note_read(self, count: int) -> None:
        """Note that another batch of keys is read, which names so many samples. May be done again until `read` says so.

        Nobody asks any more where samplers were before the place that consumers are at; or which samples batches have
        that come before it.
        """
        position, states, firsts = min(self.now.position, self.read), self.sampler_states, self._firsts
        while len(states) > 1 and states[1][0] < position:  # one before the last answer is needed for `samplers_after`
            states.popleft()
        if self.knows_places:
            firsts[self.read + 1] = firsts[self.read] + count
            for batch in [batch for batch in firsts if batch < position]:
                firsts.pop(batch, None)

    def placed(self, batch: int, keys: Any) -> Any:
        """Return the keys of a batch that is not done with as those who make it want them."""
        return Placed(keys, self._firsts[batch]) if self.knows_places else keys

    def first_sample(self, number: int) -> int:
        """Return the number of the first sample of a batch in the epoch; -1 if nobody has counted them."""
        return self._firsts.get(number, -1) if self.knows_places else -1

    def follow(self, follower: Any) -> None:
        """Tell an iterator over keys how far consumers are, without keeping it alive."""
        follower.follow(partial(_given_since, self, self.now.position))
        self.follower = while_alive(follower.asked, None)

    def sampler_state(self, number: int) -> SamplerState:
        """Return the last known state of the samplers that is not beyond a batch."""
        for read, state in reversed(tuple(self.sampler_states)):
            if read <= number:
                return SamplerState(state, number - read)
        before = self.samplers_before
        is_of_pass = before.state is not None and not before.passes
        first = self.began[0] - before.drawn if is_of_pass else 0  # the batch that comes after the state
        return before._replace(drawn=number - first)


def _given_since(progress: Progress, position: int) -> int:
    return progress.now.position - position
