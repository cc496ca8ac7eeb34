"""A signal at every moment at which it can hit the library, one after the other: no batch is lost, none given twice.

Nor in the moments that matter most: keys that an iterator in C has just given, the middle of `next`, and a second
signal. The instant in which a batch that is counted is handed over, as its lock is released, is left out: whoever is
interrupted there has had it.

CPython looks for signals after calls, where functions begin and where loops jump back. So that is where a trace
function acts as a signal's handler: in the frames of the library, at the first such moment, at the second, and so on.
It saves a state, and raises KeyboardInterrupt or returns.

The quick form takes some of the moments, others in each run; every one of them is slow. A failure names its moment.
"""

import _thread
import asyncio
import dis
import functools
import gc
import itertools
import json
import operator
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.seeding import sample_context
from tests.support.patience import wait_until

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)

LIBRARY = os.path.dirname(asyncloader.__file__)


@pytest.fixture(autouse=True)
def whose_sample_it_was_does_not_matter() -> Iterator[None]:
    """Between "this is the sample" and the ``try`` that takes it back lies a moment: what is left then is harmless."""
    yield
    sample_context.current.set(None)  # type: ignore[arg-type]


def is_looked_after(opname: str) -> bool:
    """Whether CPython looks for signals after it."""
    jumps_back = "JUMP_BACKWARD" in opname and "NO_INTERRUPT" not in opname
    return jumps_back or opname == "RESUME" or (opname.startswith("CALL") and "INTRINSIC" not in opname)


@functools.cache
def handlers(code: CodeType) -> list[Any]:
    """Return by offset which handler of exceptions an instruction has."""
    found = [None] * len(code.co_code)
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        found[entry.start : entry.end] = [entry.target] * (entry.end - entry.start)
    return found


@functools.cache
def ends_of_with(code: CodeType) -> set[int]:
    """Return the offsets of calls at the end of ``with`` blocks: with three times None."""
    names = [each for each in dis.get_instructions(code) if each.opname != "PRECALL"]
    return {
        call.offset
        for *loads, call in zip(names, names[1:], names[2:], names[3:], strict=False)
        if call.opname.startswith("CALL") and all(each.opname == "LOAD_CONST" and each.argval is None for each in loads)
    }


class CtrlC:
    """Handles a signal in the library, at the moment of this number; or one at every moment, if that is 0.

    A trace function raises before an instruction, a signal after one, as if it came out of that. So moments are left
    out where the handlers of the two differ. So is the end of a ``with`` block, where a lock is released: the last
    instant before a batch that is counted inside is handed over. Nor is there a collection of garbage, which is of
    other tests: what is raised in finalizers reaches nobody.

    Args:
        moment: When to raise KeyboardInterrupt.
        handler: What to do before.
        times: How many moments in a row, those in which the first interrupt is being handled.
    """

    def __init__(self, moment: int, handler: Callable[[], object] = lambda: None, times: int = 1) -> None:
        self.left = moment
        self._handler = handler
        self._times = times
        self._last: dict[FrameType | None, int] = {}

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._enter)

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()
        if self._collects:
            gc.enable()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        in_library = frame.f_code.co_filename.startswith(LIBRARY)
        if not in_library or frame.f_code.co_name == "stop":  # a finalizer, out of which nothing is raised
            return None
        frame.f_trace = self._step  # without it, Python 3.13 does not look at instructions
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[frame] = frame.f_lasti  # it begins, or goes on after an `await`: there is no event for that opcode
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._last.pop(frame.f_back, None)  # a call of a function is followed by no look of its own
        elif event == "opcode":
            last, now = self._last.get(frame), frame.f_lasti
            self._last[frame] = now
            if last is not None and self._may_hit(frame.f_code, last, now):
                self.left -= 1
                if self.left <= 0:
                    self._handler()
                if -self._times < self.left <= 0:
                    raise KeyboardInterrupt
        return self._step

    def _may_hit(self, code: CodeType, last: int, now: int) -> bool:
        if dis.opname[code.co_code[now]] == "GET_AWAITABLE":  # a coroutine that is made is awaited at once
            return False
        is_looked_at = is_looked_after(dis.opname[code.co_code[last]]) and last not in ends_of_with(code)
        return is_looked_at and handlers(code)[last] == handlers(code)[now]


class RealCtrlC(CtrlC):
    """Sends SIGINT at the moment of this number: its handler raises there, or later, where handlers wait.

    Args:
        moment: When to send it.

    Raises:
        RuntimeError: if the program ignores it, as one that a shell has started in the background.
    """

    def __init__(self, moment: int) -> None:
        super().__init__(moment, self._send, times=0)
        self._is_sent = False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            raise RuntimeError("SIGINT would not raise KeyboardInterrupt: set signal.default_int_handler")

    def _send(self) -> None:
        if not self._is_sent:
            self._is_sent = True
            signal.raise_signal(signal.SIGINT)


