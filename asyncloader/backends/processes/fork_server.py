"""multiprocessing's fork server, which starts empty: it is given torch, and what a worker imports.

Its workers then start in the time of a fork. Other modules that it is to import, and a server that runs already, are
the user's affair.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any, cast

from asyncloader.errors import WorkerStartError
from asyncloader.signals import masked

PRELOAD = ("torch", "torch.utils.data", "asyncloader.preload")
"""What the fork server imports for us. No thread is left of it when a worker is forked, and no device is touched."""

_server: Any = cast(Any, forkserver)._forkserver
_ENDS_WITHIN_S = 1.0


def start() -> None:
    """Start the fork server, if there is none; what it imports takes it seconds, which this does not wait for.

    The list of modules is read at its start: a server that is running is as it is.
    """
    named = _server._preload_modules
    forkserver.set_forkserver_preload([*named, *(name for name in PRELOAD if name not in named)])
    with masked(signal.SIG_UNBLOCK, {signal.SIGCHLD}):  # or it would never learn of the end of a worker
        forkserver.ensure_running()


def ended() -> WorkerStartError:
    """Return the error for a fork server that has ended before it had made a worker. The next loader starts another."""
    with contextlib.suppress(OSError, TypeError):  # multiprocessing starts another when this one is gone
        fd = os.pidfd_open(_server._forkserver_pid)
        try:
            wait([fd], _ENDS_WITHIN_S)
        finally:
            os.close(fd)
    return WorkerStartError(
        "The fork server ended before it had made a worker process; if it told why, that is on stderr. When it starts, "
        f"it imports {', '.join(_server._preload_modules)}: can those be imported? __main__ has to have its "
        '`if __name__ == "__main__"` guard. The next loader starts a new one.'
    )
