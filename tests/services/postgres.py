"""PostgreSQL in a folder of its own, at a port of the loopback interface."""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.services.process import free_port, program, stop, wait_until_it_listens

PLACES = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "40",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # nothing in /dev/shm, which tests look at
}


class PostgreSQL:
    """Starts and stops a server; it can be killed and started again on the same data.

    The server refuses to run as root; then it runs as the user `postgres`, whom the Debian package makes. So its folder
    is not in pytest's, which each run of pytest that begins closes to all others.
    """

    def __init__(self) -> None:
        self._postgres = program("postgres", *PLACES)
        self._initdb = program("initdb", *PLACES)
        self._data = Path()
        self._user = "postgres" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[str] | None = None
        self.port = free_port()
        self.dsn = f"postgresql://tester@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        self._data = Path(tempfile.mkdtemp(prefix="asyncloader-postgres-"))
        if self._user:
            shutil.chown(self._data, self._user)
        made = [self._initdb, "-D", self._data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(made, user=self._user, env=self._environment(), cwd="/", check=True, stdout=subprocess.DEVNULL)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGQUIT)
        shutil.rmtree(self._data)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = [f"-c{name}={value}" for name, value in SETTINGS.items()]
        with open(self._data / "log", "a") as log:
            self._process = subprocess.Popen(
                [self._postgres, "-D", self._data, "-p", str(self.port), *settings],
                user=self._user, env=self._environment(), cwd="/", text=True, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until_it_listens(self._process, self.port)
        while True:
            try:
                self.execute("SELECT 1")
                return
            except Exception as error:
                if "starting up" not in str(error) and "recovery" not in str(error):
                    raise

    def kill(self, number: signal.Signals = signal.SIGQUIT) -> None:
        """End it at once, without a word to its clients; SIGQUIT also ends the processes of its connections."""
        if self._process is not None:
            stop(self._process, number)
            self._process = None

    def execute(self, query: str, *values: Any) -> list[Any]:
        """Run a query on a connection of its own."""
        import asyncpg

        async def run() -> list[Any]:
            connection = await asyncpg.connect(self.dsn)
            try:
                return list(await connection.fetch(query, *values))
            finally:
                await connection.close()

        return asyncio.run(run())

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"}
