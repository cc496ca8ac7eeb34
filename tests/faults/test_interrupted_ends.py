"""An interrupt at every moment of closing, dropping and waking: workers end all the same, and nobody waits for ever."""

import asyncio
import contextlib
import gc
import random
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.engine.portal import get_portal
from asyncloader.signals import HandlersWait
from tests.faults.test_interrupts_everywhere import CtrlC, RealCtrlC
from tests.support import effort

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)

PATIENCE_S = 10.0


class Numbers:
    """Samples that take a moment, so that the consumer waits for each batch."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


def make(**options: Any) -> DataLoader[int]:
    """Make a loader whose workers are threads, which end by the same steps as processes."""
    return DataLoader(Numbers(), num_workers=1, worker_backend="thread", **options)  # type: ignore[arg-type]


def read(moment: CtrlC) -> None:
    """Interrupt an epoch, which tells the workers to end; go on to its end."""
    iterator = iter(make())
    with contextlib.suppress(KeyboardInterrupt), moment:
        for _ in iterator:
            pass
    for _ in iterator:
        pass


def drop(moment: CtrlC) -> None:
    """Interrupt what is called when the last reference goes."""
    held = [iter(make())]
    with contextlib.suppress(KeyboardInterrupt), moment:
        held.clear()


def close(moment: CtrlC) -> None:
    """Interrupt closing, and drop the iterator."""
    iterator = iter(make())
    with contextlib.suppress(KeyboardInterrupt), moment:
        iterator.close()


def wait_until_nothing_lives() -> None:
    """Wait until no session is on the portal.

    Raises:
        AssertionError: if one stays.
    """
    portal, given_up = get_portal(), time.monotonic() + PATIENCE_S
    while (left := portal.call(lambda: [*portal.sessions]).result()) and time.monotonic() < given_up:
        gc.collect()
        time.sleep(0.005)
    assert not left


@pytest.mark.parametrize("ends", [pytest.param(read, marks=pytest.mark.slow), drop, close])
def test_workers_end_wherever_an_interrupt_hits(ends: Callable[[CtrlC], None]) -> None:
    """What is left of an iterator closes it, whether the interrupted step was taken or not."""
    moment = uninterrupted = 0
    while uninterrupted < 3:
        moment += 1
        interrupt = CtrlC(moment)
        ends(interrupt)
        uninterrupted += interrupt.left > 0
        wait_until_nothing_lives()


@contextlib.contextmanager
def a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Give a loop without a handler of its own for Ctrl-C."""
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_backend": "thread"}], ids=["here", "a worker"])
def test_a_task_is_woken_wherever_an_interrupt_hits(options: dict[str, Any]) -> None:
    """A task that the interrupt has left unfinished gets its batch when its loop turns again."""

    async def take(iterator: Any, seen: list[int]) -> None:
        async for batch in iterator:
            seen += batch.tolist()

    step = 3 if effort.is_quick else 1
    moment, uninterrupted = random.SystemRandom().randrange(step) - step + 1, 0
    while uninterrupted < 3:
        moment += step
        interrupt, seen = CtrlC(moment), list[int]()
        with a_loop() as loop:
            iterator = aiter(DataLoader(Numbers(), **options))  # type: ignore[arg-type]
            task = loop.create_task(take(iterator, seen))
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                loop.run_until_complete(task)
            uninterrupted += interrupt.left > 0
            while not task.done():  # asyncio keeps the stop of a call that was interrupted
                with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                    loop.run_until_complete(asyncio.wait_for(asyncio.shield(task), PATIENCE_S))
            if isinstance(task.exception(), KeyboardInterrupt):
                loop.run_until_complete(take(iterator, seen))
            assert seen == [0, 1], moment
            iterator.close()


def test_handlers_of_signals_are_there_again_wherever_an_interrupt_hits() -> None:
    """They wait while a process is launched. One that raises when they are set again keeps none of the others out."""
    numbers, came = (signal.SIGUSR1, signal.SIGUSR2), []
    before: dict[int, Any] = {
        number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers
    }
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        moment = uninterrupted = 0
        while uninterrupted < 3:
            moment += 1
            interrupt = RealCtrlC(moment)
            with contextlib.suppress(KeyboardInterrupt), interrupt, HandlersWait():
                pass
            uninterrupted += interrupt.left > 0
            came.clear()
            for number in numbers:
                signal.raise_signal(number)
            assert came == [*numbers], moment
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_keeps_nothing_of_the_frames_that_it_comes_from(sigint_raises: None) -> None:
    """It was in a circle with them until a collection: a lease in hand was nobody's, and the next loop waited."""

    def interrupted(held: Numbers) -> None:
        with HandlersWait():
            signal.raise_signal(signal.SIGINT)

    kept = Numbers()
    alive = weakref.ref(kept)
    gc.disable()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(*[kept])
        del kept
        assert alive() is None
    finally:
        gc.enable()


def test_a_handler_that_raises_keeps_no_other_signal_out() -> None:
    """Both have come while a process was launched; the first one's handler raises."""

    class Preempted(Exception):
        pass

    def preempt(number: int, frame: object) -> None:
        raise Preempted

    came: list[int] = []
    before = [
        (signal.SIGUSR1, signal.signal(signal.SIGUSR1, preempt)),
        (signal.SIGUSR2, signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))),
    ]
    try:
        with pytest.raises(Preempted), HandlersWait():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
        assert came == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is preempt
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGRTMIN, signal.SIGRTMAX])
def test_handlers_that_were_set_since_the_last_time(number: int) -> None:
    """Which signals have handlers is looked at each time; one without stays without."""
    came: list[str] = []
    before = signal.getsignal(number)

    def raised(where: str, expected: list[str]) -> None:
        came.clear()
        with HandlersWait():
            signal.raise_signal(number)
            assert came == [], where
        assert came == expected, where

    try:
        for name in ("one", "another"):
            signal.signal(number, lambda number, frame, name=name: came.append(name))  # type: ignore[misc]
            raised(name, [name])
        signal.signal(number, signal.SIG_IGN)
        raised("ignored", [])
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
