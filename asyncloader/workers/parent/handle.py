"""A worker process as code written for torch's iterator expects to find it in ``_workers``."""

from __future__ import annotations

from asyncloader.workers.parent.process import WorkerProcess


class WorkerHandle:
    """A worker as :class:`multiprocessing.Process` would show it."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.name = f"asyncloader worker {process.worker_id}"
        self.daemon = True

    def __repr__(self) -> str:
        return repr(self._process)

    @property
    def exitcode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process is gone, ``timeout`` seconds at most."""
        self._process.wait_dead(timeout)

    def terminate(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill_soon()

    kill = terminate
