"""Decide which workers there are: which are started, take tickets, leave, and are renewed.

    want, run begun, ready, lose ──> ┌───────────┐ ──> Start(worker), Dismiss(worker)   a process, or thread
    made, renewal due ─────────────> │ Workforce │ ──> Join(worker), Leave(worker)      what the scheduler is told
                                     └───────────┘ ──> `renewing`                       gets another process

The workforce touches no loop, clock or process: the supervisor tells it what has happened, and carries out what it
decides. A worker that is started joins when it has opened the dataset, so nothing waits for it. A worker that leaves
finishes what it has in hand; if it is wanted again before that, it stays.

A worker that has made enough batches, or has grown, is renewed. When another process is ready, the worker is sent no
more tickets, and when it has answered those that it has, the other process takes its place. The scheduler does not know
of that: the worker's id keeps its turn, and its tickets wait in the outbox. Workers are renewed one at a time, in the
order in which they became due: with the same number of batches all would be due in the same round.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import Action, Dismiss, Join, Leave, Start
from asyncloader.engine.roster import Roster
from asyncloader.observe.timing import show_bytes
from asyncloader.options import Options

log = logging.getLogger("asyncloader")

_HELD_ABOVE = 1.1
"""A worker that is so many times above its bound waits for the process that takes its place. So it stays below 1.5
times the bound: it may be a sixteenth ahead of what it has told (`PrivateBytes`), and finishes the tickets that it has
in hand, which are few (`Workforce.most_in_hand`)."""

_PAUSE_S = 30.0
"""Where no process could be had to renew a worker, none is asked for before so much time has gone by. Seconds."""


class _Life:
    """A worker's process: how much it has made, and the memory that it has."""

    __slots__ = ("batches", "bound", "private_bytes")

    def __init__(self) -> None:
        self.batches = 0
        self.private_bytes = 0
        self.bound = 0  # of its memory; 0 until it is known what it takes


