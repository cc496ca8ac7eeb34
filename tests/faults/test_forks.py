"""The trainer forks: by os.fork, by multiprocessing, and after its threads and torch's have done their work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.programs import FACES, NUMBERS
from tests.support.nursery import Program

Run = Callable[..., Program]

FORK = """
from asyncloader.errors import LoaderClosedError
from tests.support.patience import Stopwatch

def in_child(function):
    pid = os.fork()
    if pid == 0:
        function()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_of_the_parent_is_closed_in_a_fork(run: Run, num_workers: int) -> None:
    """In the child it raises LoaderClosedError by either face; the parent's epoch is undisturbed."""
    main = f"""
iterator = iter(DataLoader(Slow(), batch_size=4, num_workers={num_workers}))
seen = next(iterator).tolist()
def take():
    for face in (lambda: next(iterator), lambda: asyncio.run(anext(iterator)), lambda: list(iterator)):
        try:
            face()
        except LoaderClosedError as error:
            print("not to a fork of it" in str(error))
    iterator.close()
    asyncio.run(iterator.aclose())
print(in_child(take))
for batch in iterator:
    seen += batch.tolist()
print(seen == list(range(40)))
"""
    program = run(NUMBERS + FORK + main)
    assert (program.returncode, program.out, program.err) == (0, "True\nTrue\nTrue\n0\nTrue\n", "")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "ending",
    ["os._exit(0)", "sys.exit(0)", "del iterator; import gc; gc.collect(); sys.exit(0)", "pass", "raise ValueError"],
)
def test_the_end_of_a_fork_disturbs_nothing(run: Run, ending: str) -> None:
    """Whatever finalizers and exit hooks run in a child, the parent and its workers do not notice."""
    main = f"""
iterator = iter(DataLoader(Slow(), batch_size=4, num_workers=2))
seen = next(iterator).tolist()
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    {ending}
else:
    watch = Stopwatch(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    took = watch.seconds()
    os.waitpid(pid, 0)
    for batch in iterator:
        seen += batch.tolist()
    print(seen == list(range(40)), took < 3)
"""
    program = run(NUMBERS + FORK + main)
    assert (program.returncode, program.out) == (0, "True True\n")
    assert program.err == "" or (ending == "raise ValueError" and program.err.count("Traceback") == 1)


