"""Sockets that a forked worker has from the trainer: those of servers are none of its business.

A connection ends for its other end when the last process that has it closes it. So a client of a server in the trainer
would wait for as long as the workers live, and a server that was closed would seem to listen. Which sockets are a
dataset's cannot be known; but one that listens is not, nor is a connection that came in through one that listens: it
has the same address. Connections that the trainer has made itself are left alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Hashable
from typing import TypeAlias

_Stream: TypeAlias = tuple[int, Hashable, bool]
"""A socket: its descriptor, its address at this end (None if it has none), and whether it listens."""


def leave_servers() -> None:
    """Let go of sockets that listen, and of connections that came in through them.

    Their numbers stay taken, by ``/dev/null``: whoever has them in this process may still close them, and must not
    close what has got the same number since.
    """
    streams = _inherited()
    servers = {address for _, address, listens in streams if listens} - {None}
    left = [fd for fd, address, listens in streams if listens or address in servers]
    if not left:
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for fd in left:
            os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)


def _inherited() -> list[_Stream]:
    streams = []
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself; one that is no socket after all
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and (stream := _look_at(fd)) is not None:
                streams.append(stream)
    return streams


def _look_at(fd: int) -> _Stream | None:
    sock = socket.socket(fileno=fd)
    try:
        if sock.type != socket.SOCK_STREAM:
            return None
        address: Hashable = None
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            address = sock.getsockname()[1]  # the port: a server on all interfaces is found by any of their addresses
        elif sock.family == socket.AF_UNIX:
            address = sock.getsockname() or None
        return fd, address, bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        sock.detach()
