"""Batches to a device, some of them ahead, for whoever iterates over them there.

    source ── pull ──> sent: a copy is under way, on a stream of its own ──> handed over: the consumer's stream waits
                         └ 1 + depth of them, if there are so many             for the copy, and no thread does

To a run of a loader, a batch that is sent is on its way to the consumer: its call ends when the consumer has it. So
states are those of the batches that the consumer has.

Of a loader with workers, batches are sent ahead that are ready: none that is there is held back for one that is not.
Without workers none is, for the loader makes none ahead. Other iterables do not say what they have: of these the next
batches are waited for, as many as there are to be ahead.

A program may ask the device for steps faster than the device does them. So a consumer that comes for a batch waits
until all but the last ``1 + depth`` steps are done: there are at most ``2 + 2 * depth`` batches on the device.

A signal's handler may raise anywhere, as `asyncloader.engine.progress` says: what was pulled and not sent is pulled
again, and a batch is handed over by assignments.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from asyncloader.checks import at_least
from asyncloader.device.device import Device, Host, Mark, check, find
from asyncloader.engine.progress import Call
from asyncloader.engine.taking import Item, failed
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.run.base_iterator import BaseIterator, ClosableIterator, check_owner
from asyncloader.run.equal_steps import EqualStepsIterator
from asyncloader.seeding.generators import GLOBAL, left_alone
from asyncloader.seeding.sample_context import EpochKey
from asyncloader.seeding.seeder import ON_DEVICE, Seeder
from asyncloader.seeding.turns import Drawing

T_co = TypeVar("T_co", covariant=True)

_SENT: Any = object()  # in place of the item of a call: whoever copies keeps the host's memory as long as it has to
_NOTHING: Any = object()


class Source(Protocol):
    """The source of batches. An item whose call is over is given again."""

    @property
    def counter(self) -> Any:
        """The object with ``_num_yielded``."""
        ...

    @property
    def meter(self) -> Any:
        """The object with ``held_back``."""
        ...

    @property
    def run(self) -> object:
        """Another object with each run."""
        ...

    @property
    def key(self) -> EpochKey | None:
        """The seeds of the run; None if it has none."""
        ...

    def next_item(self, call: Call) -> Item:
        """Take what comes next, for this call. StopIteration if nothing does."""
        ...

    async def next_item_async(self, call: Call) -> Item:
        """Do so without blocking the loop. StopAsyncIteration if nothing comes."""
        ...

    def take_ahead(self, call: Call) -> Item | None:
        """Take what may be sent ahead."""
        ...

    async def take_ahead_async(self, call: Call) -> Item | None:
        """Do so without blocking the loop."""
        ...

    async def let_the_loop_turn(self) -> None:
        """Give other tasks a turn, if there was none for a while."""
        ...

    def check_length(self) -> None:
        """Look whether there are more batches than were announced, before one is handed over."""
        ...

    def was_interrupted(self) -> None:
        """Have somebody else take the item of a call that is over."""
        ...

    def end(self) -> None:
        """Note that a consumer has been told of the end."""
        ...

    def close(self) -> None:
        """Let go of what was taken, before the iterator itself is closed."""
        ...


class LoaderSource:
    """An iterator of a loader. Ready batches may be sent ahead: nothing is waited for, and nothing made, for that."""

    def __init__(self, iterator: BaseIterator[Any]) -> None:
        self._iterator = iterator
        self.next_item = iterator.next_item
        self.next_item_async = iterator.next_item_async
        self.take_ahead = iterator.take_ready
        self.let_the_loop_turn = iterator.let_the_loop_turn

    @property
    def counter(self) -> Any:
        """The counter of the batches that consumers have."""
        return self._iterator

    @property
    def meter(self) -> Any:
        """What counts the batches of the run."""
        return self._iterator._meter

    @property
    def run(self) -> object:
        """How far the run is, which each run has of its own."""
        return self._iterator._checkpointer.progress

    @property
    def key(self) -> EpochKey | None:
        """The seeds of the run."""
        return self._iterator._checkpointer.key

    async def take_ahead_async(self, call: Call) -> Item | None:
        """Take what is ready."""
        return self.take_ahead(call)

    def check_length(self) -> None:
        """Warn as torch does of an iterable dataset that gives more than it said."""
        if self._iterator._IterableDataset_len_called is not None:
            self._iterator.check_length()

    def was_interrupted(self) -> None:
        """Wake another consumer."""
        self._iterator._run.handoff.wake()

    def end(self) -> None:
        """Note that a consumer has been told of the end."""
        self.meter.log_summary()
        self._iterator._checkpointer.progress.note_end()

    def close(self) -> None:
        """Leave that to the iterator."""


class AnySource:
    """Any iterator, or asynchronous one. Batches are waited for, and an error comes in its turn."""

    held_back = _num_yielded = 0
    run = key = None

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._arrived = _NOTHING
        self._error: BaseException | None = None  # what has come in the place of a batch
        self._last = Call()
        self._has_ended = False

    def next_item(self, call: Call) -> Item:
        """Take what comes next, for this call. StopIteration if nothing does."""
        if (item := self.take_ahead(call)) is None:
            raise StopIteration
        return item

    async def next_item_async(self, call: Call) -> Item:
        """Do so without blocking the loop. StopAsyncIteration if nothing comes."""
        if (item := await self.take_ahead_async(call)) is None:
            raise StopAsyncIteration
        return item

    def take_ahead(self, call: Call) -> Item | None:
        """Wait for what comes next, and take it; None at the end."""
        iterator = self._iterator
        try:
            if self._lacks:
                # Not `next`: an interrupt between its end and the assignment would lose what it has returned.
                for self._arrived in iterator:
                    break
                else:
                    self._has_ended = True
        except Exception as error:
            self._error = error
        return self._take(call)

    async def take_ahead_async(self, call: Call) -> Item | None:
        """Wait for what comes next, and take it; None at the end."""
        iterator = self._iterator
        try:
            if self._lacks:
                async for self._arrived in iterator:
                    break
                else:
                    self._has_ended = True
        except Exception as error:
            self._error = error
        return self._take(call)

    @property
    def counter(self) -> AnySource:
        """The object with ``_num_yielded``: this itself."""
        return self

    meter = counter

    @property
    def _lacks(self) -> bool:
        has_some = self._arrived is not _NOTHING or self._error is not None or self._last.is_interrupted
        return not has_some and not self._has_ended

    def _take(self, call: Call) -> Item | None:
        item: Item
        if self._last.is_interrupted:
            item = self._last.item
        elif self._error is not None:
            item = failed(self._error)
        elif self._arrived is not _NOTHING:
            item = Item(Outcome(Kind.BATCH, data=self._arrived))
        else:
            return None
        # From here on nothing is called, so that no handler of a signal raises between these.
        self._arrived, self._error, call.item, self._last = _NOTHING, None, item, call
        try:
            return item
        finally:
            del item  # an error's traceback may refer to this frame

    async def let_the_loop_turn(self) -> None:
        """Leave that to the iterator."""

    def check_length(self) -> None:
        """Nobody has announced anything."""

    def was_interrupted(self) -> None:
        """There is one consumer."""

    def end(self) -> None:
        """Whoever made the iterator has noted that."""

    def close(self) -> None:
        """Let go of what was taken. Of an iterator that cannot be closed nothing is taken any more either."""
        self._arrived, self._error, self._last = _NOTHING, None, Call()
        self._has_ended = self._has_ended or not isinstance(self._iterator, ClosableIterator)


class _Sent(NamedTuple):
    """A batch on the device, or what is raised in its place.

    Attributes:
        call: Ends when the consumer has it.
        item: Has the batch on the device.
        mark: Behind its copy; None for what is no batch.
    """

    call: Call
    item: Item
    mark: Mark | None


_turn = threading.RLock()
"""Held by the thread that draws from the global generators in a transform: of all iterators of this process."""


def _renew_turn() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)


class _Seeded:
    """A transform, with global generators and that of the device seeded by batch: what it draws depends on that alone.

    So it does not matter when a batch is sent. The generators are the trainer's otherwise, and stay as they are.

    Args:
        transform: The user's.
        key: The seeds of the run.
        device: Where batches are.
    """

    def __init__(self, transform: Callable[[Any], Any], key: EpochKey, device: Device) -> None:
        self._transform = transform
        self._key = EpochKey(key)  # it stays possible when the run's own is over
        self._seeder = Seeder(key)
        self._device = device

    def __call__(self, number: int, batch: Any) -> Any:
        """Return what becomes of the batch of this number."""
        on_device = self._device.generators
        with _turn, Drawing(self._key), left_alone((*GLOBAL, *on_device)):
            seed = self._seeder(number, ON_DEVICE)
            for generator in on_device:
                generator.manual_seed(seed)
            return self._transform(batch)


Change = Callable[[int, Any], Any]


def _by_number(transform: Callable[[Any], Any] | None, key: EpochKey | None, device: Device) -> Change | None:
    """Return a transform that is told the number of the batch."""
    if transform is None:
        return None
    return (lambda number, batch: transform(batch)) if key is None else _Seeded(transform, key, device)


def _on_its_way(device: Device, item: Item, change: Change | None, *, joins: bool) -> tuple[Item, Mark | None]:
    """Begin to copy a batch; return it on the device, and the mark behind its copy, or what is raised in its place."""
    if item.outcome.kind != Kind.BATCH:
        return item, None
    try:
        data, mark = device.send(item.outcome.data, change and partial(change, item.batch), joins=joins)
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return failed(error, item.batch), None
    return item._replace(outcome=item.outcome._replace(data=data)), mark


class _Steps:
    """What a consumer has asked of a device: the stretches between its calls, of which the last ones may be undone.

    Args:
        device: Does them.
        most: So many.
    """

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = most
        self._begun: deque[Mark] = deque()  # behind what was asked of the device before each call

    def come(self) -> None:
        """Note that the consumer comes, and wait until all but its last steps are done."""
        self._begun.append(self._device.mark())
        while len(self._begun) > self._most:
            self._begun.popleft().synchronize()

    async def come_async(self) -> None:
        """Do so without blocking the loop."""
        self._begun.append(self._device.mark())
        while len(self._begun) > self._most:
            if not (step := self._begun.popleft()).query():
                await asyncio.to_thread(step.synchronize)


class Delivery:
    """Brings batches to a device one by one, when they are given: for ranks in equal steps.

    Their batches count as given when the iterator returns. So it has each delivered while it works the step out, and
    no batch counts as given at any moment that is not there. Whoever is interrupted has it delivered again.

    Args:
        key: Returns the seeds of the run; None if it has none.
        device: Where batches go.
        transform: Makes another batch of each, on the stream of the copies.
    """

    def __init__(
        self, key: Callable[[], EpochKey | None], device: Device, transform: Callable[[Any], Any] | None
    ) -> None:
        self._key = key
        self._device = device
        self._transform = transform
        self._pid = os.getpid()
        self._steps = _Steps(device, 1)
        self._joins = True

    def come(self) -> None:
        """Note that a consumer comes, and wait until all but its last step are done."""
        check_owner(self._pid)
        self._steps.come()

    async def come_async(self) -> None:
        """Do so without blocking the loop."""
        check_owner(self._pid)
        await self._steps.come_async()

    def __call__(self, item: Item) -> Item:
        """Return a batch on the device, which the current stream may use, or what is raised in its place."""
        change = _by_number(self._transform, self._key(), self._device)
        item, mark = _on_its_way(self._device, item, change, joins=self._joins)
        if mark is not None:
            self._joins = False
            self._device.hand_over(item.outcome.data, mark)
        return item

    def close(self) -> None:
        """Wait for copies that have begun."""
        if self._pid == os.getpid():
            self._device.finish()


class DeviceIterator(ClosableIterator):
    """Iterates as another iterator does, over batches on a device.

    Args:
        inner: The iterator over the batches in memory of the host.
        source: The same, to be pulled from.
        device: Where batches go.
        depth: How many are sent ahead.
        transform: Makes another batch of each, on the stream of the copies.
    """

    def __init__(
        self, inner: Any, source: Source, device: Device, depth: int, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self._inner = inner
        self._source = source
        self._pid = os.getpid()
        self.take_up(device, depth, transform)

    def take_up(self, device: Device, depth: int, transform: Callable[[Any], Any] | None) -> None:
        """Go on with the run that the inner iterator is at: see the arguments of this class."""
        self._device, self._depth, self._transform = device, depth, transform
        self._begin()

    def _begin(self) -> None:
        """Begin a run: what was sent of another one is nobody's."""
        self._begun = self._source.run
        self._held: tuple[_Sent, ...] = ()
        self._steps = _Steps(self._device, 1 + self._depth)
        self._joins = True  # what the trainer has on the device before the run is there when a transform uses it
        self._change = _by_number(self._transform, self._source.key, self._device)

    # ----------------------------------------------------------------------------------------------------- iterating

    def __next__(self) -> Any:
        self._check_run()
        self._steps.come()
        while True:
            if not self._held:
                try:
                    self._pull(self._source.next_item)
                except StopIteration:
                    if self._has_ended():
                        raise
            while len(self._held) <= self._depth and self._pull(self._source.take_ahead):
                pass
            if not (before := self._held):  # another thread was quicker
                continue
            batch, error = self._open(before[0])
            call, rest, counter, meter = before[0].call, before[1:], self._source.counter, self._source.meter
            left = _batches(rest)
            # From here on nothing is called: neither can a signal's handler run, nor another thread.
            if self._held is before:
                self._held, call.item, meter.held_back = rest, None, left
                if error is None:
                    counter._num_yielded += 1
                    return batch
                try:
                    raise error
                finally:
                    del error, before  # a traceback that refers to this frame would keep the iterator alive

    async def __anext__(self) -> Any:
        await self._source.let_the_loop_turn()
        self._check_run()
        await self._steps.come_async()
        while True:
            if not self._held:
                try:
                    await self._pull_async(self._source.next_item_async)
                except StopAsyncIteration:
                    if self._has_ended():
                        raise
            while len(self._held) <= self._depth and await self._pull_async(self._source.take_ahead_async):
                pass
            if not (before := self._held):  # another task was quicker
                continue
            batch, error = self._open(before[0], in_async_for=True)
            call, rest, counter, meter = before[0].call, before[1:], self._source.counter, self._source.meter
            left = _batches(rest)
            if self._held is before:
                self._held, call.item, meter.held_back = rest, None, left
                if error is None:
                    counter._num_yielded += 1
                    return batch
                try:
                    raise error
                finally:
                    del error, before

    def _check_run(self) -> None:
        """See that a consumer of this process comes, and begin anew if the iterator within has begun another run."""
        check_owner(self._pid)
        if self._source.run is not self._begun:
            self._begin()

    def _open(self, sent: _Sent, *, in_async_for: bool = False) -> tuple[Any, BaseException | None]:
        """Have the consumer's stream wait for a batch. Whoever is interrupted here does it again."""
        batch, error = sent.item.open(in_async_for=in_async_for)
        if sent.mark is not None:
            self._device.hand_over(batch, sent.mark)
            self._source.check_length()
        return batch, error

    def _has_ended(self) -> bool:
        """Note the end, unless another thread or task has sent a batch that nobody has taken."""
        if self._held:
            return False
        self._device.sweep()
        self._source.end()
        return True

    # -------------------------------------------------------------------------------------------------------- sending

    def _pull(self, take: Callable[[Call], Item | None]) -> bool:
        """Take a batch and send it; whether there was one."""
        call, item = Call(), None
        try:
            if (item := take(call)) is None:
                return False
            self._send(call, item)
        except StopIteration:
            call.item = None
            raise
        except BaseException:
            call.is_interrupted = call.item is not _SENT
            self._source.was_interrupted()
            raise
        finally:
            del item  # an error's traceback may refer to this frame
        return True

    async def _pull_async(self, take: Callable[[Call], Any]) -> bool:
        """Do so without blocking the loop."""
        call, item = Call(), None
        try:
            if (item := await take(call)) is None:
                return False
            self._send(call, item)
        except StopAsyncIteration:
            call.item = None
            raise
        except BaseException:
            call.is_interrupted = call.item is not _SENT
            self._source.was_interrupted()
            raise
        finally:
            del item
        return True

    def _send(self, call: Call, item: Item) -> None:
        """Send a batch to the device, and hold it for the consumer."""
        item, mark = _on_its_way(self._device, item, self._change, joins=self._joins)
        if mark is not None:
            self._joins = False
        sent = _Sent(call, item, mark)
        del item
        meter = self._source.meter
        while True:
            before = self._held
            after = (*before, sent)
            count = _batches(after)
            if self._held is before:  # see `__next__`
                self._held, call.item, meter.held_back = after, _SENT, count
                return

    # ------------------------------------------------------------------------------------------------ the rest of it

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def close(self) -> None:
        """End the run and let go of everything. Waits for copies that have begun."""
        self._held = ()
        self._source.close()
        if hasattr(self._inner, "close"):
            self._inner.close()
        self._let_go()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        self._held = ()
        self._source.close()
        self._inner.leave()

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        self._held = ()
        self._source.close()
        if hasattr(self._inner, "aclose"):
            await self._inner.aclose()
        await asyncio.to_thread(self._let_go)

    def _let_go(self) -> None:
        if self._pid == os.getpid():
            self._device.finish()


