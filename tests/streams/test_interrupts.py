"""What comes between any two lines of a stream: an interrupt, a signal whose handler takes a state, another thread.

The quick form takes some of the lines, others in each run; every one of them is slow.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from asyncloader.streams import Bucket, Filter, Map, Mix, Pack, ShardedStream, Shuffle, Stream
from asyncloader.streams.sharded import _Shard
from tests.streams.chains import Sample, cut, is_wanted, itself, length, read, tokens_of
from tests.streams.test_chains import Interrupted, resumed, saved
from tests.support import effort
from tests.support.garbage import uncollected


def sharded(name: str, *lengths: int) -> Stream[Any]:
    shards = [[Sample(name, shard, n, 0, size) for n, size in enumerate(lengths[shard:])] for shard in range(2)]
    return ShardedStream([shards[0][:-1], shards[1][-1:]], read)


def mixed() -> Stream[Any]:
    streams = [Shuffle(sharded("a", 3, 1, 2, 5), 4), sharded("b", 2, 4)]
    return Mix(streams, [(0, [1, 0]), (1, [1, 2])], by=length)


def filtered() -> Stream[Any]:
    """Return a stream that leaves a whole shard out while samples before it still wait."""
    numbers = [[0, 1, 2], [3], [4, 5, 6]]
    shards = [[Sample("c", shard, n, 0, 1) for n in own] for shard, own in enumerate(numbers)]
    return Shuffle(Filter(ShardedStream(shards, read, shuffle=False), is_wanted), 4)


CHAINS: dict[str, Callable[[], Stream[Any]]] = {
    "packed": lambda: Pack(Map(Shuffle(mixed(), 4), itself), {"tokens": 6}, length, window=3),
    "split": lambda: Pack(mixed(), {"tokens": 4}, length, split=True, window=3, cut=cut),
    "batches": lambda: Bucket(mixed(), length, max_tokens=6, window=3),
    "filtered": filtered,
}


def begun() -> Stream[Any]:
    """Return a stream that goes on from a state, in which the second source has given a long sample before its turn."""

    def stream() -> Stream[Any]:
        return Shuffle(Mix([sharded("a", *[1] * 6), sharded("b", 6, 6, 6)], [1, 1], by=length), 4, seed=0)

    next(iter(first := stream()))
    return resumed(stream(), saved(first))


CHAINS["begun"] = begun


def with_lines(fn: Callable[[], Any], at_line: Callable[[], None], module: str = "") -> Any:
    """Call a function, and another one before each line of the package's streams, or of a module, that it comes to."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and f"asyncloader/streams/{module}" in frame.f_code.co_filename.replace("\\", "/"):
            at_line()  # which is not traced: Python traces nothing that a trace function calls
        return trace

    before = sys.gettrace()
    with uncollected():
        sys.settrace(trace)
        try:
            return fn()
        finally:
            sys.settrace(before)


def taken(samples: Iterator[Any], at_line: Callable[[int], None]) -> list[Any]:
    """Return what an iterator gives until there is an interrupt, calling with how much that is before each line."""
    given = list[Any]()
    with suppress(StopIteration, Interrupted):
        while True:
            given.append(with_lines(lambda: next(samples), lambda: at_line(len(given))))
    return given


def count_of_lines(make: Callable[[], Stream[Any]]) -> int:
    lines = list[int]()
    taken(iter(make()), lines.append)
    return len(lines)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
