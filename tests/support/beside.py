"""A plugin: tests in several processes, each a copy of the one that has collected them. `pytest --beside 6`.

    pytest collects ──fork──> a copy: is given places of tests, runs them, sends the reports
                    ──fork──> a copy ...
    and shows the reports. A copy that dies fails the test that it was at, and another one goes on with the rest. How
    far it has come stands in memory that both have: a message for each step would cost 8 s of CPU time in all.

Imports and collection would be 40 s of CPU time in six processes that each start anew; here they are made
once. Tests that take the whole machine (`ALONE`) run one after the other, when all others have ended.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support import fork_server

ALONE = ("soak", "benchmark", "gpu")
LARGEST_PIECE = 60
ENDS_WITHIN_S = 30.0
OWNER = pytest.StashKey[int]()
"""The process that runs tests now: its forked copies find out by it that they are copies."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose how many processes run tests."""
    parser.addoption("--beside", type=int, default=0, metavar="N", help="run tests in N forked copies of this process")


def pytest_configure(config: pytest.Config) -> None:
    """Say which process runs tests, as long as there is one."""
    config.stash[OWNER] = os.getpid()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run tests in copies where that is asked for."""
    count = session.config.option.beside
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # that all of them have a part of
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.showfspath = False  # reports of several files come by turns
    crowd, alone = [], []
    for place, item in enumerate(session.items):
        (alone if any(map(item.get_closest_marker, ALONE)) else crowd).append(place)
    Crew(session, crowd, count).run()
    Crew(session, alone, 1).run()
    return True


# ------------------------------------------------------------------------------------------------ the side of pytest


class Copy:
    """A process that runs tests.

    Attributes:
        number: Its number, counted from 0.
        given: All tests that it was given, by their places among all.
        code: How it has ended, as of a process; None: it has not.
    """

    def __init__(self, session: pytest.Session, number: int, others: Sequence[Copy]) -> None:
        self.number = number
        self.given: list[int] = []
        self.code: int | None = None
        self._counts = memoryview(mmap.mmap(-1, 16)).cast("q")  # of the tests that it has begun, and ended
        self.connection, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for copy in (*others, self):
                copy.connection.close()
            run_tests(session, number, theirs, self._counts)
        theirs.close()

    def split(self) -> tuple[int | None, list[int]]:
        """Return the test that it is at, if it is at one, and those that it has not begun."""
        begun, ended = self._counts
        return self.given[begun - 1] if begun > ended else None, self.given[begun:]

    def has_ended(self) -> bool:
        """Whether it is gone; to be asked before what it has sent is read for the last time."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Return what it has sent."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.connection.poll():
                yield self.connection.recv()

    def stop(self) -> None:
        """End it as Ctrl-C would, so that its fixtures come to their ends; kill it if it does not end."""
        for signum in (signal.SIGINT, signal.SIGKILL):
            if self.has_ended():
                return
            os.kill(self.pid, signum)
            deadline = time.monotonic() + ENDS_WITHIN_S
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(0.01)


