"""Server processes of tests: free ports, starting, waiting until they answer, stopping."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0


def program(name: str, *places: str) -> str:
    """Find a server's program; skip the test, saying why, where it is not installed.

    With ASYNCLOADER_SERVICES=required, as `make test-services` has it, the test fails instead.
    """
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", *places]))
    if found is not None:
        return found
    reason = f"{name} is not installed; `make test-services` installs it"
    if os.environ.get("ASYNCLOADER_SERVICES") == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_it_listens(process: subprocess.Popen[str], port: int) -> None:
    """Return when something listens at the port; fail when the process has ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"{process.args!r} does not listen at port {port} (exit code {process.poll()})")


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """End a server and wait for it; kill it if it does not go."""
    process.send_signal(number)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
