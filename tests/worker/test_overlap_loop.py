"""Tickets whose samples overlap, over a connection that is played by hand: each sample comes when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self

import pytest

from asyncloader.epochs import EpochNotice
from asyncloader.messages.failure import CapturedError
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.overlap_loop import OverlapLoop, make_loop
from asyncloader.worker.serial_loop import SerialLoop
from asyncloader.worker.transport import ParentGone
from tests.support.patience import until

EPOCHS = [EpochSpec(number, (1, number, 0)) for number in (0, 1, 2)]
END = (Kind.END, None)


class Exits(BaseException):
    """Stands for SystemExit, which would end the loop of the test as well."""


class Played:
    """A connection whose messages are given, and that notes what is sent."""

    where = "in a test"
    is_remote = False
    cpu_clock = staticmethod(lambda: 0.0)

    def __init__(self) -> None:
        self.messages: deque[tuple[int, Any]] = deque()
        self.sent: list[Any] = []
        self.is_muted = False
        self.is_gone = False
        self._ready: Callable[[], None] | None = None

    def give(self, *messages: tuple[int, Any]) -> None:
        """Have these messages come, together."""
        self.messages.extend(messages)
        if self._ready is not None:
            self._ready()

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Nothing is around it."""

    def leave(self) -> None:
        """Nothing was."""

    def ends(self, error: BaseException) -> bool:
        """A parent that is gone, and what a sample exits with, end the worker."""
        return isinstance(error, (ParentGone, Exits))

    def capture(self, error: BaseException) -> Any:
        """As it is."""
        return CapturedError(type(error).__name__, "", error=error)

    def collator(self, collate_fn: Callable[[Any], Any]) -> Any:
        """As it would be anyway."""
        return collate_fn

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message."""
        if self.is_gone:
            raise ParentGone
        return self.messages.popleft() if self.messages else None

    def listen(self, loop: Any, ready: Callable[[], None]) -> None:
        """Somebody listens."""
        self._ready = partial(loop.run, ready)
        loop.call_soon(ready)

    def unlisten(self) -> None:
        """Nobody does any more."""
        self._ready = None

    def send(self, kind: int, body: Any = None) -> None:
        """Note a message."""
        if not self.is_muted:
            self.sent.append((kind, body))

    def send_outcome(self, held: list[Outcome]) -> None:
        """Note what has become of a ticket."""
        outcome = held.pop()
        what = outcome.data if outcome.error is None else outcome.error
        self.send(outcome.kind, (outcome.record.ticket, what))  # type: ignore[arg-type]

    def mute(self) -> None:
        """Note nothing from now on."""
        self.is_muted = True


class Awaited:
    """Samples that come when they are let come: `come(key)` gives the key, or raises."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[Any]] = {}
        self.opening = asyncio.Event()
        self.opening.set()
        self.is_open = False
        self.cancelled: list[int] = []

    async def __aenter__(self) -> Self:
        await self.opening.wait()
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def __getitem__(self, key: int) -> int:
        self.asked[key] = asyncio.get_running_loop().create_future()
        try:
            return await self.asked[key]  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise

    async def come(self, key: int, error: BaseException | None = None) -> None:
        """Let a sample come that has been asked for, or will be in a moment."""
        await until(lambda: key in self.asked)
        asked = self.asked.pop(key)
        if error is None:
            asked.set_result(key)
        else:
            asked.set_exception(error)


@contextlib.asynccontextmanager
async def serving(dataset: Any, **options: Any) -> AsyncIterator[tuple[Played, asyncio.Task[None]]]:
    """Have a worker serve on this loop; it is told to end at last, if it has not."""
    transport = Played()
    given: dict[str, Any] = {"is_iterable": False, "collate_fn": list, "samples_at_once": 4, **options}
    collate_fn, is_iterable = given.pop("collate_fn"), given.pop("is_iterable")
    spec = WorkerSpec(dataset, is_iterable, True, collate_fn, False, None, 1, 0, False, is_async=True, **given)
    answering: Any = make_loop(0, transport, EPOCHS[0], spec)  # type: ignore[arg-type]
    assert type(answering) is OverlapLoop
    answering.open()
    task = asyncio.create_task(answering.serve())
    try:
        yield transport, task
    finally:
        transport.give(END)
        await asyncio.wait({task})
        answering.close()


