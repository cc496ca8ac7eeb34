"""The end of the program: whatever is alive at that moment, it ends soon, says nothing, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.programs import FACES, HUNG, NUMBERS, assert_within, end_alone, seconds_after
from tests.support.nursery import Program

Run = Callable[..., Program]


@pytest.mark.destructors
@pytest.mark.covering(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_whole_epoch_leaves_nothing_and_says_nothing(run: Run, face: str, num_workers: int) -> None:
    """An ordinary script, from start to end."""
    program = run(
        NUMBERS + FACES[face] + f"print(train(DataLoader(Numbers(), batch_size=4, num_workers={num_workers})))"
    )
    assert (program.returncode, program.out, program.err) == (0, f"{list(range(40))}\n", "")


@pytest.mark.interpreter
def test_the_end_comes_while_the_thread_of_an_executor_ends(run: Run) -> None:
    """Python's exit hook writes to the pipe of each executor's thread that is left; that thread may be closing it."""
    main = """
import concurrent.futures.process as processes
from asyncloader.engine import exits
exits.EXIT_GRACE_S = -0.9  # nothing is waited for
close = processes._ThreadWakeup.close
def wake(pipe):
    if pipe._closed:
        return
    if threading.current_thread() is threading.main_thread():
        time.sleep(2)  # between asking whether it is open and writing
    pipe._writer.send_bytes(b"")
processes._ThreadWakeup.wakeup = wake
processes._ThreadWakeup.close = lambda pipe: (time.sleep(1), close(pipe))
print(train(DataLoader(Numbers(), batch_size=4, num_workers=1)))
"""
    program = run(NUMBERS + FACES["for"] + main)
    assert (program.returncode, program.out, program.err) == (0, f"{list(range(40))}\n", "")


@pytest.mark.interpreter
def test_workers_killed_by_the_end_are_no_deaths(run: Run) -> None:
    """The loop, which was kept from ending them, turns again and sees that they are gone: it has nobody to tell."""
    main = """
from asyncloader.backends.processes.process import kill_all
iterator = iter(DataLoader(Slow(), batch_size=4, num_workers=2))
next(iterator)
kill_all()
time.sleep(0.5)  # the loop turns
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_whole_epoch_with_other_start_methods(run: Run, face: str, method: str) -> None:
    """An ordinary script whose workers are started anew."""
    main = """
if __name__ == "__main__":
    print(train(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])))
"""
    program = run(NUMBERS + FACES[face] + main, method)
    assert (program.returncode, program.out, program.err) == (0, f"{list(range(40))}\n", "")


ALIVE = (
    "begun = iter(loader); next(begun)",
    "awaited = loader.__aiter__(); asyncio.run(awaited.__anext__())",
    "not_begun = loader.__aiter__()",
    "several = [iter(loader) for _ in range(3)]; [next(iterator) for iterator in several]",
    "cycle = [iter(loader)]; cycle.append(cycle)",
    "sys.modules['kept'] = iter(loader)",
    "loader._iterator = iter(loader)",
    "closed = iter(loader); closed.close()",
)


def together_or_each(cases: tuple[Any, ...]) -> list[Any]:
    """Return all cases as one, for a program that has them all, and each as a slow one: programs' ends are costly."""
    each = [pytest.param((case,), id=str(number), marks=pytest.mark.slow) for number, case in enumerate(cases)]
    return [pytest.param(cases, id="together"), *each]


@pytest.mark.destructors
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("alive", together_or_each(ALIVE))
def test_iterators_alive_at_the_end(run: Run, alive: tuple[str, ...], num_workers: int) -> None:
    """Whatever still refers to an iterator when the interpreter ends."""
    setup = f"loader = DataLoader(Slow(), batch_size=4, num_workers={num_workers})\n"

    def attempt() -> float:
        program = run(NUMBERS + setup + "\n".join([*alive, "say('bye')"]))
        assert (program.returncode, program.err) == (0, "")
        return seconds_after(program, "bye")

    assert_within(3.0, attempt, lambda: end_alone(run))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "face", ["next(iter_)", pytest.param("asyncio.run(iter_.__anext__())", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("sleep", marks=pytest.mark.slow),
        "interpreter's lock held",
        pytest.param("a loop that swallows everything", marks=pytest.mark.slow),
        "a thread that does not end",
    ],
)
def test_hung_workers_do_not_hold_up_the_end(run: Run, way: str, face: str) -> None:
    """The program ends within 3 s, whatever its workers do."""
    main = f"""
loader = DataLoader(Hung(sys.argv[1]), batch_size=4, num_workers=2)
iter_ = iter(loader)
for _ in range(2):
    {face}
loader.dataset.wait_until_it_hangs()
say("bye")
"""

    def attempt() -> float:
        program = run(NUMBERS + HUNG + main, way)
        assert "hung\n" in program.out
        assert (program.returncode, program.err) == (0, "")
        return seconds_after(program, "bye")

    assert_within(3.0, attempt, lambda: end_alone(run))


