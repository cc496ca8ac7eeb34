"""What the kernel tells of processes and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncloader.observe import activity as module
from asyncloader.observe.activity import Activity, activity, threaded_libraries, threads_at
from tests.support.patience import wait_until

SELF = Path("/proc/self")


def seen(folder: Path) -> Activity:
    """Return what is told of a process or thread that is there."""
    found = activity(folder)
    assert found is not None
    return found


def test_a_process_that_computes() -> None:
    """CPU time is that of all threads."""
    before = seen(SELF)
    wait_until(lambda: sum(range(10_000)) and seen(SELF).cpu_s >= before.cpu_s + 0.05)
    assert before.started == seen(SELF).started


def test_a_process_that_waits_and_one_that_is_stopped() -> None:
    """The states that a message is about, whatever the program is called."""
    program = "import sys; open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        folder = Path(f"/proc/{process.pid}")
        wait_until(lambda: seen(folder).state == "S")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: seen(folder).state == "T")
        process.kill()
        process.wait()
    assert activity(folder) is None


def test_threads_that_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, without the main thread, those of this package, and those that have started since."""
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait, name=name) for name in ("pool of a library", "asyncloader 1")]
    before = seen(SELF).started
    time.sleep(0.05)  # the kernel counts in hundredths of a second
    for thread in threads:
        thread.start()
    try:
        now = max(seen(folder).started for folder in (SELF / "task").iterdir())
        found = threads_at(now)
        assert found["pool of a library"] == 1
        assert not any(name.startswith("asyncloader") for name in found)
        assert "pool of a library" not in threads_at(before)
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_libraries_that_have_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were imported."""
    for name in module._THREADED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert threaded_libraries() == []
    monkeypatch.setitem(sys.modules, "polars", threading)
    assert threaded_libraries() == ["polars"]
