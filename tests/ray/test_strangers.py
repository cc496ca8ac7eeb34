"""Strangers at the trainer's door, with TLS and without: whatever they do, an agent that comes after them gets in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncloader.ray import door as module
from asyncloader.ray import link as link_module
from asyncloader.ray.door import _MOST_STRANGERS, Door
from asyncloader.ray.handshake import Stranger, agent_side
from asyncloader.ray.launcher import MakeContext
from asyncloader.ray.wire import FrameReader
from asyncloader.worker.guarded_loop import GuardedLoop
from tests import inside
from tests.patience import PATIENCE_S, until
from tests.ray.callers import Heard, dial, gone

JUNK = b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n" * 10


class Gate:
    """A trainer's door that is open, and those who call at it."""

    def __init__(self, make_context: MakeContext | None) -> None:
        self.heard = Heard()
        self.door = self.heard.door = Door(
            GuardedLoop(asyncio.get_running_loop()), self.heard.is_expected, self.heard.on_open
        )
        self.heard.context = None if make_context is None else make_context(ssl.Purpose.SERVER_AUTH)
        self.door.open("127.0.0.1", 0, make_context)
        self.callers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @property
    def turned_away(self) -> int:
        """How many were."""
        return self.door.refused.total()

    async def call(self, count: int, data: bytes = b"", **tls: Any) -> None:
        """Have so many strangers connect, without TLS unless that is said, and say something."""
        for _ in range(count):
            self.callers.append(await asyncio.open_connection(*self.door.address, **tls))
            self.callers[-1][1].write(data)

    async def leave(self) -> None:
        """Have all of them go."""
        for _, writer in self.callers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.callers.clear()

    async def admit(self) -> None:
        """Have an agent come in."""
        before = len(self.heard.open)
        agent = await dial(self.heard)
        assert agent.open, agent.lost
        await until(lambda: len(self.heard.open) > before)
        agent.open[0].drop("enough")


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Wait until the trainer has hung up."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()


def are_all_away() -> bool:
    """Whether no stranger is left on this loop."""
    return not any(getattr(task.get_coro(), "__name__", "") == "_prove" for task in asyncio.all_tasks())


@pytest.fixture
async def told() -> list[dict[str, Any]]:
    """What the loop has to complain of."""
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
    return contexts


@pytest.fixture(params=["plain", "tls"])
async def gate(request: pytest.FixtureRequest, told: list[Any], make_context: MakeContext) -> AsyncIterator[Gate]:
    """A door, with TLS or without; nothing is left behind it, and the loop has nothing to complain of."""
    made = Gate(make_context if request.param == "tls" else None)
    yield made
    await made.leave()
    made.door.close()
    for link in made.heard.open:
        link.drop("the test is over")
    await until(are_all_away)
    await gone(*made.heard.open)
    assert not inside.strangers(made.door)
    assert told == []


tls_only = pytest.mark.parametrize("gate", ["tls"], indirect=True)