@pytest.mark.interpreter
def test_a_loop_that_is_late_at_the_end_still_kills(run: Run) -> None:
    """On a machine that is very busy the grace is over before the loop thread had its turn."""
    main = """
from asyncloader.engine.portal import get_portal
iter_ = iter(DataLoader(Hung("sleep"), batch_size=4, num_workers=2))
next(iter_)
get_portal().post(time.sleep, 4)
"""
    program = run(NUMBERS + HUNG + main)
    assert (program.returncode, program.err) == (0, "")


@pytest.mark.interpreter
def test_a_daemon_of_a_worker_that_died_does_not_hold_up_the_end(run: Run) -> None:
    """It has copies of all that the worker had, and ends when the program has."""
    main = """
trainer, flag = os.getpid(), torch.zeros(1).share_memory_()
class Leaves(Numbers):
    def __getitem__(self, index):
        if index == 8 and not flag:
            flag.fill_(1)
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.setsid()  # no longer of the group that is killed with the worker
                os.write(writer, b".")
                while os.path.exists(f"/proc/{trainer}"):
                    time.sleep(0.02)
                os._exit(0)
            os.read(reader, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
print(len(list(DataLoader(Leaves(), batch_size=4, num_workers=2))))
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out) == (0, "10\n"), program.explain("failed")


@pytest.mark.parametrize(
    "ending", ["break", pytest.param("close", marks=pytest.mark.slow), pytest.param("del", marks=pytest.mark.slow)]
)
def test_hung_workers_are_killed_after_the_grace(run: Run, ending: str) -> None:
    """close() waits for them; del and break do not wait; and the workers are gone while the program goes on."""
    main = """
import psutil
loader = DataLoader(Hung("sleep"), batch_size=4, num_workers=2)
for i, batch in enumerate(iterator := iter(loader)):
    if i == 1:
        break
loader.dataset.wait_until_it_hangs()
if sys.argv[1] == "close":
    iterator.close()
del iterator
left = len(psutil.Process().children())
while psutil.Process().children():
    time.sleep(0.01)
print(left)
"""
    program = run(NUMBERS + HUNG + main, ending)
    assert (program.returncode, program.err) == (0, "")
    assert program.out.splitlines()[-1] == ("0" if ending == "close" else "2")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_ends_the_program_as_usual(run: Run, num_workers: int) -> None:
    """Uncaught in the body of a loop: one traceback, status 1."""
    main = f"""
for batch in DataLoader(Slow(), num_workers={num_workers}):
    raise ValueError("the user's own")
"""
    program = run(NUMBERS + main)
    assert program.returncode == 1
    assert program.err.count("Traceback") == 1
    assert program.err.endswith("ValueError: the user's own\n")


@pytest.mark.parametrize("statement", ["sys.exit(5)", "os._exit(5)", "raise SystemExit(5)"])
def test_leaving_in_the_body_of_a_loop(run: Run, statement: str) -> None:
    """The status is the user's, and workers are gone, without any word."""
    main = f"""
for batch in DataLoader(Slow(), num_workers=2):
    {statement}
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.err) == (5, "")


starts_threads_late = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no thread for anybody once main has returned"
)


AFTER_MAIN = """
def wait_for_the_end_of_main():
    while not threading._SHUTTING_DOWN:  # set before the first exit hook runs
        time.sleep(0.001)
"""


@pytest.mark.covering(2)
@starts_threads_late
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("has_begun", [True, False], ids=["between epochs", "in an epoch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_thread_trains_on_after_main_has_returned(run: Run, num_workers: int, face: str, has_begun: bool) -> None:
    """A non-daemon thread gets all its data, in this epoch and in the next ones."""
    main = f"""
begun = threading.Event()
def train_on():
    if {has_begun}:
        print(train(DataLoader(Numbers(), num_workers={num_workers})) == list(range(40)), flush=True)
    else:
        iterator = iter(DataLoader(Numbers(), num_workers={num_workers}))
    begun.set()
    wait_for_the_end_of_main()
    if not {has_begun}:
        print(torch.cat(list(iterator)).tolist() == list(range(40)), flush=True)
    for epoch in range(2):
        print(train(DataLoader(Slow(), batch_size=4, num_workers={num_workers})) == list(range(40)), flush=True)
