"""A signal at every moment at which it can hit the library, one after the other: no batch is lost, none given twice.

CPython looks for signals after calls, where functions begin and where loops jump back. So that is where a trace
function acts as a signal's handler: in the frames of the library, at the first such moment, at the second, and so on.
It saves a state, and raises KeyboardInterrupt or returns.

The quick form takes some of the moments, others in each run; every one of them is slow. A failure names its moment.
"""

import asyncio
import dis
import functools
import gc
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.engine.finisher import Finisher
from asyncloader.errors import LoaderClosedError
from asyncloader.run.inline_iterator import InlineIterator
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.seeding import sample_context
from asyncloader.worker.guarded_loop import GuardedLoop
from tests.pins import pins

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


class CtrlC:
    """Handles a signal in the library, at the moment of this number; or one at every moment, if that is 0.

    A trace function raises before an instruction, a signal after one, as if it came out of that. So moments are left
    out where the handlers of the two differ, as at the end of a ``with`` block, whose lock would stay locked. Nor is
    there a collection of garbage, which is of other tests: what is raised in finalizers reaches nobody.

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
        return is_looked_after(dis.opname[code.co_code[last]]) and handlers(code)[last] == handlers(code)[now]


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


class Many(Counting):
    def __len__(self) -> int:
        return 6


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


def numbers_in(batch: Any) -> list[int]:
    """Return the samples of a batch, that of a `Rows` too."""
    numbers: list[int] = (batch[0] if isinstance(batch, list) else batch).tolist()
    return numbers


def take(iterator: Any, seen: list[int]) -> None:
    for batch in iterator:
        seen += numbers_in(batch)


def take_async(iterator: Any, seen: list[int]) -> None:
    async def taking() -> None:
        async for batch in iterator:
            seen.extend(numbers_in(batch))

    loop = asyncio.new_event_loop()  # which has no handler of its own for Ctrl-C
    try:
        loop.run_until_complete(taking())
    finally:
        loop.close()


class Pinning(WorkerIterator[Any]):
    """An iterator that pins, without a GPU."""

    def _make_finisher(self, loop: GuardedLoop) -> Finisher:
        return pins(loop, lambda batch: batch.clone())


class Rows(TensorDataset):
    """Its batches are gathered by the array of their indices."""

    def __init__(self) -> None:
        super().__init__(torch.arange(4))


class Awaited(Counting):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index


THREADS: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread", "persistent_workers": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (Counting, {"shuffle": True}),
    "gathered": (Rows, {"shuffle": True}),
    "gathered in order": (Rows, {}),
    "bad samples": (OneBad, {"on_error": "skip", "max_errors": 3}),
    "stream": (Places, {}),
    "processes": (Counting, {"shuffle": True, "num_workers": 2, "persistent_workers": True}),
    "threads": (Counting, {"shuffle": True, **THREADS}),
    "torch's window": (Counting, {"max_buffered_bytes": 0, **THREADS}),
    "as they come": (Counting, {"in_order": False, **THREADS}),
    "bad samples in workers": (OneBad, {"on_error": "skip", "max_errors": 3, **THREADS}),
    "stream in a worker": (Places, {**THREADS, "num_workers": 1}),
    "awaited": (Awaited, {}),
    "several at once": (Counting, {"concurrency": 2, **THREADS}),
}
NEVER = 1 << 30
"""No moment. From Python 3.14 on a function is traced by instruction from its second call on: this is its first."""
SOME = 30  # one moment in so many
QUICK = ("shuffled", "gathered", "bad samples", "stream", "processes", "threads", "bad samples in workers")


def cases(*quick: str) -> list[Any]:
    """Return all cases; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in CASES]


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
        return self.iterate(self.loader, 0)

    def iterate(self, loader: DataLoader[Any], steps: int) -> Any:
        """Return an iterator that begins after so many steps."""
        return iter(loader)

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
                take(self.iterate(resumed, len(seen)), rest)
            assert sorted(seen + rest) == self.expected, (seen, rest, state)

    def rest(self, taking: Callable[[Any, list[int]], None], iterator: Any) -> None:
        """Go on after an interrupt, to the end; what the iterator had begun of a stream may be gone."""
        try:
            taking(iterator, self.seen)
        except LoaderClosedError:
            assert self._make not in (Counting, OneBad, Rows, Awaited)
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
@pytest.mark.parametrize("case", cases(*QUICK))
def test_no_moment_loses_a_batch(taking: Callable[[Any, list[int]], None], case: str, one_in: int) -> None:
    """States taken in the handler and after the interrupt go on with all the rest, and so does the iterator itself."""
    interrupt_everywhere(Epochs(case), taking, one_in)


@pytest.mark.parametrize("case", cases("shuffled", "threads"))
def test_no_moment_of_handling_an_interrupt_loses_a_batch(case: str, one_in: int) -> None:
    """Who is impatient presses Ctrl-C twice."""
    interrupt_everywhere(Epochs(case), take, one_in, times=2)


@pytest.mark.parametrize("taking", [take, take_async])
def test_no_moment_loses_a_pinned_batch(
    taking: Callable[[Any, list[int]], None], one_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in page-locked memory is on its way to the consumer like any other batch."""
    monkeypatch.setattr("asyncloader.loader._import_iterators", lambda: (InlineIterator, Pinning))
    interrupt_everywhere(Epochs("threads"), taking, one_in)


@pytest.mark.parametrize("taking", [take, take_async])
@pytest.mark.parametrize("case", cases(*QUICK))
def test_a_state_at_any_moment_is_exact(taking: Callable[[Any, list[int]], None], case: str) -> None:
    """A handler that saves one and returns changes nothing, and what it saved resumes with all the rest."""
    epochs = Epochs(case)
    iterator = epochs.begin()
    with CtrlC(0, epochs.save, times=0):
        taking(iterator, epochs.seen)
    assert sorted(epochs.seen) == epochs.expected
    epochs.check()
    epochs.loader.close()
