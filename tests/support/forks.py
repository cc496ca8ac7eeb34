"""Forked copies of the test process: each runs one function, then ends, whatever the function does.

    child = forked(function)             # the child runs it
    assert child.wait() == 0             # 0 where it returned None or True

A copy that raised would otherwise go on as a second pytest, in the place of the first one: it would run tests, and
answer for the one that reports (beside.py). The copy's traceback is written to stderr.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator

PATIENCE_S = 50.0  # less than pytest waits for a test


class Child:
    """A forked copy that runs, or has run."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it. A copy that hangs is killed."""
        if self._code is None:
            with _pidfd(self.pid) as pidfd:
                is_over = bool(select.select([pidfd], [], [], PATIENCE_S)[0])
            if not is_over:
                self.kill()
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            assert is_over, f"the forked copy {self.pid} did not end within {PATIENCE_S} s"
        return self._code

    def kill(self) -> None:
        """Send it SIGKILL; `wait` is for the caller."""
        os.kill(self.pid, signal.SIGKILL)


def forked(function: Callable[[], object]) -> Child:
    """Have a forked copy of this process run a function; it exits with 1 where that raises or returns False."""
    pid = os.fork()
    if pid:
        return Child(pid)
    code = 1
    try:
        code = int(function() is False)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
