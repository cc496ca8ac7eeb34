"""The shared memory itself: addresses, memory behind them, descriptors, and what happens where they run out."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import resource
from collections.abc import Callable

import pytest

from asyncloader.transport import arena
from asyncloader.transport.arena import PAGE, Arena
from tests.support import inside
from tests.support.nursery import Program

pytestmark = pytest.mark.interpreter

SIZE = 1 << 28


def made(size: int = SIZE) -> Arena:
    memory = arena.create(size)
    assert memory is not None
    return memory


def write(memory: Arena, offset: int, content: bytes) -> None:
    ctypes.memmove(memory.base + offset, content, len(content))


def read(memory: Arena, offset: int, length: int) -> bytes:
    return ctypes.string_at(memory.base + offset, length)


def test_memory_is_reserved_written_and_given_back() -> None:
    """What was punched reads as zeros and can be reserved again."""
    memory = made()
    assert memory.reserve(4 * PAGE, 8 * PAGE)
    write(memory, 4 * PAGE, b"here")
    assert read(memory, 4 * PAGE, 4) == b"here"
    assert memory.punch(4 * PAGE, 8 * PAGE)
    assert memory.reserve(4 * PAGE, 8 * PAGE)
    assert read(memory, 4 * PAGE, 4) == bytes(4)
    memory.close()


def _write_from_a_worker(*arenas: Arena) -> None:
    for number, memory in enumerate(arenas):
        memory.reserve(0, PAGE)
        write(memory, 0, b"from a worker %d" % number)


def test_another_process_writes_to_it(start_method: str) -> None:
    """Arenas go to a worker whichever way that is started."""
    arenas = [made(), made()]
    context = multiprocessing.get_context(start_method)
    process = context.Process(target=_write_from_a_worker, args=arenas)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    for number, memory in enumerate(arenas):
        assert read(memory, 0, 15) == b"from a worker %d" % number
        memory.close()


def test_it_has_one_descriptor() -> None:
    """And it is not inherited by programs that the trainer starts."""
    before = set(os.listdir("/proc/self/fd"))
    memory = made()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    assert not os.get_inheritable(inside.descriptor(memory))
    memory.close()


def test_there_is_none_without_descriptors() -> None:
    """EMFILE: no arena, no error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    spare = []
    try:
        while True:
            try:
                spare.append(os.dup(0))
            except OSError:
                break
        assert arena.create(SIZE) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
    memory = arena.create(SIZE)
    assert memory is not None
    memory.close()


def test_it_is_smaller_where_addresses_are_limited(run: Callable[..., Program]) -> None:
    """`ulimit -v` makes it smaller, down to none."""
    program = f"""
        import resource
        from asyncloader.transport import arena
        used = int(open("/proc/self/statm").read().split()[0]) * {PAGE}
        resource.setrlimit(resource.RLIMIT_AS, (used + 7 * (1 << 27), resource.RLIM_INFINITY))
        memory = arena.create(1 << 36)
        assert memory.size == 1 << 29, memory.size
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        assert arena.create(1 << 36) is None
    """
    done = run(program)
    assert done.returncode == 0, done.explain("")


def test_without_memfds_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox that forbids them: batches go through the channels."""

    def forbidden(*args: object) -> int:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert arena.create(SIZE) is None


def test_page_is_that_of_the_machine() -> None:
    """Regions are whole pages."""
    assert mmap.PAGESIZE == PAGE
