"""How much work is to lie ready for workers, from how long batches take and how large they are.

    returned, sized ──> RunAhead ──> queue_depth: tickets that one worker has at once, under dynamic scheduling
                                 └─> rounds: how much further to read than the window, while workers would stand idle

Arithmetic on running means; the scheduler alone uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncloader.options import Options

# Under dynamic scheduling, and where workers run ahead, a worker has tickets for this long, so that it need not wait
# for the channel. A round trip takes 0.1 ms with an idle trainer and several ms with one that is busy in pure Python
# (the interpreter's switch interval is 5 ms), so one ticket behind the one in work is the least, and more are queued
# only for tiny batches. The more tickets, the more outcomes come with one read of a channel: with tickets for 2 ms the
# trainer reads one and a half times as often for batches of 1,024 ints.
_HIDE_LATENCY_S = 0.004
_LEAST_DEPTH = 2
_MOST_DEPTH = 100
# Where waiting for the channel takes a smaller share than this of a worker's time, it gets one ticket at a time.
_LATENCY_SHARE = 0.05
_LATENCY_GUESS_S = 0.0003
BATCH_OVERHEAD_BYTES = 4096
"""The cost of a parked batch beyond its data. Bounds run-ahead over batches of a few bytes."""

# Further than so many batches a worker nobody runs ahead, whatever they are thought to weigh.
_MOST_AHEAD = 256


class RunAhead:
    """Running means over the batches of a run, and what follows from them.

    Args:
        options: Batches ahead of the consumer are to stay below `max_buffered_bytes`.
        is_allowed: Otherwise nothing is run ahead of.

    Attributes:
        is_possible: Something may be run ahead of: what batches weigh is known.
    """

    def __init__(self, options: Options, *, is_allowed: bool = True) -> None:
        self.limit_bytes: int = options.max_buffered_bytes if is_allowed and options.in_order else 0
        self._overlapping = options.tickets_at_once
        self._prefetch: int = options.prefetch
        self._asked: int = options.num_at_start * options.prefetch  # batches of the workers of the beginning
        self._mean_bytes: float | None = None
        self.is_possible: bool = False
        self._is_bounded = self.limit_bytes > 0  # and the size of every batch so far is known
        self._mean_busy_s: float | None = None
        self._latency_s = _LATENCY_GUESS_S

    def returned(self, busy_s: float, wait_s: float, is_prompt: bool) -> None:
        """A ticket took so many seconds of work; the worker had waited for it, promptly sent, or sent long ago."""
        mean = self._mean_busy_s
        self._mean_busy_s = busy_s if mean is None else mean + 0.2 * (busy_s - mean)
        if is_prompt:
            self._latency_s += 0.2 * (wait_s - self._latency_s)
        else:
            self._latency_s += 0.005 * (_LATENCY_GUESS_S - self._latency_s)  # long ago: to be tried again

    @property
    def _depth(self) -> int:
        """How many batches keep a worker busy, and cover the latency of the channel and of asking."""
        mean, least = self._mean_busy_s, max(_LEAST_DEPTH, self._overlapping)
        return least if mean is None else max(least, min(1 + int(_HIDE_LATENCY_S / max(mean, 1e-6)), _MOST_DEPTH))

    @property
    def queue_depth(self) -> int:
        """How many tickets a worker has at once under dynamic scheduling: as few as keep it busy."""
        mean = self._mean_busy_s
        is_one_enough = mean is not None and not self._overlapping and self._latency_s < _LATENCY_SHARE * mean
        return 1 if is_one_enough else self._depth

    @property
    def low(self) -> int:
        """With fewer tickets a worker is about to stand idle. Early, so that what is read comes before it does."""
        return self._overlapping or max(_LEAST_DEPTH, self._depth // 2)

    def sized(self, nbytes: int) -> None:
        """Note the size of a batch; 0 of what is none says nothing, less than 0 that sizes are unknown."""
        self._is_bounded &= nbytes >= 0
        if nbytes > 0:
            weight, mean = nbytes + BATCH_OVERHEAD_BYTES, self._mean_bytes
            self._mean_bytes = weight if mean is None else mean + 0.2 * (weight - mean)
        self.is_possible = self._is_bounded and self._mean_bytes is not None

    def window(self, num_workers: int) -> int:
        """Return how many batches may be in flight or waiting with so many workers.

        Each worker has one at least, and the workers that were asked for have all of theirs: the user who names their
        number accepts the memory. Workers beyond them do not make the waiting batches larger than the limit.
        """
        most = num_workers * self._prefetch
        if self._mean_bytes is None or not self.limit_bytes:
            return most
        return min(most, max(num_workers, self._asked, int(self.limit_bytes / self._mean_bytes)))

    def rounds(self, num_workers: int, window: int, ahead: int, parked: Sequence[int]) -> int:
        """Return how many rounds of tickets are to be read now; less than 1 for none.

        A run ahead is one round, or for batches of microseconds as many rounds as hide the latency of asking.

        Args:
            num_workers: Tickets in a round.
            window: Batches in flight or waiting without run-ahead.
            ahead: Batches that were read and are not delivered.
            parked: The sizes of those that are here; the others are in flight, or being pinned.
        """
        assert self._mean_bytes is not None
        parked_bytes = sum(parked) + BATCH_OVERHEAD_BYTES * len(parked)
        room_bytes = self.limit_bytes - parked_bytes - self._mean_bytes * (ahead - len(parked))
        room = window + _MOST_AHEAD * num_workers - ahead
        return min(self._depth - 1, int(room_bytes / (self._mean_bytes * num_workers)), room // num_workers)
