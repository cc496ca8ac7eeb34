"""How far one run over the data is. Passive: the plan and the consumer write, states are made of it.

It outlives the iterator, so that a loader can tell the state of a run that was left with ``break``; so it holds no
iterator, and no worker.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

from asyncloader.engine.tracks import make_tracks
from asyncloader.seeding.sample_context import Placed
from asyncloader.workers.protocol.snapshot import Frozen, Start, Untold


class SamplerState(NamedTuple):
    """Where samplers are: so many batches after a state of theirs.

    With ``is_over`` that was in the epoch before, which has come to its end then, and another one has begun.
    """

    state: Frozen | None
    drawn: int = 0
    is_over: bool = False


class Progress:
    """What was read and taken of one run.

    In order, `position` is the number of batches of the plan that are done with. Out of order some behind it are done
    with as well: these are `ahead`.

    Args:
        position: Where the run begins.
        ahead: What is done with beyond that.
        workers: Where workers are at the beginning, for datasets that they have a place or a state in. Kept up to date
            with what is done with.
        next_worker: Who gets the first batch.
        key: Of a map-style dataset: what batches are seeded with. None for a stream.
        overlaps: A worker has samples of several batches in work at once.
        bad_count: Samples that had raised before, and were left out or replaced.
        sample: Number of the first sample of the batch at ``position`` in the order of the epoch.
        knows_places: Batches are to know such numbers.

    Attributes:
        samplers_before: Where samplers were before the run.
        lock: Held by whoever reads or takes, and by who makes a state of it. A handler of a signal may make one in the
            middle of that, in the same thread: so it can be taken again.
        ends: By worker, the state of a stream after its end.
        num_workers: How many there are now, where their number looks after itself.
    """

    def __init__(
        self,
        position: int = 0,
        ahead: set[int] | None = None,
        *,
        in_order: bool = True,
        workers: dict[int, Start] | None = None,
        next_worker: int | None = None,
        key: tuple[int, int, int] | None = None,
        overlaps: bool = False,
        bad_count: int = 0,
        sample: int = 0,
        knows_places: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.position = position
        self.ahead = ahead or set()
        self.read = position  # batches of keys that were read from the sampler
        self.named_samples = 0  # that those of this run have named
        self._next_sample = sample  # after what was read
        self._firsts: dict[int, int] = {}  # of batches that were read, the number of the first sample
        self._oldest_first = position
        self._knows_places = knows_places
        self.sampler_states: deque[tuple[int, Frozen]] = deque()  # each after so many batches of keys
        self.samplers_before = SamplerState(None)
        self.set_epochs: list[int | None] = []  # what `set_epoch` of samplers had been called with
        self.finished = False
        self.workers = workers
        self.ends: dict[int, Frozen] = {}
        self.untold = ""  # why the state of a dataset could not be taken
        self.next_worker = next_worker
        self.bad_count = bad_count
        self.num_workers: int | None = None
        self._in_order = in_order
        self._tracks = make_tracks(workers, key, overlaps=overlaps)

    def begin_after(self, samplers: SamplerState) -> None:
        """Note where samplers were before the run."""
        if samplers.state is not None and not samplers.is_over:
            self.sampler_states.append((self.position - samplers.drawn, samplers.state))
        self.samplers_before = samplers

    def read_batch(self, count: int) -> None:
        """Another batch of keys was read, which names so many samples."""
        if self._knows_places:
            self._firsts[self.read] = self._next_sample
            self._next_sample += count
        self.read += 1

    def placed(self, seq: int, keys: Any) -> Any:
        """Return the keys of a batch that is not done with as those who make it want them."""
        return Placed(keys, self._firsts[seq]) if self._knows_places else keys

    @property
    def sample(self) -> int:
        """Number of the first sample of the batch at `position` in the epoch; -1 if nobody has counted them."""
        return self._firsts.get(self.position, self._next_sample) if self._knows_places else -1

    def answered(self, worker: int, snapshot: Any, number: int = -1, keys: Any = None) -> None:
        """What is done with came from this worker, and is this batch of its stream; its dataset was in this state."""
        if self.workers is not None:
            if isinstance(snapshot, Untold):
                self.untold = snapshot.reason
            self._tracks[worker].done(number, snapshot, keys)
            self.workers[worker] = self._tracks[worker].start
            self.next_worker = worker + 1

    def done(self, seq: int) -> None:
        """A batch was yielded, or left out, or its error raised."""
        if self._in_order:
            self.position = seq + 1
        else:
            self.ahead.add(seq)
        while self.ahead and self.position in self.ahead:
            self.ahead.remove(self.position)
            self.position += 1
        states = self.sampler_states
        while len(states) > 1 and states[1][0] < self.position:  # `rewind` may go back by one
            states.popleft()
        while self._knows_places and self._oldest_first < self.position - 1:
            self._firsts.pop(self._oldest_first, None)
            self._oldest_first += 1

    def mark(self) -> tuple[Any, ...]:
        """Remember how far it is, for `rewind`."""
        place = (self.position, frozenset(self.ahead) if self.ahead else (), self.finished, self.bad_count, self.ends)
        if self.workers is None:
            return place, {}, None, self.next_worker
        tracks = {worker: track.mark() for worker, track in self._tracks.items()}
        return place, tracks, dict(self.workers), self.next_worker

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to where it was one batch ago: that one was interrupted on its way to the consumer."""
        place, tracks, self.workers, self.next_worker = mark
        self.position, ahead, self.finished, self.bad_count, self.ends = place
        self.ahead = set(ahead)
        for worker, track in tracks.items():
            self._tracks[worker].rewind(track)

    def sampler_state(self) -> SamplerState:
        """Return the last state of the samplers that is not beyond the position."""
        for read, state in reversed(tuple(self.sampler_states)):
            if read <= self.position:
                return SamplerState(state, self.position - read)
        before = self.samplers_before
        return before if before.is_over else before._replace(drawn=self.position)
