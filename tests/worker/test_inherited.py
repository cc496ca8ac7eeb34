"""Sockets that a forked worker has from the trainer."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader

PATIENCE_S = 20.0


class Numbers(Dataset[int]):
    """With a connection of its own."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection = connection

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.connection is not None:
            self.connection.send(bytes([index]))
        return index


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that listens."""
    with tempfile.TemporaryDirectory() as folder:
        is_tcp = request.param == "tcp"
        listening = socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX)
        listening.bind(("127.0.0.1", 0) if is_tcp else os.path.join(folder, "server"))
        listening.listen()
        listening.settimeout(PATIENCE_S)
        with listening:
            yield listening


def client_of(server: socket.socket) -> socket.socket:
    """Return a connection to the server, not accepted yet."""
    client = socket.socket(server.family)
    client.settimeout(PATIENCE_S)
    client.connect(server.getsockname())
    return client


def test_a_client_sees_at_once_that_the_trainer_has_closed_its_connection(server: socket.socket) -> None:
    """Though workers that were forked meanwhile live on; and a server that was closed refuses the next client."""
    with client_of(server) as client:
        accepted, _ = server.accept()
        loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        accepted.close()
        assert client.recv(1) == b""
        address = server.getsockname()
        server.close()
        with socket.socket(server.family) as late, pytest.raises(ConnectionRefusedError):
            late.connect(address)
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        loader.close()


def test_a_connection_that_the_dataset_has_made_is_left_to_it(server: socket.socket) -> None:
    """The other end is a server elsewhere."""
    elsewhere = socket.socketpair()
    with elsewhere[0], elsewhere[1], client_of(server) as client:
        accepted, _ = server.accept()
        address = server.getsockname()
        server.close()
        with accepted:
            for connection, other in ((client, accepted), (elsewhere[0], elsewhere[1])):
                loader = DataLoader(Numbers(connection), num_workers=1, multiprocessing_context="fork")
                assert [int(batch) for batch in loader] == [0, 1, 2, 3]
                assert other.recv(4) == bytes(range(4))
        assert address


async def test_a_server_under_load_beside_a_loader() -> None:
    """Each request is answered and its connection seen to end while workers come, live and go."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"yes\n")
        await writer.drain()
        writer.close()

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"well?\n")
        answered = await reader.read()  # to the end of the connection
        writer.close()
        await writer.wait_closed()
        return answered

    async def keep_asking(port: int) -> set[bytes]:
        seen = set()
        while not over.is_set():
            seen.add(await ask(port))
        return seen

    over = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asking = [asyncio.create_task(keep_asking(port)) for _ in range(4)]
    loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    for _ in range(3):
        iterator = aiter(loader)
        assert [int(batch) async for batch in iterator] == [0, 1, 2, 3]
        await asyncio.wait_for(ask(port), PATIENCE_S)
        await iterator.aclose()
    over.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*asking) == [{b"yes\n"}] * 4
    server.close()
    await server.wait_closed()
