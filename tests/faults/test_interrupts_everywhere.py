"""Ctrl-C at every moment at which it can hit the library, one after the other: no batch is lost without workers.

CPython looks for signals after calls, where functions begin and where loops jump back. So that is where a trace
function raises KeyboardInterrupt, in the frames of the library, at the first such moment, at the second, and so on.
"""

import asyncio
import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.seeding import sample_context

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
    """Raises KeyboardInterrupt in the library, at the moment of this number.

    A trace function raises before an instruction, a signal after one, as if it came out of that. So moments are left
    out where the handlers of the two differ, as at the end of a ``with`` block, whose lock would stay locked.
    """

    def __init__(self, moment: int) -> None:
        self.left = moment
        self._last: dict[FrameType | None, int] = {}

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        in_library = frame.f_code.co_filename.startswith(LIBRARY)
        if not in_library or frame.f_code.co_name == "stop":  # a finalizer, out of which nothing is raised
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._last.pop(frame.f_back, None)  # a call of a function is followed by no look of its own
        elif event == "opcode":
            last, now = self._last.get(frame), frame.f_lasti
            self._last[frame] = now
            if last is not None and self._may_hit(frame.f_code, last, now):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
        return self._step

    def _may_hit(self, code: CodeType, last: int, now: int) -> bool:
        if dis.opname[code.co_code[now]] == "GET_AWAITABLE":  # a coroutine that is made is awaited at once
            return False
        return is_looked_after(dis.opname[code.co_code[last]]) and handlers(code)[last] == handlers(code)[now]


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

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 4:
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


@pytest.mark.parametrize("taking", [take, take_async])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Counting, {"batch_size": 2, "shuffle": True}),
        (OneBad, {"batch_size": 2, "on_error": "skip", "max_errors": 3}),
        (Places, {"batch_size": 2}),
    ],
    ids=["shuffled", "bad samples", "stream"],
)
def test_no_moment_loses_a_batch(
    taking: Callable[[Any, list[int]], None], dataset: Callable[[], Any], options: dict[str, Any]
) -> None:
    """A state taken after the interrupt goes on with all the rest, and so does the iterator itself, or it refuses."""
    moment = 0
    while True:
        moment += 1
        loader = DataLoader(dataset(), **options)
        iterator = iter(loader)
        seen: list[int] = []
        ctrl_c = CtrlC(moment)
        try:
            with ctrl_c:
                taking(iterator, seen)
            break
        except KeyboardInterrupt:
            pass
        resumed = DataLoader(dataset(), **options)
        state = loader.state_dict()
        resumed.load_state_dict(state)
        rest: list[int] = []
        take(resumed, rest)
        expected = [0] if dataset is OneBad else [*range(4)]
        is_over = state["epoch"] == 1  # what goes on then is the next epoch
        assert sorted(seen if is_over else seen + rest) == expected, (moment, seen, state)
        try:
            taking(iterator, seen)
        except asyncloader.LoaderClosedError:
            assert dataset is Places
        else:
            assert sorted(seen) == expected, moment
        iterator.close()
    assert moment > 10
