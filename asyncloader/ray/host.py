"""Run an agent in a process of its own, beside the process of Ray's actor: none of the user's code runs in that.

    Ray's actor ── stdin: the order, descriptors ─> python -m asyncloader.ray.agent
                ── a file in memory: the dataset ──>
                ── a pipe, that hangs up when the actor is gone: SIGKILL by the kernel

The dataset is in that file once for all workers of the machine, who map it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from asyncloader.messages.mapped_pickle import write_pickle
from asyncloader.ray.launcher import NODE_ID, Order

_LOOK_EVERY_S = 1.0

COMMAND = (sys.executable, "-m", "asyncloader.ray.agent")


class AgentHost:
    """Runs one agent: Ray's actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._spec_fd = -1
        self._sizes: list[int] = []

    def where(self) -> str:
        """Return Ray's id of the node that this is on. Several nodes may be on one host."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def load(self, parts: Sequence[Any]) -> None:
        """Take what the agent's workers work with, in pieces. Not with `run`: Ray keeps what a call is given."""
        self._spec_fd, self._sizes = write_pickle(list(parts))

    def run(self, order: Order) -> str:
        """Run the agent to its end.

        Args:
            order: The launcher's order.

        Returns:
            How it ended.
        """
        liveness, writing = os.pipe()
        try:
            try:
                self.process = subprocess.Popen(
                    COMMAND,
                    stdin=subprocess.PIPE,
                    pass_fds=(self._spec_fd, liveness),
                    start_new_session=True,
                    env={**os.environ, NODE_ID: self.where()},
                )
            finally:
                os.close(liveness)
                os.close(self._spec_fd)
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:  # its end tells more
                pickle.dump((order, self._spec_fd, self._sizes, liveness, sys.path), stdin)
            return _await_end(self.process)
        finally:
            os.close(writing)


def _await_end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of an agent, or for that of this process's parent; then the agent ends as well.

    The parent is the raylet. When it has died Ray takes the node for dead, but leaves actors that are at work alone.
    """
    parent = os.getppid()
    ended = os.pidfd_open(process.pid)
    try:
        while not select.select([ended], [], [], _LOOK_EVERY_S)[0]:
            if os.getppid() != parent:
                process.kill()
    finally:
        os.close(ended)
    return f"its process ended with exit code {process.wait()}"