@pytest.mark.parametrize("data", [JUNK, b"", b"\x16\x03\x01"], ids=["junk", "nothing", "half a hello"])
async def test_who_fails_at_tls_keeps_no_agent_out(
    gate: Gate, data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many there were: each is counted and forgotten, and the first is told of with its address."""
    strangers: weakref.WeakSet[Stranger] = weakref.WeakSet()
    monkeypatch.setattr(module, "Stranger", lambda *args: strangers.add(made := Stranger(*args)) or made)
    count, senders = _MOST_STRANGERS + 2, []
    for _ in range(count):
        await gate.call(1, data)
        senders.append("{}:{}".format(*gate.callers[0][1].get_extra_info("sockname")))
        await gate.leave()
    await until(lambda: gate.turned_away == count)
    assert not inside.strangers(gate.door)
    assert f"A connection from {senders[0]} was turned away" in caplog.text
    await until(are_all_away)
    gc.collect()
    assert not strangers
    await gate.admit()
    assert gate.turned_away == count


async def test_who_breaks_the_connection_is_in_no_future(told: list[dict[str, Any]]) -> None:
    """The collector may come upon a future before it comes upon its owner; the loop complained of its error then."""
    reader = asyncio.StreamReader()
    stranger = Stranger(reader)
    stranger.connection_made(asyncio.Transport())
    stranger.connection_lost(ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    futures = [value for value in vars(stranger).values() if isinstance(value, asyncio.Future)]
    assert futures
    stranger.__dict__.clear()
    del stranger, futures
    gc.collect()
    assert told == []


@tls_only
async def test_who_speaks_no_tls_is_told_apart(gate: Gate) -> None:
    """From one who hangs up."""
    await gate.call(1, JUNK)
    await hung_up(gate.callers[0][0])
    await until(lambda: gate.turned_away)
    ((why, count),) = gate.door.refused.items()
    assert count == 1
    assert why.startswith("its TLS failed (")


async def test_who_says_nothing_is_dropped_in_time(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TLS was to be made as well; and who has begun with that."""
    monkeypatch.setattr(module, "PROOF_S", 0.05)
    await gate.call(20)
    await gate.call(20, b"\x16")
    for reader, _ in gate.callers:
        await hung_up(reader)
    await until(lambda: gate.turned_away == 40)
    assert gate.door.refused == {"too slow": 40}
    assert not inside.strangers(gate.door)
    monkeypatch.setattr(module, "PROOF_S", 1000.0)
    await gate.admit()


@tls_only
async def test_who_makes_tls_and_then_says_nothing_is_dropped_in_time(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a stranger as long as it has not proven itself."""
    monkeypatch.setattr(module, "PROOF_S", 1000.0)
    await gate.call(1, ssl=gate.heard.context, server_hostname="localhost")
    (stranger,) = inside.strangers(gate.door)
    gate.door._wait(stranger, 0)
    await hung_up(gate.callers[0][0])
    await until(lambda: gate.turned_away)
    assert gate.door.refused == {"too slow": 1}


async def test_the_newest_may_be_the_agent(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many that say nothing the oldest go; of those that stay no memory for frames is held."""
    made: list[FrameReader] = []
    monkeypatch.setattr(module, "PROOF_S", 1000.0)
    monkeypatch.setattr(link_module, "FrameReader", lambda allocate: made.append(FrameReader(allocate)) or made[-1])
    await gate.call(2 * _MOST_STRANGERS)
    await until(lambda: gate.turned_away == _MOST_STRANGERS)
    assert len(inside.strangers(gate.door)) == _MOST_STRANGERS
    assert made == []
    for reader, _ in gate.callers[:_MOST_STRANGERS]:
        await hung_up(reader)
    await gate.admit()
    assert gate.door.refused == {"too many at once": _MOST_STRANGERS + 1}
    assert not any(reader.at_eof() for reader, _ in gate.callers[_MOST_STRANGERS + 1 :])
    assert len(made) == 2  # the agent's, and that of its link here


async def test_who_is_turned_away_before_it_was_made(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is accepted, before the loop has told its link of it."""
    monkeypatch.setattr(module, "_MOST_STRANGERS", 0)
    await gate.call(3)
    for reader, _ in gate.callers:
        await hung_up(reader)
    await until(lambda: gate.turned_away == 3)
    assert gate.door.refused == {"too many at once": 3}


@pytest.mark.parametrize("turns", range(5))
async def test_a_door_that_closes_on_strangers(gate: Gate, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many turns after it has accepted one: that is hung up on, and not counted."""
    loop, wait = asyncio.get_running_loop(), gate.door._wait

    def close_in(turns: int) -> None:
        if turns:
            loop.call_soon(close_in, turns - 1)
        else:
            gate.door.close()

    def wait_and_close(stranger: Any, left: int) -> None:
        wait(stranger, left)
        close_in(turns)

    monkeypatch.setattr(gate.door, "_wait", wait_and_close)
    await gate.call(1)
    await hung_up(gate.callers[0][0])
    await until(are_all_away)
    assert not gate.door.refused


async def test_a_door_without_a_descriptor_left(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again, and who has waited gets in."""
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files"), ConnectionAbortedError()])

    def fail_at_first(sock: socket.socket) -> Any:
        for error in failures:
            raise error
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    monkeypatch.setattr(module, "_NO_ROOM_S", 0.01)
    await gate.admit()
    assert next(failures, None) is None
    assert not gate.door.refused


async def test_a_door_that_closes_while_it_has_no_descriptor_left(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look again."""
    tries: list[int] = []

    def fail(sock: socket.socket) -> Any:
        if not tries:  # before it is time to look again
            asyncio.get_running_loop().call_soon(gate.door.close)
        tries.append(sock.fileno())
        raise OSError(24, "Too many open files")

    looks: list[int] = []

    def look(door: Door, sock: socket.socket) -> None:
        listen(door, sock)
        looks.append(sock.fileno())

    listen = Door._listen
    monkeypatch.setattr(Door, "_listen", look)
    monkeypatch.setattr(socket.socket, "accept", fail)
    monkeypatch.setattr(module, "_NO_ROOM_S", 0.1)
    with socket.create_connection(gate.door.address):
        await until(lambda: looks)
    assert looks == [-1]
    assert len(tries) == 1


async def test_a_context_that_cannot_be_made(told: list[Any]) -> None:
    """Nothing is listened at then, and to close it is good."""

    def make(purpose: ssl.Purpose) -> ssl.SSLContext:
        raise FileNotFoundError("cert.pem")

    heard = Heard()
    door = Door(GuardedLoop(asyncio.get_running_loop()), heard.is_expected, heard.on_open)
    with pytest.raises(FileNotFoundError):
        door.open("127.0.0.1", 0, make)
    address = door.address
    door.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    assert told == []


def receive(sock: socket.socket, count: int) -> bytes:
    """Wait for so many bytes."""
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def prove(address: tuple[str, int], secret: bytes, meanwhile: Callable[[], None], proven: threading.Event) -> None:
    """Be an agent in a thread, which proves itself while something else is going on, and is met."""
    with socket.create_connection(address) as sock:
        steps = agent_side(secret, sock.sendall, 1)
        hello = receive(sock, next(steps))
        meanwhile()
        wanted = steps.send(hello)
        proven.set()
        with pytest.raises(StopIteration):
            steps.send(receive(sock, wanted).ljust(wanted))


@pytest.mark.parametrize("gate", ["plain"], indirect=True)
async def test_a_loop_that_is_held_up_drops_nobody_who_was_in_time(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come meanwhile is read first, also where timers come before it, as in libuv after other input."""
    monkeypatch.setattr(module, "PROOF_S", 1.0)
    loop, held_up, proven = asyncio.get_running_loop(), threading.Event(), threading.Event()
    bell, ringing = socket.socketpair()

    def hold_up() -> None:
        loop.remove_reader(bell)
        held_up.set()
        assert proven.wait(PATIENCE_S)
        time.sleep(1.1)  # which is what is tested: longer than a proof may take

    def ring() -> None:
        ringing.send(b"x")
        assert held_up.wait(PATIENCE_S)

    with bell, ringing:
        loop.add_reader(bell, hold_up)
        agent = functools.partial(prove, gate.door.address, gate.door.secret, ring, proven)
        await asyncio.to_thread(agent)
    await until(lambda: gate.heard.open)
    assert not gate.door.refused
