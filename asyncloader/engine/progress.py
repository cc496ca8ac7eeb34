"""How far one run over the data is. Passive: the plan and the consumer write, states are made of it.

    ready ── Taking.take ──> Call: on its way ── call.item = None, then `return` ──> given: counted in `Progress.now`
      the next call takes it again <── call.is_interrupted = True

A signal handler may raise in the consumer's thread after any call of a function, and at the beginning of one; CPython
looks for signals nowhere else but where loops jump back. Whatever is taken or counted is therefore worked out first,
and then made so by assignments alone. So there is no moment between a batch that is counted and the ``return`` that
gives it, and nothing has to be put back or undone: neither after one interrupt nor after two.

Progress outlives its iterator, so that a loader can tell the state of a run that was left with ``break``. Therefore it
refers to no iterator, and to no worker.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from asyncloader.engine.tracks import Progressing, make_tracks
from asyncloader.messages.snapshot import Frozen, Untold, WorkerStart
from asyncloader.protocols import FollowsConsumers
from asyncloader.seeding.sample_context import Placed
from asyncloader.weak import while_alive

log = logging.getLogger("asyncloader")

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


class Given(NamedTuple):
    """The facts of a batch that count when the consumer has it, or its error, or when it is left out.

    Attributes:
        batch: Number of the batch in the plan; -1 for an error beside it.
        worker: The worker that made it; -1 for none.
        in_stream: Number of the batch in the stream of its worker.
        snapshot: The dataset's state after it, if one was taken.
        keys: Where they may be needed to make the batch again.
        bad_count: Samples of it that had raised.
    """

    batch: int
    worker: int = -1
    in_stream: int = -1
    snapshot: Any = None
    keys: Any = None
    bad_count: int = 0


class Call:
    """A call of `next` or `anext`.

    ``given`` is written under the lock; ``item`` is set under it, and cleared without it. ``is_interrupted`` is written
    without it.

    Attributes:
        given: The facts of the batch that is on its way to the caller.
        item: The batch; None when the caller has it.
        is_interrupted: An exception has ended the call before the caller had the batch.
    """

    given: Given
    item: Any = None
    is_interrupted = False


class Place(NamedTuple):
    """How far the consumers of a run are. Never changed: with another batch they are at another place.

    Attributes:
        position: In order, how many batches of the plan are done with.
        ahead: Numbers of later batches that are done with: they came out of order, or an earlier one is on its way.
        bad_count: Samples of the epoch that had raised.
        tracks: Where workers are, for datasets that they have a place or a state in.
        next_worker: The worker that gets the first batch.
        untold: Why the state of a dataset could not be taken.
    """

    position: int
    ahead: frozenset[int]
    bad_count: int
    tracks: dict[int, Progressing] | None
    next_worker: int | None
    untold: str

    @property
    def workers(self) -> dict[int, WorkerStart] | None:
        """Where each worker would begin."""
        return None if self.tracks is None else {worker: track.start for worker, track in self.tracks.items()}

    def after(self, given: Given, *, is_ahead: bool) -> Place:
        """Return the place at which another batch is done with, one before it may be missing."""
        position, ahead, bad_count, tracks, next_worker, untold = self
        batch, worker, in_stream, snapshot, keys, bad = given
        if is_ahead and batch >= position:
            ahead |= {batch}
        elif batch >= position:
            position = batch + 1
        if ahead:
            while position in ahead:
                position += 1
            ahead = frozenset(each for each in ahead if each > position)
        if tracks is not None and worker >= 0:
            if isinstance(snapshot, Untold):
                untold = snapshot.reason
            track = copy.copy(tracks[worker])
            track.done(in_stream, snapshot, keys)
            tracks, next_worker = {**tracks, worker: track}, worker + 1
        return _new(Place, (position, ahead, bad_count + bad, tracks, next_worker, untold))


class Progress:
    """How much of one run was read and taken.

    Args:
        position: Where the run begins.
        ahead: Numbers of later batches that are done with.
        workers: Where workers are at the beginning, for datasets that they have a place or a state in.
        next_worker: The worker that gets the first batch.
        key: The seeds of batches of a map-style dataset: base seed, epoch, rank. None for a stream.
        overlaps: A worker has samples of several batches in work at once.
        bad_count: Samples that had raised before, and were left out or replaced.
        sample: Number of the first sample of the batch at ``position`` in the order of the epoch.
        knows_places: Batches are to know such numbers.

    Attributes:
        samplers_before: Where samplers were before the run.
        began: The number of the batch at which it began, and of the first sample of that.
        lock: Held by whoever reads or takes, and by who makes a state of it. A handler of a signal may make one in the
            middle of that, in the same thread: so it can be taken again.
        counted: How far consumers are, and the calls that are not counted in this: in the order of their batches.
        end_is_known: A consumer has been told that there is no more.
        is_broken: An error has ended the run, which has not come to its end.
        ends: By worker, the state of a stream after its end.
        follower: Called by a consumer that asks for its next batch.
    """

    def __init__(
        self,
        position: int = 0,
        ahead: set[int] | None = None,
        *,
        in_order: bool = True,
        workers: dict[int, WorkerStart] | None = None,
        next_worker: int | None = None,
        key: tuple[int, int, int] | None = None,
        overlaps: bool = False,
        bad_count: int = 0,
        sample: int = 0,
        knows_places: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        tracks = None if workers is None else make_tracks(workers, key, overlaps=overlaps)
        place = Place(position, frozenset(ahead or ()), bad_count, tracks, next_worker, "")
        self.counted: tuple[Place, tuple[Call, ...]] = place, ()
        self.began = position, sample
        self.read = position  # batches of keys that the plan has given out
        self.asked = position  # answers of the sampler: batches, or its end; not of those that draw once
        self.asked_alone: int | None = None  # before another run of the loader began, which reads the same sampler
        self.named_samples = 0  # that those of this run have named
        self._next_sample = sample  # after what was read
        self._firsts: dict[int, int] = {}  # of batches that were read, the number of the first sample
        self._oldest_first = position
        self._knows_places = knows_places
        self.sampler_states: deque[tuple[int, Frozen]] = deque()  # each after so many batches of keys
        self.samplers_before = SamplerState(None)
        self.end_is_known = self.is_broken = False
        self.follower: Callable[[], object] = bool  # nobody follows
        self.ends: dict[int, Frozen] = {}
        self.in_order = in_order

    @property
    def now(self) -> Place:
        """How far consumers are. Another consumer may be further at the next look, also while the lock is held."""
        return self.folded()[0]

    @property
    def has_read_on(self) -> bool:
        """Whether the sampler was read for this run after another run of the loader had begun."""
        return self.asked_alone is not None and self.asked > self.asked_alone

    @property
    def finished(self) -> bool:
        """Whether everything was taken, and a consumer knows it."""
        return self.end_is_known and not self.is_broken and not self.folded()[1]

    def note_end(self) -> None:
        """Note that a consumer is told that there is no more."""
        is_first, self.end_is_known = not self.end_is_known, True
        if is_first and 0 < self.began[0] == self.now.position:
            log.warning(
                "The loaded state was taken after the last batch of its epoch: what is left of that is nothing. The "
                "next epoch begins with the next iterator."
            )

    def begin_after(self, samplers: SamplerState) -> None:
        """Note where samplers were before the run."""
        if samplers.state is not None and not samplers.passes:
            self.sampler_states.append((self.now.position - samplers.drawn, samplers.state))
        self.samplers_before = samplers

    def read_batch(self, count: int) -> None:
        """Another batch of keys was read, which names so many samples."""
        if self._knows_places:
            self._firsts[self.read] = self._next_sample
            self._next_sample += count
        self.read += 1

    def placed(self, batch: int, keys: Any) -> Any:
        """Return the keys of a batch that is not done with as those who make it want them."""
        return Placed(keys, self._firsts[batch]) if self._knows_places else keys

    def first_sample(self, number: int) -> int:
        """Return the number of the first sample of a batch in the epoch; -1 if nobody has counted them."""
        return self._firsts.get(number, self._next_sample) if self._knows_places else -1

    def counted_until(self, position: int) -> int:
        """Return the last batch up to this one of which it is known how many samples came before it.

        Batches that were done with before the run lie between them, which were not read again yet.
        """
        return min(position, self.read) if self._knows_places else position

    def folded(self) -> tuple[Place, tuple[Call, ...]]:
        """Return how far consumers are with all that they have been given, and the calls that are not over yet."""
        place, calls = self.counted
        open_calls: tuple[Call, ...] = ()
        for call in calls:
            if call.item is None:
                place = place.after(call.given, is_ahead=bool(open_calls) or not self.in_order)
            else:
                open_calls = (*open_calls, call)
        return place, open_calls

    def follow(self, follower: FollowsConsumers) -> None:
        """Tell an iterator over keys how far consumers are, without keeping it alive."""
        follower.follow(partial(_given_since, self, self.now.position))
        self.follower = while_alive(follower.asked, None)

    def forget(self, position: int) -> None:
        """Drop what is known of batches before this one."""
        states = self.sampler_states
        while len(states) > 1 and states[1][0] < position:  # one before the last answer is needed for `samplers_after`
            states.popleft()
        while self._knows_places and self._oldest_first < position:
            self._firsts.pop(self._oldest_first, None)
            self._oldest_first += 1

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
