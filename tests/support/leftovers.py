"""What a process has that a test could leave behind: children, threads, descriptors, shared memory.

    before = Holdings.now()
    ...                                  # the test
    before.more_than_before()            # [] or one line for each thing that is left

What stays by design is told apart by what it is, never by how many there are: multiprocessing's forkserver and
resource tracker by their pids and descriptors, the arenas of its heap (for `multiprocessing.Value`) by their name, the
threads on which datasets read files by theirs. The
loader's own portal thread with its loop, and its arena, are brought to life before the first look (see conftest.py), so
that they belong to what was there before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import multiprocessing
import os
import re
import stat
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Self

import psutil

from asyncloader.datasets.blocking import THREAD_NAME

PATIENCE_S = 10.0  # for a busy machine: only what is left in the end costs so much
COLLECT_AFTER_S = (0.1, 0.5, 1.0, 2.0, 4.0, 7.0, math.inf)  # timers of some seconds hold what is garbage then
SHM = Path("/dev/shm")
FDS = "/proc/self/fd"
HEAP = "/pym-"


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    children: frozenset[int]
    threads: frozenset[weakref.ref[threading.Thread]]  # a thread that has ended may be all that holds descriptors
    descriptors: dict[int, str]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Look at the process as it is."""
        keepers, kept_descriptors = _singletons()
        return cls(
            children=frozenset(descendants(os.getpid()) - keepers),
            threads=frozenset(map(weakref.ref, threading.enumerate())),
            descriptors={
                fd: what for fd, what in descriptors().items() if fd not in kept_descriptors and HEAP not in what
            },
            segments=frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset(),
        )

    def more_than_before(self, patience_s: float = PATIENCE_S, *, collect: bool = True) -> list[str]:
        """Describe what is there now and was not there before; wait for what is on its way out.

        Garbage is collected only when something is left after a while: a collection after each of hundreds of tests
        would cost more than the tests.
        """
        now = Holdings.now()
        suspects = now.segments  # what others on this machine make later is not to be blamed on this process
        left = self._compare(now)
        begun, pause, collected = time.monotonic(), 0.002, 0
        while left and (waited := time.monotonic() - begun) < patience_s:
            if collect and waited > COLLECT_AFTER_S[collected]:
                gc.collect()
                collected += 1
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
            now = Holdings.now()
            left = self._compare(dataclasses.replace(now, segments=now.segments & suspects))
        return left

    def new_threads(self, before: Self) -> list[threading.Thread]:
        """Return the threads that were not there before, and still run."""
        found = [thread() for thread in self.threads - before.threads]
        alive = [thread for thread in found if thread is not None and thread.is_alive()]
        return [thread for thread in alive if not thread.name.startswith(THREAD_NAME)]

    def _compare(self, now: Holdings) -> list[str]:
        children = now.children - self.children
        return [
            *(f"process {_process(pid)}" for pid in sorted(children)),
            *(f"not joined: {child!r}" for child in multiprocessing.active_children() if child.pid in children),
            *(f"thread {thread!r}" for thread in now.new_threads(self)),
            *(f"descriptor {fd} -> {what}" for fd, what in self._new_descriptors(now)),
            *(f"shared memory {SHM / name}" for name in _ours(now.segments - self.segments)),
        ]

    def _new_descriptors(self, now: Holdings) -> Iterable[tuple[int, str]]:
        return ((fd, what) for fd, what in now.descriptors.items() if self.descriptors.get(fd) != what)


def descendants(pid: int) -> set[int]:
    """Find the children of a process, their children and so on; dead ones that nobody has reaped count."""
    if not sys.platform.startswith("linux"):
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    if pid == os.getpid() and not _has_children():
        return set()
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process is gone
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as children:
                found |= {int(child) for child in children.read().split()}  # unless the thread is gone
    return found.union(*map(descendants, found))


def _has_children() -> bool:
    """Whether this process has any, dead or alive: one call, where to look for them takes two for each thread."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descriptors() -> dict[int, str]:
    """Map this process's open descriptors to what they lead to."""
    if not os.path.isdir(FDS):
        return {fd: _inode(fd) for fd in range(256) if _inode(fd)}
    found: dict[int, str] = {}
    for name in os.listdir(FDS):
        with contextlib.suppress(OSError):  # the descriptor that listed the folder
            found[int(name)] = os.readlink(f"{FDS}/{name}")
    return found


def _inode(fd: int) -> str:
    try:
        status = os.fstat(fd)
    except OSError:
        return ""
    return f"{stat.filemode(status.st_mode)} inode {status.st_ino}"


def _singletons() -> tuple[set[int], set[int]]:
    """Name the processes and descriptors that multiprocessing keeps for good, once it has needed them."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    pids = {server._forkserver_pid, tracker._pid}
    fds = {server._forkserver_alive_fd, tracker._fd}
    return pids - {None}, fds - {None}


def _process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}, child of {process.ppid()}): {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"{pid} (gone by now)"


def _ours(segments: Iterable[str]) -> set[str]:
    """Return those segments that are to be blamed on this process: its family has mapped them.

    A segment of torch's is blamed also if nobody at all has mapped it. Other segments are those of other programs,
    which make and unmake them all the time: neither the package nor its tests make one that has a name.
    """
    there = {segment for segment in segments if (SHM / segment).exists()}
    if not there:
        return there
    used = there & _mapped({os.getpid(), *descendants(os.getpid())})
    unused = {segment for segment in there - used if segment.startswith("torch_")}
    # All processes of the machine are looked at: seldom, and costly.
    return used | (unused and unused - _mapped(psutil.pids()))


def _mapped(pids: Iterable[int]) -> set[str]:
    """Return the names of segments that processes have mapped. Reads once what may be thousands of lines for each."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(
                map(os.fsdecode, re.findall(b"%s/(\\S+)" % os.fsencode(SHM), Path(f"/proc/{pid}/maps").read_bytes()))
            )
    return found
