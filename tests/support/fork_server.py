"""One fork server of multiprocessing for all processes that run tests.

    pytest ── start() ──> fork server: imports torch, while tests are collected
       └──fork──> a copy that runs tests: share(), then asks that server for workers
       └──fork──> a copy ...

Each copy would start a server of its own otherwise, and each of them would import torch: 2.5 s of CPU time.
"""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

# What workers of tests import, so that they start as fast as forked ones: what is tested is not the import of torch.
# The last one freezes the garbage collector.
PRELOAD = ["__main__", "numpy", "torch", "torch.utils.data", "pytest", "hypothesis", "asyncloader.preload"]

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start() -> None:
    """Start the server, unless there is one."""
    forkserver.ensure_running()


def share() -> None:
    """Have this process, a fork of the one that has started the server, use that server as its own.

    multiprocessing asks whether the server still runs by waiting for it, which only the parent of a process may do.
    """
    shared = _server._forkserver_pid
    ensure_running = _server.ensure_running

    def ensure() -> None:
        if shared is None or _server._forkserver_pid != shared:
            ensure_running()

    _server.ensure_running = forkserver.ensure_running = ensure