def tickets(*keys: list[int], first: int = 0) -> tuple[int, Any]:
    """A message with a ticket for each list of keys."""
    return Kind.TICKETS, list(enumerate(keys, first))


async def test_batches_go_out_as_they_come() -> None:
    """Each with its samples in the order of its keys; the dataset is open before the first, and closed at the end."""
    dataset = Awaited()
    async with serving(dataset) as (transport, _):
        transport.give(tickets([1, 2], [3, 4]))
        for key in (4, 3, 2, 1):
            await dataset.come(key)
        await until(lambda: len(transport.sent) == 3)
        assert dataset.is_open
    assert transport.sent == [(Kind.READY, None), (Kind.BATCH, (1, [3, 4])), (Kind.BATCH, (0, [1, 2]))]
    assert not dataset.is_open


async def test_what_raises_costs_its_own_batch() -> None:
    """Whose other samples are cancelled."""
    dataset = Awaited()
    async with serving(dataset) as (transport, _):
        transport.give(tickets([1, 2], [3]))
        await until(lambda: 2 in dataset.asked)
        await dataset.come(1, ValueError("one"))
        await dataset.come(3)
        await until(lambda: len(transport.sent) == 3 and dataset.cancelled == [2])
    assert [(kind, body[0]) for kind, body in transport.sent[1:]] == [(Kind.FAILURE, 0), (Kind.BATCH, 1)]


async def test_another_run_forgets_the_tickets_of_the_last() -> None:
    """Those in flight and those that wait; nothing of them is answered, and the same numbers mean other batches."""
    dataset = Awaited()
    async with serving(dataset, samples_at_once=2) as (transport, _):
        transport.give(tickets([1, 2], [3]))
        await until(lambda: len(dataset.asked) == 2)
        transport.give((Kind.EPOCH, EPOCHS[1]), tickets([5]))
        await dataset.come(5)
        await until(lambda: len(transport.sent) == 2)
    assert transport.sent[1:] == [(Kind.BATCH, (0, [5]))]
    assert sorted(dataset.cancelled) == [1, 2]
    assert 3 not in dataset.asked


class ForbidsAnEpoch(Awaited):
    """Of which one epoch cannot begin."""

    def set_epoch(self, epoch: int) -> None:
        """Hear of an epoch."""
        if epoch == 1:
            raise ValueError("one")


async def test_a_run_that_cannot_begin_forgets_the_tickets_of_the_last() -> None:
    """Samples in work are cancelled: their batches would be told as of this run. The next one begins."""
    dataset = ForbidsAnEpoch()
    one, two = (epoch._replace(notice=EpochNotice((number,), number)) for number, epoch in enumerate(EPOCHS[1:], 1))
    async with serving(dataset) as (transport, _):
        transport.give(tickets([1], [2]))
        await until(lambda: len(dataset.asked) == 2)
        in_flight = dataset.asked[2]
        transport.give((Kind.EPOCH, one), tickets([3], [4]))
        if not in_flight.done():
            in_flight.set_result(2)
        for _ in range(5):
            await asyncio.sleep(0)
        transport.give((Kind.EPOCH, two), tickets([5]))
        await dataset.come(5)
        await until(lambda: transport.sent[-1] == (Kind.BATCH, (0, [5])))
    told = [(kind, body[0]) for kind, body in transport.sent[1:]]
    assert told == [(Kind.FAILURE, 0), (Kind.FAILURE, 1), (Kind.BATCH, 0)]
    assert sorted(dataset.asked) == [1, 2]


