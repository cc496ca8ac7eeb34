"""What a worker does at the level of the kernel, and which threads were there when it was forked. Linux, from /proc.

Read when a batch has not come for long, never while batches come.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from asyncloader.threads import kernel_stat

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OURS = "asyncloader"
_THREADED = (
    "cv2",
    "duckdb",
    "faiss",
    "grpc",
    "jax",
    "lance",
    "lightgbm",
    "obstore",
    "onnxruntime",
    "polars",
    "pyarrow",
    "tensorflow",
    "tokenizers",
    "xgboost",
)


class Activity(NamedTuple):
    """A process, or a thread, at one moment.

    Attributes:
        state: The kernel's letter: R runs, S sleeps, D waits for a device, T and t are stopped, Z has ended.
        waits_in: The function of the kernel that it sleeps in; "" if it runs, or if the kernel keeps that to itself.
        cpu_s: CPU time that it has used. Seconds.
        started: When it started. Clock ticks since the machine booted.
    """

    state: str
    waits_in: str
    cpu_s: float
    started: int


def activity(folder: Path) -> Activity | None:
    """Return what a process or thread does; None where nobody tells.

    Args:
        folder: Its folder in /proc.
    """
    try:
        fields = kernel_stat(folder)  # state, then, among others, utime, stime and starttime
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        waits_in = _read(folder / "wchan")
        return Activity(fields[0], "" if waits_in == "0" else waits_in, cpu_s, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def threads_at(started: int) -> Counter[str]:
    """Count, by name, the threads of this process that were there when a worker started.

    The main thread and those of this package are left out. Threads that have ended since are not known any more.

    Args:
        started: When the worker started, as in `Activity`.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = Counter[str]()
    for folder in Path("/proc/self/task").glob("[0-9]*"):
        number = int(folder.name)
        name = names.get(number) or _read(folder / "comm")
        thread = activity(folder)
        if thread is not None and thread.started <= started and number != os.getpid() and not name.startswith(_OURS):
            found[name] += 1
    return found


def threaded_libraries() -> list[str]:
    """Return the libraries known to have threads of their own that this process has imported."""
    return [name for name in _THREADED if name in sys.modules]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