def test_a_fork_does_not_wait_for_a_batch_of_the_parents(run: Run) -> None:
    """Which a thread was making that is not there; without workers."""
    main = """
class Held(Numbers):
    def __getitem__(self, index):
        reached.set()
        threading.Event().wait()
def seconds_of_a_child():
    watch = Stopwatch()
    if (pid := os.fork()) == 0:
        sys.exit(0)
    watched = Stopwatch(pid)
    forked_s = watch.seconds()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    took_s = forked_s + watched.seconds()
    os.waitpid(pid, 0)
    return took_s
reached = threading.Event()
threading.Thread(target=list, args=(DataLoader(Held()),), daemon=True).start()
reached.wait()
print(min(seconds_of_a_child() for _ in range(3)) < 1, flush=True)
os._exit(0)  # the thread is still at its sample, for which a program's end waits
"""
    program = run(NUMBERS + FORK + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n", "")


@pytest.mark.interpreter
@pytest.mark.parametrize("face", FACES)
def test_a_fork_has_loaders_of_its_own(run: Run, face: str) -> None:
    """A child makes iterators anew, with the parent's loader or another, and its own exit ends them."""
    main = """
loader = DataLoader(Slow(), batch_size=4, num_workers=2)
iterator = iter(loader)
seen = next(iterator).tolist()
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    print(train(loader) == list(range(40)), flush=True)
    print(train(DataLoader(Numbers(), num_workers=1)) == list(range(40)), flush=True)
    left_alive = iter(loader)
else:
    _, status = os.waitpid(pid, 0)
    for batch in iterator:
        seen += batch.tolist()
    print(seen == list(range(40)), status)
"""
    program = run(NUMBERS + FACES[face] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\nTrue\nTrue 0\n", "")


@pytest.mark.slow
def test_forks_while_other_threads_iterate(run: Run) -> None:
    """At any moment of an epoch, again and again: neither the threads nor the children notice.

    A child cannot have an epoch of its own here: torch's generator may have been locked by another thread at the fork,
    and stays locked in the child for ever.
    """
    main = """
done = threading.Event()
results = []
def train_on():
    while not done.is_set():
        results.append(train(DataLoader(Numbers(400), batch_size=4, num_workers=2)) == list(range(400)))
threads = [threading.Thread(target=train_on) for _ in range(2)]
for thread in threads:
    thread.start()
def end_orderly():
    import gc
    gc.collect()
    print("child", flush=True)
    sys.exit(0)
statuses = []
for _ in range(30):
    try:
        statuses.append(in_child(end_orderly))
    except SystemExit:
        os._exit(0)
done.set()
for thread in threads:
    thread.join()
print(statuses, all(results), len(results) > 2)
"""
    program = run(NUMBERS + FORK + FACES["for"] + main)
    assert (program.returncode, program.err) == (0, "")
    assert program.out == "child\n" * 30 + f"{[0] * 30} True True\n"


@pytest.mark.interpreter
@pytest.mark.timeout(180)  # a process that is not forked imports torch, for which there may be a queue
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("forkserver", "spawn"))]
)
def test_inside_a_process_of_multiprocessing(run: Run, method: str) -> None:
    """A trainer that is a child itself, as under a launcher."""
    main = """
import multiprocessing
def child():
    print(train(DataLoader(Slow(), batch_size=4, num_workers=2)) == list(range(40)), flush=True)
    iterator = iter(DataLoader(Slow(), batch_size=4, num_workers=2))
    next(iterator)
    globals()["alive"] = iterator
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""
    program = run(NUMBERS + FACES["for"] + main, method, timeout_s=150)
    assert (program.returncode, program.out, program.err) == (0, "True\n0\n", "")


@pytest.mark.parametrize("face", FACES)
def test_inside_a_daemonic_process(run: Run, face: str) -> None:
    """Daemonic processes may have no children: torch's error, when workers are started, and what to use."""
    main = """
import multiprocessing
def child():
    loader = DataLoader(Numbers(), num_workers=2)
    try:
        if sys.argv[1] == "for":
            iter(loader)
        else:
            asyncio.run(anext(aiter(loader)))
    except AssertionError as error:
        print(error, *["ProcessPoolExecutor" in note for note in error.__notes__], flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join()
    print(process.exitcode)
"""
    program = run(NUMBERS + main, face)
    assert program.out == "daemonic processes are not allowed to have children True\n0\n"
    assert (program.returncode, program.err) == (0, "")


IMPORTING = """
import types
from importlib.machinery import ModuleSpec

class Late:
    # A module that comes to its end when it may, in the trainer; at once in workers.
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "late" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        if os.getpid() == trainer:
            half_done.set()
            release.wait()
        module.number = 7
trainer = os.getpid()
half_done, release = threading.Event(), threading.Event()
sys.meta_path.insert(0, Late())

class Importing(Numbers):
    def __getitem__(self, index):
        if index < 2:
            return index
        if sys.argv[1] == "replacement" and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(1)
        import late
        return late.number
"""


