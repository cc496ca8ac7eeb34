"""A PostgreSQL server for train_from_postgres.py, in a temporary folder, gone when it is left."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def local_postgres() -> Iterator[str]:
    """Start a server on the loopback interface; as root, under the user `postgres`, for it refuses to run as root.

    Yields its dsn. Needs Debian's package `postgresql`, or what has `initdb` and `postgres` on the path.
    """
    places = os.pathsep.join([os.environ.get("PATH", ""), *glob.glob("/usr/lib/postgresql/*/bin")])
    initdb, postgres = (shutil.which(name, path=places) for name in ("initdb", "postgres"))
    if initdb is None or postgres is None:
        sys.exit("PostgreSQL is not installed: apt-get install postgresql")
    user = "postgres" if os.geteuid() == 0 else None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="asyncloader-postgres-") as room:
        data = Path(room) / "data"
        data.mkdir()
        if user is not None:
            Path(room).chmod(0o711)
            shutil.chown(data, user)
        made = [initdb, "-D", str(data), "-U", "trainer", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(made, user=user, cwd="/", check=True, stdout=subprocess.DEVNULL)
        settings = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        server = subprocess.Popen([postgres, "-D", str(data), *settings], user=user, cwd="/", stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield f"postgresql://trainer@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # it ends its connections, then itself
            server.wait()


def wait_for(port: int, patience_s: float = 30) -> None:
    """Return when something listens at the port."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