threading.Thread(target=train_on).start()
begun.wait()
"""
    program = run(NUMBERS + AFTER_MAIN + FACES[face] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n" * 3, "")


LATE = """
def train_late():
    threading.main_thread().join()  # nothing of ours was in use when the interpreter's exit hooks ran
    print(train(loader) == list(range(40)), flush=True)
loader = DataLoader(Numbers(), batch_size=4, num_workers=int(sys.argv[1]), persistent_workers=sys.argv[1] == "2")
"""


@pytest.mark.covering(1)
@starts_threads_late
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_thread_begins_to_train_after_main_has_returned(run: Run, num_workers: str, face: str) -> None:
    """A non-daemon thread gets all its data, one after the other too; workers that it leaves are ended."""
    main = """
def train_later(other):
    other.join()
    train_late()
first = threading.Thread(target=train_late)
second = threading.Thread(target=train_later, args=(first,))
first.start()
second.start()
"""
    program = run(NUMBERS + FACES[face] + LATE + main, num_workers)
    assert (program.returncode, program.out, program.err) == (0, "True\n" * 2, "")


@pytest.mark.interpreter
@starts_threads_late
def test_a_thread_trains_on_though_main_had_loaders_that_have_ended(run: Run) -> None:
    """What those used, the background thread too, has ended by then; a pool that it makes itself is ended after it."""
    main = """
from concurrent.futures import ThreadPoolExecutor
def go_on():
    train_late()
    train_late.pool = ThreadPoolExecutor()
    print(train_late.pool.submit(sum, (1, 2)).result(), flush=True)
train(loader)
threading.Thread(target=go_on).start()
"""
    program = run(NUMBERS + FACES["for"] + LATE + main, "1")
    assert (program.returncode, program.out, program.err) == (0, "True\n3\n", "")


@pytest.mark.interpreter
def test_where_python_starts_no_thread_any_more(run: Run) -> None:
    """As 3.12.0 and 3.12.1: an error says so, and what to do."""
    main = """
def refuse(*args, **options):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def first_use():
    threading.main_thread().join()
    threading._start_new_thread = threading._start_joinable_thread = refuse
    try:
        iter(DataLoader(Numbers(), num_workers=1))
    except Exception as error:
        print(type(error).__name__, "start no thread" in str(error))
threading.Thread(target=first_use).start()
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, "LoaderClosedError True\n", "")


@pytest.mark.interpreter
def test_importing_asyncloader_after_main_has_returned_says_what_to_write(run: Run) -> None:
    """Python takes no exit hooks by then, and without one workers would be left behind."""
    main = """
def first_use():
    threading.main_thread().join()
    for name in [name for name in sys.modules if name.startswith(("asyncloader", "concurrent.futures.process"))]:
        del sys.modules[name]
    try:
        from asyncloader import DataLoader
    except Exception as error:
        print(type(error).__name__, "at the top of the program" in str(error))
threading.Thread(target=first_use).start()
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, "LoaderClosedError True\n", "")


@starts_threads_late
def test_workers_of_such_a_thread_use_loaders_themselves(run: Run) -> None:
    """A worker that is forked while the parent waits for its threads is not exiting."""
    main = """
class Nested(Numbers):
    def __getitem__(self, index):
        return sum(int(batch.sum()) for batch in DataLoader(Numbers(8), batch_size=4))
def train_on():
    for epoch in range(2):
        print(torch.cat(list(DataLoader(Nested(2), num_workers=1, timeout=10))).tolist(), flush=True)
        begun.set()
        wait_for_the_end_of_main()