class Counting:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class OneBad(Counting):
    def __getitem__(self, index: int) -> int:
        if index in (1, 2, 3):
            raise ValueError(index)
        return index


class Places(IterableDataset[int]):
    """Its own iterator, with a state."""

    def __init__(self, length: int = 4) -> None:
        self.at = 0
        self.length = length

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def take(iterator: Any, seen: list[int]) -> None:
    for batch in iterator:
        seen += batch.tolist()


def take_async(iterator: Any, seen: list[int]) -> None:
    async def taking() -> None:
        async for batch in iterator:
            seen.extend(batch.tolist())

    loop = asyncio.new_event_loop()  # which has no handler of its own for Ctrl-C
    try:
        loop.run_until_complete(taking())
    finally:
        loop.close()


THREADS: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread", "persistent_workers": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (Counting, {"shuffle": True}),
    "bad samples": (OneBad, {"on_error": "skip", "max_errors": 3}),
    "stream": (Places, {}),
    "threads": (Counting, {"shuffle": True, **THREADS}),
    "as they come": (Counting, {"in_order": False, **THREADS}),
}
NEVER = 1 << 30
"""No moment. From Python 3.14 on a function is traced by instruction from its second call on: this is its first."""
SOME = 30  # one moment in so many


@pytest.fixture(params=[SOME, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"])
def one_in(request: pytest.FixtureRequest) -> int:
    """Of how many moments one is taken."""
    return request.param  # type: ignore[no-any-return]


class Epochs:
    """Epochs of one loader, and states that were saved in them with what had been given by then."""

    def __init__(self, case: str) -> None:
        self._make, options = CASES[case]
        self._options = {"batch_size": 2, **options}
        self.loader = DataLoader(self._make(), **self._options)
        self.expected = [0] if self._make is OneBad else [*range(4)]
        self.seen: list[int] = []
        self._states: dict[str, list[int]] = {}

    def begin(self) -> Any:
        """Begin an epoch."""
        if not self._options.get("persistent_workers"):
            self.loader = DataLoader(self._make(), **self._options)
        self.seen = []
        self._states.clear()
        return iter(self.loader)

    def save(self) -> None:
        """Save a state, as a trainer does in the handler of a signal."""
        state = self.loader.state_dict()
        self._states[json.dumps([state, self.seen])] = list(self.seen)

    def check(self) -> None:
        """See that each state resumes with what had not been given, and that all was given once by now."""
        for text, seen in self._states.items():
            state, _ = json.loads(text)
            rest: list[int] = []
            if not state["finished"]:  # what it resumes with then is the next epoch
                resumed = DataLoader(self._make(), **{**self._options, "persistent_workers": False})
                resumed.load_state_dict(state)
                take(iter(resumed), rest)
            assert sorted(seen + rest) == self.expected, (seen, rest, state)

    def rest(self, taking: Callable[[Any, list[int]], None], iterator: Any) -> None:
        """Go on after an interrupt, to the end; what the iterator had begun of a stream may be gone."""
        try:
            taking(iterator, self.seen)
        except LoaderClosedError:
            assert self._make not in (Counting, OneBad)
        else:
            assert sorted(self.seen) == self.expected


def interrupt_everywhere(epochs: Epochs, taking: Callable[[Any, list[int]], None], one_in: int, times: int = 1) -> None:
    """Interrupt an epoch at its first moment, the next one at its second, until none is left to be interrupted.

    Args:
        epochs: Of the loader.
        taking: Takes an epoch.
        one_in: How far it is from one moment to the next on average; the distances are drawn anew in each run.
        times: How many moments in a row are interrupted.
    """
    moment = interrupted = uninterrupted = 0
    while uninterrupted < 3:  # how many moments there are depends on who waits for whom
        moment += random.SystemRandom().randint(1, 2 * one_in - 1)
        try:
            if interrupt(epochs, taking, moment, times):
                interrupted += 1
            else:
                uninterrupted += 1
        except BaseException as error:
            error.add_note(f"interrupted at moment {moment}")
            raise
    assert interrupted > 10 / one_in
    epochs.loader.close()


def interrupt(epochs: Epochs, taking: Callable[[Any, list[int]], None], moment: int, times: int) -> bool:
    """Interrupt an epoch there, and go on; return whether it was that long."""
    iterator, interrupted = epochs.begin(), False
    try:
        with CtrlC(moment, epochs.save, times):
            taking(iterator, epochs.seen)
    except KeyboardInterrupt:
        interrupted = True
        epochs.save()
    epochs.check()
    epochs.rest(taking, iterator)
    return interrupted


@pytest.mark.parametrize("taking", [take, take_async])
@pytest.mark.parametrize("case", CASES)
def test_no_moment_loses_a_batch(taking: Callable[[Any, list[int]], None], case: str, one_in: int) -> None:
    """States taken in the handler and after the interrupt go on with all the rest, and so does the iterator itself."""
    interrupt_everywhere(Epochs(case), taking, one_in)


@pytest.mark.parametrize("case", ["shuffled", "threads"])
def test_no_moment_of_handling_an_interrupt_loses_a_batch(case: str, one_in: int) -> None:
    """Who is impatient presses Ctrl-C twice."""
    interrupt_everywhere(Epochs(case), take, one_in, times=2)


@pytest.mark.parametrize("taking", [take, take_async])
@pytest.mark.parametrize("case", CASES)
def test_a_state_at_any_moment_is_exact(taking: Callable[[Any, list[int]], None], case: str) -> None:
    """A handler that saves one and returns changes nothing, and what it saved resumes with all the rest."""
    epochs = Epochs(case)
    iterator = epochs.begin()
    with CtrlC(0, epochs.save, times=0):
        taking(iterator, epochs.seen)
    assert sorted(epochs.seen) == epochs.expected
    epochs.check()
    epochs.loader.close()


class Interrupting:
    """A batch sampler whose iterator is one of C, in which a signal comes each time, once a first window is read."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        signals = itertools.chain(range(5), map(_thread.interrupt_main, itertools.repeat(signal.SIGINT)))
        return map(operator.itemgetter(0), zip([[each] for each in range(12)], signals, strict=False))


@pytest.mark.parametrize("taking", [take, take_async])
@pytest.mark.parametrize("options", [{}, THREADS], ids=["no workers", "threads"])
def test_keys_that_an_iterator_in_c_gives_with_a_signal_are_not_lost(taking: Any, options: dict[str, Any]) -> None:
    """It is one further by then: what it has given has no other place but the reader's."""
    loader: DataLoader[int] = DataLoader(Counting(), batch_sampler=Interrupting(), **options)  # type: ignore[arg-type]
    iterator = iter(loader)
    seen: list[int] = []
    interrupts, is_over = 0, False
    while not is_over:
        try:
            taking(iterator, seen)
            is_over = True
        except KeyboardInterrupt:
            interrupts += 1
            state = loader.state_dict()
            assert state["position"] == len(seen)
    assert (seen, interrupts > 0) == ([*range(12)], True)
    loader.close()


class Signalling(Counting):
    """A signal comes while a sample is made."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            signal.raise_signal(signal.SIGUSR1)
        return index


@pytest.mark.parametrize("face", ["for", "async for"])
def test_a_handler_in_the_middle_of_next_saves_looks_and_closes(face: str) -> None:
    """As under Slurm: what it calls waits for no lock of the call that it has interrupted, in the same thread."""
    loader: DataLoader[int] = DataLoader(Signalling(), batch_size=2)  # type: ignore[arg-type]
    seen: list[int] = []
    told: list[Any] = []

    def handle(number: int, frame: object) -> None:
        told.append((loader.state_dict()["position"], loader.stats().batches, len(seen)))
        loader.close()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(LoaderClosedError):
            (take if face == "for" else take_async)(iter(loader), seen)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [(1, 1, 2)]
    assert seen in ([0, 1], [0, 1, 2, 3])  # the batch that was being made is given, or the task that waits hears of it


def test_a_second_ctrl_c_leaves_whatever_handles_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker hangs: the first one leaves `next`, the second `close`, at once."""
    hangs, made = threading.Event(), []
    monkeypatch.setattr(Counting, "__getitem__", lambda self, index: hangs.wait(20) or made.append(index) or index)
    iterator: Any = iter(DataLoader(Counting(), num_workers=1, worker_backend="thread"))  # type: ignore[arg-type]
    trainer = threading.get_ident()

    def interrupt_in(call: Any) -> None:
        def is_there() -> bool:
            stack = traceback.walk_stack(sys._current_frames()[trainer])
            return any(frame.f_code is call.__func__.__code__ for frame, _ in stack)

        wait_until(is_there)
        signal.pthread_kill(trainer, signal.SIGINT)

    for call in (iterator.__next__, iterator.close):
        threading.Thread(target=interrupt_in, args=(call,)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not made
    hangs.set()
    iterator.close()