def _batches(held: Sequence[_Sent]) -> int:
    """Return how many of these are batches."""
    return sum(sent.mark is not None for sent in held)


def on_device(
    iterator: Any,
    device: str | torch.device | Device,
    depth: int,
    transform: Callable[[Any], Any] | None = None,
    last: Any = None,
) -> Any:
    """Return an iterator over batches on a device; the same one, if they are there, or it brings them there itself.

    Args:
        iterator: Over batches in memory of the host.
        device: Where they are to go.
        depth: How many are sent ahead.
        transform: Makes another batch of each, there.
        last: The iterator that was returned last. If it brings batches of this same one, which has begun another run
            with persistent workers, it is returned once more: two would take each other's batches.

    Raises:
        ConfigurationError: if torch sees no such device here.
    """
    device = find(device)
    if isinstance(device, Host) and transform is None:
        return iterator
    if isinstance(iterator, EqualStepsIterator) and iterator.delivery is None:
        iterator.delivery = Delivery(iterator.key, device, transform)
        return iterator
    is_counted = isinstance(iterator, BaseIterator)
    source: Source = LoaderSource(iterator) if is_counted else AnySource(iterator)
    # Batches of other iterators of a loader count as given when they are pulled.
    pulls = 0 if isinstance(iterator, ClosableIterator) and not is_counted else depth
    depth = pulls if device.overlaps else 0
    if isinstance(last, DeviceIterator) and last._inner is iterator:
        last.take_up(device, depth, transform)
        return last
    return DeviceIterator(iterator, source, device, depth, transform)