class Crew:
    """The copies that run some of the tests.

    Args:
        session: Has all tests.
        places: Those that are to be run.
        count: How many copies there are at a time.
    """

    def __init__(self, session: pytest.Session, places: Sequence[int], count: int) -> None:
        self._session = session
        self._left = deque(places)
        self._count = count
        self._copies: list[Copy] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Have the tests run, and report on each.

        Raises:
            Session.Failed: after as many failures as the user wants to see at most.
        """
        try:
            while self._left or self._copies:
                while len(self._copies) < min(self._count, len(self._left)):
                    self._copies.append(Copy(self._session, next(self._numbers), self._copies))
                multiprocessing.connection.wait([copy.connection for copy in self._copies], 0.1)
                for copy in self._copies[:]:
                    has_ended = copy.has_ended()
                    for message in copy.messages():
                        self._hear(copy, *message)
                    if has_ended:
                        self._let_go(copy)
                if reason := self._session.shouldfail or self._session.shouldstop:
                    raise self._session.Failed(reason)
        finally:
            for copy in self._copies:
                copy.stop()

    def _hear(self, copy: Copy, what: str, content: Any) -> None:
        hook = self._session.config.hook
        if what == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        else:
            given = self._next_piece(from_end=copy.number % 2 == 1)
            copy.given += given
            with contextlib.suppress(ConnectionError):
                copy.connection.send(given)

    def _next_piece(self, *, from_end: bool) -> list[int]:
        """Return tests for a copy, in their order. Every other copy begins at the end of what is left.

        Tests that compute stand beside tests that compute, and those that wait beside those that wait: from both ends
        there are some of each at a time, and no core is idle while the other has a queue.
        """
        count = min(LARGEST_PIECE, len(self._left) // (4 * self._count)) or 1
        count = min(count, len(self._left))
        if from_end:
            return [self._left.pop() for _ in range(count)][::-1]
        return [self._left.popleft() for _ in range(count)]

    def _let_go(self, copy: Copy) -> None:
        self._copies.remove(copy)
        copy.connection.close()
        at, left = copy.split()
        self._left.extendleft(reversed(left))
        if at is not None:
            item = self._session.items[at]
            how = f"was killed by signal {-copy.code}" if copy.code and copy.code < 0 else f"exited with {copy.code}"
            text = f"the process that ran {item.nodeid} {how}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            item.config.hook.pytest_runtest_logreport(report=report)
        elif copy.code:
            raise RuntimeError(f"a process that runs tests ended between two of them, with {copy.code}")


# ------------------------------------------------------------------------------------------------ the side of a copy


def run_tests(
    session: pytest.Session, number: int, connection: multiprocessing.connection.Connection, counts: memoryview
) -> None:
    """Run the tests that this copy is given, and end. Count those that are begun, and those that have ended."""
    code = 1
    try:
        gc.freeze()  # a collection would write to every page
        become_copy(session.config, number, connection)
        # Of each test the next one has to be known, for which its fixtures may stay.
        for place, following in itertools.pairwise(itertools.chain(places(connection), [None])):
            assert place is not None
            counts[0] += 1
            item, nextitem = session.items[place], None if following is None else session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            counts[1] += 1
        code = 0
    except (KeyboardInterrupt, ConnectionError):
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
    finally:
        os._exit(code)


def become_copy(config: pytest.Config, number: int, connection: multiprocessing.connection.Connection) -> None:
    """Have this process a capture, a folder and a terminal of its own; reports go to the process that shows them."""
    config.stash[OWNER] = os.getpid()
    fork_server.share()
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.mktemp(f"copy-{number}")
    config.pluginmanager.unregister(name="terminalreporter")
    terminal = types.SimpleNamespace(_tw=_terminal(config))  # pytest-timeout shows stacks there
    config.pluginmanager.register(terminal, "terminalreporter")
    config.pluginmanager.register(Teller(config, connection))


def _terminal(config: pytest.Config) -> Any:
    """Return what writes to the terminal in a copy."""
    from _pytest.config import create_terminal_writer

    return create_terminal_writer(config, os.fdopen(os.dup(2), "w"))


class Teller:
    """A plugin of a copy: sends the reports, but for those that say that before and after a test all was well."""

    def __init__(self, config: pytest.Config, connection: multiprocessing.connection.Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report, unless nobody would look at it."""
        if report.passed and report.when != "call" and not report.sections:
            return
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def places(connection: multiprocessing.connection.Connection) -> Iterator[int]:
    """Return the places of the tests that a copy is given, as long as it is given more."""
    with contextlib.suppress(EOFError):
        while given := _more(connection):
            yield from given


def _more(connection: multiprocessing.connection.Connection) -> list[int]:
    connection.send(("more", None))
    given: list[int] = connection.recv()
    return given
