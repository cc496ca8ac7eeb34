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
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transport import arena
from asyncloader.transport.arena import PAGE, Arena, Extents, MemfdArena, NamedArena
from asyncloader.transport.loans import ArenaHandle
from tests.nursery import Program

pytestmark = pytest.mark.interpreter

SIZE = 1 << 28
KINDS = [MemfdArena, NamedArena]


def write(memory: Arena, offset: int, content: bytes) -> None:
    ctypes.memmove(memory.base + offset, content, len(content))


def read(memory: Arena, offset: int, length: int) -> bytes:
    return ctypes.string_at(memory.base + offset, length)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[MemfdArena] | type[NamedArena]:
    return request.param


def test_memory_is_reserved_written_and_given_back(kind: type[MemfdArena]) -> None:
    """What was punched reads as zeros and can be reserved again."""
    memory = kind.create(SIZE)
    assert memory.reserve(4 * PAGE, 8 * PAGE)
    write(memory, 4 * PAGE, b"here")
    assert read(memory, 4 * PAGE, 4) == b"here"
    assert memory.punch(4 * PAGE, 8 * PAGE)
    assert memory.reserve(4 * PAGE, 8 * PAGE)
    assert read(memory, 4 * PAGE, 4) == bytes(4)
    memory.close()


def _write_from_a_worker(*handles: ArenaHandle) -> None:
    for number, handle in enumerate(handles):
        slabs = handle.attach()
        assert slabs is not None
        slabs._arena.reserve(0, PAGE)
        write(slabs._arena, 0, b"from a worker %d" % number)


def test_another_process_writes_to_it(start_method: str) -> None:
    """Handles, of either kind, go to a worker whichever way that is started."""
    arenas = [kind.create(SIZE) for kind in KINDS]
    context = multiprocessing.get_context(start_method)
    process = context.Process(target=_write_from_a_worker, args=[ArenaHandle(memory) for memory in arenas])
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
    memory = MemfdArena.create(SIZE)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    assert not os.get_inheritable(memory._fd)
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


def test_where_a_sandbox_forbids_memfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named memory takes their place."""

    def forbidden(*args: object) -> int:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    memory = arena.create(SIZE)
    assert isinstance(memory, NamedArena)
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


def test_reserving_more_than_there_is_fails_and_takes_nothing() -> None:
    """It is an answer, not an error or a signal: beyond the end of /dev/shm there is nothing."""
    memory = NamedArena.create(SIZE)
    blocks = os.statvfs("/dev/shm")
    free = blocks.f_bavail * blocks.f_frsize
    memory.close()
    if free > 1 << 36:
        pytest.skip("/dev/shm has no end here")
    memory = NamedArena.create(2 * free)
    assert not memory.reserve(0, 2 * free)
    assert os.fstat(memory._memory._fd).st_blocks == 0  # type: ignore[attr-defined]
    memory.close()


def test_the_name_goes_with_its_owner(run: Callable[..., Program]) -> None:
    """At the exit of the interpreter, and not when a child of it ends."""
    program = """
        import os
        from asyncloader.transport.arena import NamedArena
        memory = NamedArena.create(1 << 28)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            assert os.path.exists("/dev/shm/" + memory._memory.name)
        print(memory._memory.name)
    """
    done = run(program)
    assert (done.returncode, done.err) == (0, "")
    assert not os.path.exists(f"/dev/shm/{done.out.split()[-1]}")


def test_page_is_that_of_the_machine() -> None:
    """Regions are whole pages."""
    assert mmap.PAGESIZE == PAGE


@given(st.data())
def test_extents(data: st.DataObject) -> None:
    """Parts taken never overlap; when all are given back there is one extent again."""
    extents = Extents(100)
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        if taken and data.draw(st.booleans()):
            extents.give(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
            continue
        length = data.draw(st.integers(1, 30))
        offset = extents.take(length)
        free = 100 - sum(size for _, size in taken)
        if offset is None:
            assert length > 1 or free == 0
        else:
            assert 0 <= offset <= 100 - length
            assert all(offset + length <= first or first + size <= offset for first, size in taken)
            taken.append((offset, length))
    for part in taken:
        extents.give(*part)
    assert extents.take(100) == 0