class OnDevice(Generic[T_co]):
    """An iterable over batches on a device: see `to_device`."""

    def __init__(self, batches: Any, device: Device, depth: int) -> None:
        self._batches = batches
        self._device = device
        self._depth = depth

    def __iter__(self) -> Iterator[T_co]:
        return cast(Iterator[T_co], on_device(iter(self._batches), self._device, self._depth))

    def __aiter__(self) -> AsyncIterator[T_co]:
        return cast(AsyncIterator[T_co], on_device(aiter(self._batches), self._device, self._depth))

    def __len__(self) -> int:
        return len(self._batches)


def to_device(
    batches: Iterable[T_co] | AsyncIterable[T_co], device: str | torch.device, depth: int = 1
) -> OnDevice[T_co]:
    """Iterate over batches on a device: the next ones are copied there while the program computes with one.

    For any loader or iterable, asynchronous ones too; it can be iterated over again if those can. Copies run beside the
    computation if the batches are in page-locked memory: ``pin_memory=True`` of a loader. A loader of ours has the same
    by its option ``device``, which sees to that; of other iterables the next ``depth`` batches are waited for before
    one is given.

    Args:
        batches: Tensors in any containers, and objects that have a method ``to``.
        device: As torch names it; "auto" for the accelerator that there is. On the CPU nothing is done.
        depth: How many batches are copied ahead; at most ``2 + 2 * depth`` are on the device.

    Raises:
        ConfigurationError: if torch sees no such device here, or the depth is less than 0.
        TypeError: while iterating, for a batch with something in it that cannot be moved; it names the type.

    Example:
        >>> for images, labels in to_device(loader, "cuda"):
        ...     step(images, labels)
    """
    check("device", device)
    at_least("depth", depth, least=0)
    return OnDevice(batches, find(device), depth)