async def test_a_run_that_begins_while_the_dataset_is_opened() -> None:
    """Is the one that is served; where the worker is can be asked meanwhile."""
    dataset = Awaited()
    dataset.opening.clear()
    async with serving(dataset) as (transport, _):
        transport.give(tickets([1]), (Kind.WHERE, 0), (Kind.EPOCH, EPOCHS[1]), tickets([2]))
        await until(lambda: transport.sent)
        assert transport.sent == [(Kind.AWAITS, "The dataset is being opened (__aenter__).\n")]
        dataset.opening.set()
        await dataset.come(2)
        await until(lambda: len(transport.sent) == 3)
    assert transport.sent[1:] == [(Kind.READY, None), (Kind.BATCH, (0, [2]))]


async def test_being_told_to_end_cancels_the_opening() -> None:
    """And nothing is said."""
    dataset = Awaited()
    dataset.opening.clear()
    async with serving(dataset) as (transport, task):
        transport.give(tickets([1]))
        await until(lambda: not transport.messages)
        transport.give(END)
        await task
    assert transport.sent == []
    assert not dataset.is_open


async def test_the_end_cancels_what_is_in_flight() -> None:
    """All samples have ended before the dataset is closed."""
    dataset = Awaited()
    async with serving(dataset) as (transport, task):
        transport.give(tickets([1], [2]))
        await until(lambda: len(dataset.asked) == 2)
        transport.give(END)
        await task
    assert transport.sent == [(Kind.READY, None)]
    assert dataset.cancelled == [1, 2]


async def test_where_the_samples_of_a_ticket_wait() -> None:
    """Is told while they do."""
    dataset = Awaited()
    async with serving(dataset) as (transport, _):
        transport.give(tickets([1]))
        await until(lambda: 1 in dataset.asked)
        transport.give((Kind.WHERE, 0))
        kind, text = transport.sent[-1]
    assert kind == Kind.AWAITS
    assert "in __getitem__" in text


@pytest.mark.parametrize("by", ["a sample", "the parent"])
async def test_what_ends_the_worker_ends_it_without_a_word(by: str) -> None:
    """An exit in a sample, a parent that is gone: other batches, which come after it, are not told either."""
    dataset = Awaited()
    async with serving(dataset) as (transport, task):
        transport.give(tickets([1], [2]))
        await until(lambda: len(dataset.asked) == 2)
        if by == "a sample":
            await dataset.come(1, Exits())
        else:
            transport.is_gone = True
            transport.give()
        await asyncio.wait({task})
        assert isinstance(task.exception(), Exits if by == "a sample" else ParentGone)
    assert transport.sent == [(Kind.READY, None)]
    assert transport.is_muted
    assert dataset.cancelled[-1:] == [2]


class Lines:
    """An async stream of three samples."""

    def __aiter__(self) -> AsyncIterator[int]:
        return self._lines()

    async def _lines(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number


async def test_the_end_of_a_stream_is_told_when_the_parent_has_confirmed() -> None:
    """That the worker lives: a shorter last batch, and that there are no more; what is asked later is for nobody."""
    async with serving(Lines(), is_iterable=True) as (transport, _):
        transport.give(tickets([0, 0], [0, 0], [0, 0]))
        await until(lambda: len(transport.sent) == 3)
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        assert [kind for kind, _ in transport.sent[1:]] == [Kind.BATCH, Kind.ENDING]
        transport.give((Kind.CONFIRM, 0))
        await until(lambda: len(transport.sent) == 5)
    assert transport.sent[3:] == [(Kind.BATCH, (1, [2])), (Kind.EXHAUSTED, (2, None))]


def test_which_loop_answers_is_said_by_the_spec() -> None:
    """Where samples overlap, or not; an error in place of the spec is answered one ticket after the other."""
    spec = WorkerSpec(range(3), False, True, list, False, None, 1, 0, False)
    transport: Any = Played()
    assert type(make_loop(0, transport, EPOCHS[0], spec)) is SerialLoop
    assert type(make_loop(0, transport, EPOCHS[0], ValueError("no dataset"))) is SerialLoop