@pytest.mark.parametrize("name", CHAINS)
def test_an_interrupt_at_each_line_loses_nothing(name: str, part: int) -> None:
    """The same iterator goes on, or another one from a state; in the same order. Each line has its turn."""
    make, whole = CHAINS[name], [*CHAINS[name]()]
    first, step = (random.randrange(30), 30) if effort.is_quick else (part, 6)
    for line in range(first, count_of_lines(make), step):
        left, stream = itertools.count(line, -1), make()

        def interrupt(_: int, left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise Interrupted

        given = taken(samples := iter(stream), interrupt)
        state = saved(stream)
        assert [*given, *samples] == whole, line
        rest = resumed(make(), state)
        assert given + ([] if rest.epoch else [*rest]) == whole, line


@pytest.mark.parametrize("name", CHAINS)
def test_a_signals_handler_may_take_a_state_at_each_line(name: str) -> None:
    """The state has what was given, or also what is about to be; and the run that it has come into goes on."""
    make, whole, states = CHAINS[name], [*CHAINS[name]()], list[Any]()
    stream, lines = make(), itertools.count(random.randrange(5))

    def take_state(count: int) -> None:
        if next(lines) % 5 == 0 or not effort.is_quick:
            states.append((count, saved(stream)))

    assert taken(iter(stream), take_state) == whole
    for count, state in states:
        rest = [] if state["epoch"] else [*resumed(make(), state)]
        assert rest in (whole[count:], whole[count + 1 :])
    assert {state["epoch"] for _, state in states} <= {0, 1}


@pytest.mark.parametrize(("name", "module"), [*((name, "") for name in CHAINS), ("begun", "mix.py")])
def test_a_state_at_one_line_changes_nothing(name: str, module: str) -> None:
    """Nor does it change what states have behind that. Before a commit, one line of eight is tried, but all of Mix."""
    make, step = CHAINS[name], 8 if effort.is_quick and not module else 1

    def states_of(stream: Stream[Any], at_line: Callable[[], bool]) -> list[Any]:
        """Return the samples, each with the state behind it: from where `at_line` says so."""
        found, samples, is_due = list[Any](), iter(stream), False

        def look() -> None:
            nonlocal is_due
            is_due = at_line()

        while not found or found[-1][0] is not None:
            sample = with_lines(lambda: next(samples, None), look, module)
            found.append((sample, saved(stream) if is_due else None))
        return found

    whole, lines = states_of(make(), lambda: True), list[int]()
    states_of(make(), lambda: bool(lines.append(0)))
    for line in range(random.randrange(step), len(lines), step):
        left, stream = itertools.count(line, -1), make()

        def take_state(left: Iterator[int] = left, stream: Stream[Any] = stream) -> bool:
            number = next(left)
            if number == 0:
                saved(stream)
            return number <= 0

        for (sample, state), expected in zip(states_of(stream, take_state), whole, strict=True):
            assert (sample, state) in (expected, (expected[0], None))


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_a_record_may_be_told_the_same_at_each_line(order: tuple[int, ...]) -> None:
    """As by the handler of a signal, at one of them: it has that sample, those before it, and no other one."""
    for line in range(12):
        shard, given = _Shard(0, "name"), set[int]()
        for number in order:
            given.add(number)
            left = itertools.count(line, -1)

            def tell_again(shard: _Shard = shard, number: int = number, left: Iterator[int] = left) -> None:
                if next(left) == 0:
                    shard.give(number)
                assert {*range(shard.low), *shard.beyond} in (given, given - {number})  # noqa: B023

            with_lines(lambda: shard.give(number), tell_again)  # noqa: B023
        assert (shard.low, shard.beyond) == (4, set())


class Asked:
    """A lock that says whether somebody waits for it."""

    def __init__(self, is_asked: threading.Event) -> None:
        self._lock, self._is_asked = threading.RLock(), is_asked

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._is_asked.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Beside:
    """At one of the lines of a call another thread does something, until done, or waiting for the samples' lock."""

    def __init__(self, line: int, function: Callable[[], object]) -> None:
        self._left, self._function = line, function
        self._thread: threading.Thread | None = None
        self.is_further = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
            self.is_further.wait()

    def _run(self) -> None:
        try:
            self._function()
        finally:
            self.is_further.set()

    def join(self) -> None:
        """Wait until it has done that, if it has begun."""
        if self._thread is not None:
            self._thread.join()


@pytest.mark.parametrize("asks", ["a sample", "a state"])
def test_another_thread_may_come_at_each_line(asks: str) -> None:
    """It gets the next sample, or a state without the one on its way: each sample is given once."""
    make, whole = CHAINS["packed"], [*CHAINS["packed"]()]
    first, step = (random.randrange(30), 30) if effort.is_quick else (0, 3)
    for line in range(first, count_of_lines(make), step):
        stream, others = make(), list[Any]()
        samples: Any = iter(stream)

        def ask(stream: Any = stream, samples: Any = samples, others: Any = others) -> None:
            others.append(next(samples, None) if asks == "a sample" else saved(stream))

        beside = Beside(line, ask)
        samples._lock = Asked(beside.is_further)
        given = list[Any]()
        while (sample := with_lines(lambda: next(samples, None), beside)) is not None:  # noqa: B023
            given.append(sample)
            beside.join()
        beside.join()
        if asks == "a sample":
            assert tokens_of([*given, *filter(None, others)]) == tokens_of(whole)
        for state in others if asks == "a state" else []:
            rest = [*resumed(make(), state)]
            assert state["epoch"] or rest == whole[len(whole) - len(rest) :]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_samples_may_be_asked_for_at_each_line_of_a_state(is_ahead: bool) -> None:
    """By another thread, or by that of ``async for``, which wait: the state has all that was given."""
    make, whole, lines = CHAINS["packed"], [*CHAINS["packed"]()], list[int]()
    stream = make()
    next(iter(stream))
    with_lines(lambda: saved(stream), lambda: lines.append(0))
    for line in range(len(lines)):
        stream = make()
        samples: Any = aiter(stream) if is_ahead else iter(stream)
        given = [next(samples)]

        def take_two(samples: Any = samples, given: list[Any] = given) -> None:
            if is_ahead:
                samples._take_some()
            else:
                given += [next(samples), next(samples)]

        beside = Beside(line, take_two)
        samples._lock = Asked(beside.is_further)
        state = with_lines(lambda: saved(stream), beside)  # noqa: B023
        beside.join()
        assert given == whole[: 1 if is_ahead else 3]
        assert [*resumed(make(), state)] in (whole[1:], whole[3:])


@pytest.mark.parametrize("line", range(1, 9))
def test_an_interrupt_of_async_for_loses_nothing(line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its thread has read ahead, here all that there is, is read again, once."""
    monkeypatch.setattr("asyncloader.streams.stream._AHEAD_S", 60.0)
    make, whole, left = CHAINS["packed"], [*CHAINS["packed"]()], itertools.count(line, -1)

    async def first(samples: Any) -> Any:
        return await anext(samples)

    def interrupt() -> None:
        if next(left) == 0:
            raise Interrupted

    stream = make()
    samples: Any = aiter(stream)
    given = [asyncio.run(first(samples))]
    assert samples._ahead
    with pytest.raises(Interrupted):
        with_lines(lambda: next(samples), interrupt)
    given.append(next(samples))
    assert [*resumed(make(), saved(stream))] == whole[2:]
    assert [*given, *samples] == whole
