"""Systems that are no Linux: what only Linux has is taken away before we are imported, and the self-test runs."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.support.nursery import Program

# What `os` and others have on Linux and not on macOS, as far as the package and multiprocessing's users may meet it.
WITHOUT_LINUX = """
import ctypes, fcntl, mmap, os, select, signal, socket, sys, warnings
import torch  # knows on what it really runs

for name in [name for name in sys.modules if name.partition(".")[0] == "asyncloader"]:
    del sys.modules[name]  # it is imported again, by this program

for module, names in {
    os: "pidfd_open memfd_create MFD_CLOEXEC P_PIDFD waitid O_PATH posix_fallocate sched_getaffinity eventfd pipe2",
    fcntl: "F_SETSIG F_GETSIG",
    mmap: "MADV_DONTDUMP",
    select: "epoll",
    signal: "pidfd_send_signal SIGRTMIN sigtimedwait",
    socket: "SO_PEERCRED MSG_NOSIGNAL",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("fallocate", "prctl", "syscall"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library
sys.platform = "darwin"


def without_proc(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(args[0])


sys.addaudithook(without_proc)
"""

MAIN = """
warnings.simplefilter("error")
from asyncloader import DataLoader
from asyncloader.cli.selftest import selftest

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert [batch.tolist() for batch in DataLoader(range(4), 2, num_workers=1)] == [[0, 1], [2, 3]]
print(*(str(each.message) for each in caught))
sys.exit(not selftest(as_json=True))
"""


def test_workers_are_threads_and_the_self_test_passes(run: Callable[..., Program]) -> None:
    """On threads, as a warning says, since the kernel does not say when a process ends: order, resume, `async for`."""
    program = run(WITHOUT_LINUX + MAIN)
    warned, told = program.out.split("\n", 1)
    assert "worker processes need Linux" in warned, program.explain("nothing was said")
    found = json.loads(told)
    assert found["ok"], program.explain("the self-test failed")
    assert found["checks"].keys() == {"order", "resume", "async for"}
    assert program.returncode == 0
