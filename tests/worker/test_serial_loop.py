"""Tickets one after the other, over a connection that is played by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader.messages.failure import CapturedError
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.serial_loop import SerialLoop
from asyncloader.worker.transport import ParentGone

EPOCHS = [EpochSpec(number, (1, number, 0)) for number in (0, 1, 2)]


class Played:
    """A connection whose messages are given, and that notes what is sent."""

    where = "in a test"
    is_remote = False
    cpu_clock = staticmethod(lambda: 0.0)

    def __init__(self, *messages: tuple[int, Any]) -> None:
        self._messages = deque(messages)
        self.sent: list[Any] = []

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Nothing is around it."""

    def leave(self) -> None:
        """Nothing was."""

    def ends(self, error: BaseException) -> bool:
        """What is no Exception ends the worker."""
        return not isinstance(error, Exception)

    def capture(self, error: BaseException) -> CapturedError:
        """As it is."""
        return CapturedError(type(error).__name__, "", error=error)

    def collator(self, collate_fn: Callable[[Any], Any]) -> Any:
        """As it would be anyway."""
        return collate_fn

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message; the parent is gone after the last."""
        if not self._messages:
            raise ParentGone
        return self._messages.popleft()

    def listen(self, loop: Any, ready: Callable[[], None]) -> None:
        """Nobody listens."""

    def unlisten(self) -> None:
        """Nobody did."""

    def send(self, kind: int, body: Any = None) -> None:
        """Note a message."""
        self.sent.append((kind, body))

    def send_outcome(self, held: list[Outcome]) -> None:
        """Note what has become of a ticket."""
        outcome = held.pop()
        what = (
            outcome.data
            if outcome.kind == Kind.BATCH
            else outcome.error.error
            if outcome.kind == Kind.FAILURE
            else None
        )
        self.sent.append((outcome.kind, outcome.record.ticket, what))

    def mute(self) -> None:
        """Nobody dies."""


class Squares:
    """Squares; after each sample the loop looks for messages."""

    loop: SerialLoop

    def __getitem__(self, key: int) -> int:
        self.loop._looked_at = 0.0
        if key < 0:
            raise ValueError(key)
        return key * key


class Stream(IterableDataset[int]):
    """Three samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def play(*messages: tuple[int, Any], dataset: Any = None, init: Any = None) -> list[Any]:
    """Have a worker serve these messages; return what it sends."""
    dataset = dataset or Squares()
    is_iterable = isinstance(dataset, Stream)
    spec = WorkerSpec(dataset, is_iterable, True, list, False, init, 1, 0, False)
    transport = Played(*messages)
    loop = SerialLoop(0, transport, EPOCHS[0], spec)
    dataset.loop = loop
    loop.open()
    loop.run()
    loop.close()
    return transport.sent


def tickets(*keys: list[int], first: int = 0) -> tuple[int, Any]:
    """A message with a ticket for each list of keys."""
    return Kind.TICKETS, list(enumerate(keys, first))


END = (Kind.END, None)


def test_tickets_are_answered_in_order_until_the_end() -> None:
    """After the word that the dataset is open; a batch that raises costs itself."""
    ready, *answers = play(tickets([1, 2], [-3], [4]), (Kind.CONFIRM, 0), (Kind.CONFIRM, 0), (Kind.CONFIRM, 0), END)
    assert ready == (Kind.READY, None)
    assert [answer[:2] for answer in answers] == [(Kind.BATCH, 0), (Kind.FAILURE, 1), (Kind.BATCH, 2)]
    assert answers[0][2] == [1, 4]


def test_being_told_to_end_goes_before_tickets_that_wait() -> None:
    """The one in work is finished."""
    assert [sent[1] for sent in play(tickets([1], [2], [3]), END)[1:]] == [0]


def test_another_run_forgets_the_tickets_of_the_last() -> None:
    """And begins anew."""
    sent = play(tickets([1], [2], [3]), (Kind.EPOCH, EPOCHS[1]), tickets([5], first=0), END)
    assert sent[1:] == [(Kind.BATCH, 0, [1]), (Kind.BATCH, 0, [25])]


def test_what_raises_when_it_is_opened_stands_for_every_ticket() -> None:
    """The worker serves all the same."""

    def init(worker_id: int) -> None:
        raise OSError("no room")

    sent = play(tickets([1]), tickets([2], first=1), END, init=init)
    assert [answer[:2] for answer in sent[1:]] == [(Kind.FAILURE, 0), (Kind.FAILURE, 1)]
    assert all("no room" in str(answer[2]) for answer in sent[1:])


def test_the_end_of_the_data_is_told_when_the_parent_has_confirmed_that_it_lives() -> None:
    """What it makes of an end that may be its own death is for nobody; another run's confirmation is none."""
    ended = [tickets([0, 0], [0, 0]), tickets([0, 0], first=2)]
    assert play(*ended, END, dataset=Stream())[1:] == [(Kind.BATCH, 0, [0, 1]), (Kind.ENDING, 0)]
    wrong = play(*ended, (Kind.CONFIRM, 7), END, dataset=Stream())
    assert wrong[1:] == [(Kind.BATCH, 0, [0, 1]), (Kind.ENDING, 0)]
    confirmed = play(*ended, (Kind.CONFIRM, 0), END, dataset=Stream())
    assert confirmed[1:] == [(Kind.BATCH, 0, [0, 1]), (Kind.ENDING, 0), (Kind.BATCH, 1, [2]), (Kind.EXHAUSTED, 2, None)]


def test_a_parent_that_is_gone_ends_it() -> None:
    """At once."""
    with pytest.raises(ParentGone):
        play(tickets([1]))