begun = threading.Event()
threading.Thread(target=train_on).start()
begun.wait()
"""
    program = run(NUMBERS + AFTER_MAIN + main)
    assert (program.returncode, program.out, program.err) == (0, "[28, 28]\n" * 2, "")


@starts_threads_late
@pytest.mark.parametrize("face", FACES)
def test_a_thread_of_a_pool_trains_on_after_main_has_returned(run: Run, face: str) -> None:
    """So does a ThreadPoolExecutor's thread, which ends only when it is told to."""
    main = """
from concurrent.futures import ThreadPoolExecutor
begun = threading.Event()
def train_on():
    iterator = iter(DataLoader(Slow(), num_workers=2))
    begun.set()
    wait_for_the_end_of_main()
    print(torch.cat(list(iterator)).tolist() == list(range(40)), flush=True)
    print(train(DataLoader(Slow(), batch_size=4, num_workers=2)) == list(range(40)), flush=True)
pool = ThreadPoolExecutor()
pool.submit(train_on)
begun.wait()
"""
    program = run(NUMBERS + AFTER_MAIN + FACES[face] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n" * 2, "")


@pytest.mark.destructors
@pytest.mark.covering(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_daemon_thread_in_a_loop_at_the_end(run: Run, face: str, num_workers: int) -> None:
    """It is left where it is, as any daemon thread; nothing is said, and nobody waits for more than its batch."""
    main = f"""
loader = DataLoader(Slow(100_000), batch_size=2, num_workers={num_workers})
threading.Thread(target=train, args=(loader,), daemon=True).start()
while loader.stats().batches < 10:
    time.sleep(0.001)
atexit.register(say, "end")
say("bye")
"""

    def attempt() -> float:
        program = run(NUMBERS + FACES[face] + main)
        assert (program.returncode, program.err) == (0, "")
        return seconds_after(program, "bye") - seconds_after(program, "end")

    assert_within(1.0, attempt)  # the grace is 1.5 s


@pytest.mark.destructors
def test_a_batch_in_work_on_a_thread_at_the_end(run: Run) -> None:
    """num_workers=0 with `async for`: the thread may be inside torch, which must not crash the interpreter's end."""
    main = """
begun = threading.Event()
class Heavy(Numbers):
    def __getitem__(self, index):
        if index:
            begun.set()
        for _ in range(20 if index else 0):
            torch.rand(200, 200) @ torch.rand(200, 200)
        return index
loader = DataLoader(Heavy(), num_workers=0)
async def main():
    iterator = aiter(loader)
    await anext(iterator)
    task = asyncio.create_task(anext(iterator))
    await asyncio.to_thread(begun.wait)
    return iterator
iterator = asyncio.run(main())
say("bye")
"""

    def attempt() -> float:
        program = run(NUMBERS + main)
        assert (program.returncode, program.err) == (0, "")
        return seconds_after(program, "bye")

    assert_within(3.0, attempt, lambda: end_alone(run))


LONG = """
from asyncloader.engine import exits
exits.EXIT_GRACE_S = 0.2
class Long(Numbers):
    # A sample that goes from one torch operation into the next, for longer than the end of the program waits.
    def __getitem__(self, index):
        if index:
            self.reached.set()
            numbers, deadline = torch.ones(20_000), time.monotonic() + 20
            while time.monotonic() < deadline:
                numbers = numbers + 1
        return index
class OnLoop(Long):
    async def __getitem__(self, index):
        return super().__getitem__(index)
def begin(loader, face):
    reached = loader.dataset.reached = threading.Event()
    iterator = iter(loader) if face == "for" else aiter(loader)
    if face == "for":
        reached.wait()
        return iterator
    async def main():
        await anext(iterator)
        task = asyncio.create_task(anext(iterator))
        await asyncio.to_thread(reached.wait)
    asyncio.run(main())
    return iterator
"""


LOADERS = (
    ("Long(), num_workers=1, worker_backend='thread'", "for"),
    ("Long(), num_workers=1, concurrency=2, worker_backend='thread'", "for"),
    ("Long(), concurrency=2", "for"),
    ("Long()", "async for"),
    ("OnLoop()", "for"),  # the last one: nothing else has a turn of the loop from then on
)


@pytest.mark.destructors
@pytest.mark.parametrize("loaders", together_or_each(LOADERS))
def test_a_thread_is_in_torch_at_the_end(run: Run, loaders: Any) -> None:
    """Whatever of ours runs the sample: torch's C++ would abort the program if the interpreter unwound it."""
    own = "generator=torch.Generator()"  # a base seed out of torch's is a draw of the trainer's while samples are made
    begun = ", ".join(f"begin(DataLoader({loader}, batch_size=1, {own}), {face!r})" for loader, face in loaders)
    program = run(NUMBERS + LONG + f"iterators = [{begun}]\nsay('bye')")
    assert (program.returncode, program.err) == (0, ""), program.explain("did not end well")


@pytest.mark.destructors
def test_a_thread_is_in_a_finalizer_at_the_end(run: Run) -> None:
    """Python tells of what is raised there, and goes on: of the end nobody need hear."""
    main = """
class Last:
    def __del__(self):
        Long.__getitem__(self, 1)
class Finalized(Long):
    def __getitem__(self, index):
        last = Last()
        last.reached = self.reached
        del last
        return index
iterator = begin(DataLoader(Finalized(), num_workers=1, worker_backend="thread"), "for")
say("bye")
"""
    program = run(NUMBERS + LONG + main)
    assert (program.returncode, program.err) == (0, ""), program.explain("did not end well")


@pytest.mark.interpreter
def test_a_coroutine_that_blocks_the_loop_does_not_hold_up_the_end(run: Run) -> None:
    """Nor keep workers alive, which the loop would have to end: the thread that ends the program kills them."""
    main = """
class Blocking(Numbers):
    async def __getitem__(self, index):
        reached.set()
        time.sleep(1000)
reached = threading.Event()
others = [iter(DataLoader(Hung("sleep"), batch_size=4, num_workers=2)), iter(DataLoader(Numbers(), num_workers=1))]
for other in others:
    next(other)
iterator = iter(DataLoader(Blocking()))
reached.wait()
say("bye")
"""

    def attempt() -> float:
        program = run(NUMBERS + HUNG + main)
        assert (program.returncode, program.err) == (0, "")
        return seconds_after(program, "bye")

    assert_within(4.0, attempt, lambda: end_alone(run))


@pytest.mark.interpreter
def test_workers_without_a_group_of_their_own(run: Run) -> None:
    """Where setpgid is not allowed they are in the trainer's group: that is not what is killed with them."""
    main = """
def refuse(*pids):
    raise PermissionError
os.setpgid = refuse
for ending in ("close", "exit"):
    iterator = iter(DataLoader(Hung("sleep"), batch_size=4, num_workers=2))
    next(iterator)
    if ending == "close":
        iterator.close()
say("alive")  # in one write: workers say something too
"""
    program = run(NUMBERS + HUNG + main)
    assert (program.returncode, program.err) == (0, "")
    assert "alive " in program.out


CLEANUP = """
def note(what):
    with open("notes", "a") as file:
        print(what, os.getpid(), file=file, flush=True)

class Stream(IterableDataset):
    def __iter__(self):
        atexit.register(note, "atexit")
        try:
            for number in range(40):
                yield number
        finally:
            note("finally")
"""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("forkserver", "spawn"))]
)
@pytest.mark.parametrize("ending", ["exhaustion", "break", "exit"])
def test_cleanup_code_runs_where_it_belongs(run: Run, method: str, ending: str) -> None:
    """At every orderly end workers run their own atexit handlers and `finally`, and never the trainer's handlers."""
    main = """
if __name__ == "__main__":
    atexit.register(note, "trainer's atexit")
    print(os.getpid())
    iterator = iter(DataLoader(Stream(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]))
    for i, batch in enumerate(iterator):
        if i == 3 and sys.argv[2] != "exhaustion":
            break
    if sys.argv[2] != "exit":
        iterator.close()
"""
    program = run(NUMBERS + CLEANUP + main, method, ending)
    assert (program.returncode, program.err) == (0, "")
    notes: dict[int, list[str]] = {}
    for line in (program.folder / "notes").read_text().splitlines():
        what, pid = line.rsplit(maxsplit=1)
        notes.setdefault(int(pid), []).append(what)
    assert notes.pop(int(program.out)) == ["trainer's atexit"]
    assert list(notes.values()) == [["finally", "atexit"]] * 2


@pytest.mark.interpreter
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_object_may_end_its_iterator_when_the_interpreter_goes(run: Run, num_workers: int) -> None:
    """Its ``__del__`` is called when the names of modules are gone: all has been closed before, and nothing is left."""
    main = f"""
class Holder:
    def __init__(self, end):
        self.end = end
        self.iterator = iter(DataLoader(Numbers(), batch_size=4, num_workers={num_workers}))
        next(self.iterator)
    def __del__(self):
        for worker in getattr(self.iterator, "_workers", ()):
            worker.terminate()
        getattr(self.iterator, self.end, self.iterator.close)()
holders = [Holder("close"), Holder("_shutdown_workers")]
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, "", "")


@pytest.mark.interpreter
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_could_not_begin_has_nothing_to_end(run: Run, num_workers: int) -> None:
    """A traceback refers to it until the interpreter goes."""
    main = f"""
try:
    iter(DataLoader(Numbers(), num_workers={num_workers}, trace="/nowhere/run.json"))
except OSError as error:
    kept = error
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, "", "")
