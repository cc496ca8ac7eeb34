"""nginx, serving a folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.services.process import free_port, program, stop, wait_until_it_listens

CONFIGURATION = """
daemon off;
master_process off;
pid {room}/nginx.pid;
error_log {room}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {room}/body;
    proxy_temp_path {room}/proxy;
    fastcgi_temp_path {room}/fastcgi;
    uwsgi_temp_path {room}/uwsgi;
    scgi_temp_path {room}/scgi;
    keepalive_requests 100;  # then it closes the connection, as servers out there do
    server {{
        listen 127.0.0.1:{port};
        root {folder};
        location /private/ {{ deny all; }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, room: Path) -> Iterator[str]:
    """Serve a folder; `room` is for what nginx writes itself. Yields its url."""
    binary = program("nginx")
    port = free_port()
    configuration = room / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(room=room, port=port, folder=folder))
    command = [binary, "-p", str(room), "-e", str(room / "error.log"), "-c", str(configuration)]
    process = subprocess.Popen(command, text=True)
    try:
        wait_until_it_listens(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)