class Workforce:
    """The workers that there are to be, by id. Called from the loop thread only.

    Args:
        options: With the number of workers that are wanted at the beginning, numbered from 0, and with what says when a
            worker is renewed: `max_tasks_per_child`, `max_worker_memory`.

    Attributes:
        wanted: The workers that are asked for. Not all of them need be there.
        renewing: The worker that is to be renewed; or None.
        is_finishing: Another process is ready for it: it is sent no more tickets, and goes when it has answered those
            that it has.
        most_in_hand: So many tickets a worker is sent at once, where its memory is bounded; otherwise None.
    """

    def __init__(self, options: Options) -> None:
        self.wanted = set(range(max(options.num_at_start, options.num_workers)))
        self.renewing: int | None = None
        self.is_finishing = False
        self._coming = self.wanted - set(range(options.num_at_start))  # started, or to be, and not ready
        self._max_tasks = options.max_tasks_per_child
        self._max_bytes = options.max_worker_memory
        self.most_in_hand = None if self._max_bytes is None else options.prefetch
        self._lives: dict[int, _Life] = {}
        self._due: dict[int, None] = {}  # workers to be renewed, in the order in which they became so
        self._retry_at = 0.0
        self._has_warned = False

    def __repr__(self) -> str:
        renewing = "" if self.renewing is None else f" renewing={self.renewing}"
        return f"<Workforce {sorted(self.members)} coming={sorted(self._coming)}{renewing} due={[*self._due]}>"

    @property
    def members(self) -> set[int]:
        """The workers that are to be there. In any thread."""
        return self.wanted

    # ------------------------------------------------------------------------------------------------ come and go

    def want(self, num_workers: int) -> None:
        """Want so many from now on: the last go first, and new ones get the lowest ids that are free."""
        self.wanted.difference_update(sorted(self.wanted)[num_workers:])
        free = (worker for worker in itertools.count() if worker not in self.wanted)
        self.wanted.update(list(itertools.islice(free, max(0, num_workers - len(self.wanted)))))

    def settle(self, roster: Roster, processes: Mapping[int, Worker]) -> list[Action]:
        """Decide which workers come and go, now that others are wanted, or another run has begun.

        Args:
            roster: The workers that take tickets, or are leaving.
            processes: The workers that there are.
        """
        members = self.members
        self._coming &= members - roster.active  # a run that has begun with them waits for them itself
        actions: list[Action] = []
        for worker in sorted(members):
            if roster.takes(worker):
                continue
            if worker in roster.leaving or (worker in processes and processes[worker].is_ready):
                actions.append(Join(worker))
            elif worker not in self._coming:
                self._coming.add(worker)
                if worker not in processes:
                    actions.append(Start(worker))
        for worker in sorted((roster.active | processes.keys()) - members, reverse=True):
            actions += self._let_go(worker, roster)
        return actions

    def ready(self, worker: int, roster: Roster) -> list[Action]:
        """A worker has opened the dataset. It may not be wanted any more."""
        self._coming.discard(worker)
        if worker in roster.active:
            return []
        return [Join(worker) if worker in self.wanted else Dismiss(worker)]

    def lose(self, worker: int) -> None:
        """A worker is not to be had: it could not be started."""
        self.cancel_renewal(worker)
        self._coming.discard(worker)
        self.wanted.discard(worker)

    def comes_later(self, worker: int) -> None:
        """A worker that is wanted could not be started, and is started later."""
        self._coming.add(worker)

    def is_coming(self, worker: int) -> bool:
        """Whether the worker has not joined yet."""
        return worker in self._coming

    def _let_go(self, worker: int, roster: Roster) -> list[Action]:
        self.cancel_renewal(worker)
        if roster.takes(worker):
            return [Leave(worker)]
        return [] if worker in roster.active else [Dismiss(worker)]

    # ---------------------------------------------------------------------------------------------------- renewal

    def reset(self, worker: int) -> None:
        """The worker has a process that has made nothing yet, or none."""
        self.cancel_renewal(worker)
        self._lives.pop(worker, None)

    def cancel_renewal(self, worker: int) -> None:
        """Do not renew the worker before it has made another batch."""
        self._due.pop(worker, None)
        if worker == self.renewing:
            self.renewing, self.is_finishing = None, False

    def may_send(self, worker: int) -> bool:
        """Whether the worker is sent tickets: not if another process is to have them.

        Nor, while a process is on its way, if the worker is far above its bound: by the time that the process is ready,
        a fast leak would have taken twice as much. Every renewal ends, and then tickets are sent again.
        """
        if self.renewing is None:
            return True
        return not (self.is_finishing and worker == self.renewing) and not self._is_far_above(worker)

    def made(self, worker: int, private_bytes: int) -> bool:
        """A worker has come to an outcome; return whether any worker is to be renewed.

        Args:
            worker: Its id.
            private_bytes: Its private memory; 0 if that is not known.
        """
        if self._max_tasks is None and self._max_bytes is None:
            return False
        if (life := self._lives.get(worker)) is None:
            life = self._lives[worker] = _Life()
        life.batches += 1
        life.private_bytes = private_bytes
        is_due = (self._max_tasks is not None and life.batches >= self._max_tasks) or (
            self._max_bytes is not None and private_bytes and self._has_grown(life, self._max_bytes)
        )
        if is_due and worker != self.renewing:
            self._due.setdefault(worker)
        return bool(self._due) or self.renewing is not None

    def choose(self, now: float, roster: Roster, processes: Mapping[int, Worker]) -> None:
        """Choose the worker that is renewed next, if any is due, and no worker is just being started.

        Args:
            now: Seconds, on any clock.
            roster: The workers that take tickets.
            processes: The workers that there are.
        """
        if self.renewing is not None or not self._due or now < self._retry_at:
            return
        are_all_there = self.members <= processes.keys() and all(process.is_ready for process in processes.values())
        while self._due and self.renewing is None:
            worker = next(iter(self._due))
            del self._due[worker]  # where it cannot be renewed now, it is due again when it has made another batch
            if are_all_there and worker in processes and roster.takes(worker) and not roster.is_held(worker):
                self.renewing = worker

    def not_renewed(self, now: float) -> None:
        """No process could be had for the worker that is to be renewed: it goes on, and is due again later."""
        if self.renewing is not None:
            self.cancel_renewal(self.renewing)
        self._retry_at = now + _PAUSE_S

    def has_made(self, worker: int) -> str:
        """Say in words what the worker has made."""
        life = self._lives[worker]
        taken = f", and has {show_bytes(life.private_bytes)} to itself" * bool(life.private_bytes)
        return f"it has made {life.batches} batches{taken}"

    def _has_grown(self, life: _Life, bound: int) -> bool:
        """Whether a worker has more memory than it may have. Its needs at its start another would have too."""
        if not life.bound:
            life.bound = bound if life.private_bytes <= bound else 2 * life.private_bytes
            if life.bound > bound and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "max_worker_memory is %s, and a worker takes %s when it has made %d batches: to renew it then "
                    "might be for nothing. It is renewed when it has come to twice that.",
                    show_bytes(bound),
                    show_bytes(life.private_bytes),
                    life.batches,
                )
        return life.private_bytes > life.bound

    def _is_far_above(self, worker: int) -> bool:
        life = self._lives.get(worker)
        is_due = worker == self.renewing or worker in self._due
        return is_due and life is not None and 0 < life.bound * _HELD_ABOVE < life.private_bytes

    def validate(self, roster: Roster) -> None:
        """Check what must hold between any two events."""
        assert self._coming <= self.members
        assert not (self._coming & {worker for worker in roster.active if roster.takes(worker)})
        assert self.renewing is not None or not self.is_finishing
        assert self.renewing is None or (self.renewing in self.members and self.renewing not in self._due)