@pytest.mark.covering(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("who", ["first worker", "replacement"])
def test_fork_while_a_thread_imports(run: Run, face: str, who: str) -> None:
    """The worker imports the module itself: the import that it inherited half made is nobody's there."""
    main = """
import logging
logging.getLogger("asyncloader").setLevel(logging.ERROR)
thread = threading.Thread(target=__import__, args=("late",))
thread.start()
half_done.wait()
print(train(DataLoader(Importing(4), num_workers=1, timeout=10)))
release.set()
thread.join()
import late
print(late.number)
"""
    program = run(NUMBERS + IMPORTING + FACES[face] + main, who)
    assert (program.returncode, program.out, program.err) == (0, "[0, 1, 7, 7]\n7\n", "")


@pytest.mark.covering(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("who", ["first worker", "replacement"])
def test_iterating_in_the_body_of_a_module(run: Run, face: str, who: str) -> None:
    """Workers find it as it is, half made: to import it again would be to iterate again."""
    main = """
import logging
logging.getLogger("asyncloader").setLevel(logging.ERROR)
def iterate(module):
    assert os.getpid() == trainer
    module.number = 7
    print(train(DataLoader(Importing(4), num_workers=1, timeout=10)))
Late.exec_module = lambda self, module: iterate(module)
import late
"""
    program = run(NUMBERS + IMPORTING + FACES[face] + main, who)
    assert (program.returncode, program.out, program.err) == (0, "[0, 1, 7, 7]\n", "")


@pytest.mark.parametrize("options", ["num_workers=8, worker_backend='thread'", "batch_size=8, concurrency=8"])
def test_threads_of_a_fork_come_to_torch_at_once(run: Run, options: str) -> None:
    """Torch makes its own threads anew in a fork: who comes to that meanwhile was told of an "Invalid thread pool!"."""
    main = f"""
import warnings
warnings.simplefilter("ignore")  # so many workers
torch.set_num_threads(2)
torch.ones(100_000).sum()
class Together(Numbers):
    def __getitem__(self, index):
        together.wait(20)
        return torch.arange(20_000, dtype=torch.float32) + index
ends = []
for _ in range(12):
    if (pid := os.fork()) == 0:
        together = threading.Barrier(8)
        batches = [*DataLoader(Together(8), {options})]
        assert sorted(float(first) for batch in batches for first in batch[:, 0]) == [*range(8)]
        os._exit(0)
    ends.append(os.waitpid(pid, 0)[1])
print(ends)
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, f"{[0] * 12}\n", "")


@pytest.mark.parametrize("num_threads", [1, 4])
def test_fork_after_torch_has_used_its_threads(run: Run, num_threads: int) -> None:
    """Workers do convolutions and matrix products although the trainer did, with several threads, before the fork."""
    main = f"""
torch.set_num_threads({num_threads})
def work():
    images = torch.ones(2, 3, 64, 64)
    features = torch.nn.functional.conv2d(images, torch.ones(8, 3, 3, 3))
    matrix = torch.ones(300, 300)
    return float(features.sum() + (matrix @ matrix).sum() + torch.linalg.inv(torch.eye(50)).sum())
class Convolved(Numbers):
    def __getitem__(self, index):
        return work(), torch.get_num_threads()
expected = work()
with torch.enable_grad():
    torch.ones(10, requires_grad=True).sum().backward()
for epoch in range(2):
    for results, threads in DataLoader(Convolved(16), batch_size=4, num_workers=2):
        assert results.tolist() == [expected] * 4, results
        assert threads.tolist() == [1] * 4, threads
        work()
print(torch.get_num_threads())
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, f"{num_threads}\n", "")


@pytest.mark.parametrize(
    ("forks", "outcome"),
    [
        pytest.param(1, "True\n", id="once"),
        pytest.param(100, "True True\n", id="each time", marks=pytest.mark.slow),
    ],
)
def test_fork_while_a_thread_draws_random_numbers(run: Run, forks: int, outcome: str) -> None:
    """A worker that inherits the lock of torch's generator, held for ever, is found out and replaced; a bounded
    time. The log says so."""
    main = f"""
import itertools
from asyncloader.errors import WorkerStartError
from asyncloader.backends.processes import process
process._UP_S = 3.0  # seconds for which it is waited for: 10 otherwise
drawing, done, made = threading.Event(), threading.Event(), itertools.count(1)
numbers = torch.empty(40_000_000, dtype=torch.uint8)
def draw():
    while not done.is_set():
        numbers[0] = 255
        drawing.set()
        numbers.random_(0, 100)  # the lock is held for about 0.3 s
def before_fork():
    drawing.clear()
    while not done.is_set() and not drawing.wait(0.01):
        pass
    while not done.is_set() and numbers[0] == 255:
        pass  # from the event to the first number: then the lock is held
def on_fork():
    if next(made) == {forks}:
        done.set()
thread = threading.Thread(target=draw)
thread.start()
drawing.wait()
os.register_at_fork(before=before_fork, after_in_parent=on_fork)
try:
    print(train(DataLoader(Numbers(), batch_size=4, num_workers=1, generator=torch.Generator())) == list(range(40)))
except WorkerStartError as error:
    print("held a lock" in str(error), "forkserver" in str(error))
done.set()
thread.join()
"""
    program = run(NUMBERS + FACES["for"] + main)
    assert program.returncode == 0, program.explain("failed")
    assert program.out == outcome or forks > 1
    assert "killed by signal: Killed (SIGKILL)" in program.err
    assert "It hung before any code of the user's ran" in program.err


def test_a_fork_waits_for_the_end_of_a_draw_in_another_thread(run: Run) -> None:
    """From torch's global generator, whose lock would be held in the worker for ever."""
    main = """
from asyncloader.backends.processes import process
wait_drawn, go, drew = process.wait_drawn, threading.Event(), threading.Event()
def draw():
    numbers = torch.empty(40_000_000, dtype=torch.uint8)
    go.wait()
    numbers.random_(0, 100)  # the lock is held for about 0.3 s of the thread's CPU time
    drew.set()
def amid_the_draw():
    used = time.pthread_getcpuclockid(thread.ident)
    begun = time.clock_gettime(used)
    go.set()
    while time.clock_gettime(used) < begun + 0.02 and not drew.is_set():
        time.sleep(0.001)
    sys.setswitchinterval(60)  # whoever ends a draw has no turn before the fork, however busy the machine is
    wait_drawn()
process.wait_drawn = amid_the_draw
thread = threading.Thread(target=draw)
thread.start()
iterator = iter(DataLoader(Numbers(), batch_size=4, num_workers=1, generator=torch.Generator()))
sys.setswitchinterval(0.005)
print([number for batch in iterator for number in batch.tolist()] == list(range(40)))
thread.join()
"""
    program = run(NUMBERS + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n", ""), program.explain("failed")


def test_a_fork_while_a_thread_has_numpys_global_generator(run: Run) -> None:
    """In the worker nobody has it."""
    main = """
import numpy as np
held, done = threading.Event(), threading.Event()
def hold():
    with np.random.mtrand._rand._bit_generator.lock:
        held.set()
        done.wait(60)
thread = threading.Thread(target=hold)
thread.start()
held.wait()
print(train(DataLoader(Numbers(), batch_size=4, num_workers=1)) == list(range(40)))
done.set()
thread.join()
"""
    program = run(NUMBERS + FACES["for"] + main)
    assert (program.returncode, program.out, program.err) == (0, "True\n", ""), program.explain("failed")


def test_a_worker_that_takes_long_to_die_of_being_killed(run: Run) -> None:
    """Its connections are closed before its status is known; why it was killed is what the log says all the same."""
    main = """
import itertools
from asyncloader.backends.processes import process
process._UP_S = 0.5
find, asked, made = process.WorkerProcess._find_exitcode, itertools.count(), itertools.count()
process.WorkerProcess._find_exitcode = lambda worker: None if next(asked) < 20 else find(worker)
def hang():
    time.sleep(1000 if repr(made) == "count(1)" else 0)
os.register_at_fork(before=lambda: next(made), after_in_child=hang)
print(train(DataLoader(Numbers(), batch_size=4, num_workers=1)) == list(range(40)))
"""
    program = run(NUMBERS + FACES["for"] + main)
    assert (program.returncode, program.out) == (0, "True\n"), program.explain("failed")
    assert "It hung before any code of the user's ran" in program.err
    assert "closed its connections" not in program.err
