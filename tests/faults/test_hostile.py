"""Datasets that do what they should not: the error that a user would expect, and everything stays usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.programs import FACES, NUMBERS, QUICK_FACES
from tests.support.nursery import Program

Run = Callable[..., Program]


def test_a_dataset_that_closes_stray_descriptors(run: Run) -> None:
    """The connection to the trainer is one of them: bounded, and the error says what happened."""
    main = """
class Closing(Numbers):
    def __getitem__(self, index):
        if index == 8:
            os.closerange(3, 256)
        return index
from asyncloader import WorkerDiedError
import logging
logging.getLogger("asyncloader").setLevel(logging.ERROR)
seen = []
iterator = iter(DataLoader(Closing(), batch_size=4, num_workers=2, max_retries=1))
begun = time.monotonic()
while True:
    try:
        seen += next(iterator).tolist()
    except WorkerDiedError as error:
        print("closed its connections" in str(error) or error, error.keys, time.monotonic() - begun < 30)
    except StopIteration:
        break
print(seen == [i for i in range(40) if i not in (8, 9, 10, 11)])
"""
    program = run(NUMBERS + main)
    assert program.out == "True [[8, 9, 10, 11]] True\nTrue\n"
    assert (program.returncode, program.err) == (0, "")


HARMS = (
    "os.chdir('/')",
    "os.environ.clear()",
    "sys.path.clear()",
    "sys.modules.pop('pickle', None)",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "os.setpgid(0, 0)",
    "os.umask(0o777)",
    "sys.setrecursionlimit(200)",
    "torch.set_num_threads(3)",
    "torch.set_default_dtype(torch.float64)",
    "threading.Thread(target=time.sleep, args=(0.5,)).start()",
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "subprocess.run(['true'])",
    "kept.append(subprocess.Popen(['sleep', '1000']))",
    "os.fork() or os._exit(0)",
    "atexit.register(time.sleep, 0.2)",
    "__import__('gc').disable()",
    "__import__('warnings').simplefilter('error')",
    "asyncio.run(asyncio.sleep(0))",
    "asyncio.set_event_loop_policy(__import__('uvloop').EventLoopPolicy())",
    "__import__('faulthandler').disable()",
)


@pytest.mark.parametrize("face", QUICK_FACES)
def test_what_a_dataset_does_to_its_own_process_costs_no_batch(run: Run, face: str) -> None:
    """What a dataset does to its own process is its own affair, and the next loader's workers know nothing of it."""
    main = f"""
import warnings
kept = []
for category in (ResourceWarning, DeprecationWarning):  # of the user's own
    warnings.simplefilter("ignore", category)
class Harmful(Numbers):
    def __getitem__(self, index):
        if index % 10 == 0:
            exec(harm)
        return index
for harm in {HARMS!r}:
    if train(DataLoader(Harmful(), batch_size=4, num_workers=1)) == list(range(40)):
        print(harm)
print(train(DataLoader(Numbers(), batch_size=4, num_workers=2)) == list(range(40)))
"""
    program = run(NUMBERS + FACES[face] + main)
    assert (program.returncode, program.out.splitlines(), program.err) == (0, [*HARMS, "True"], "")


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_dataset_that_prints(run: Run, buffering: str) -> None:
    """Each line comes once, the trainer's own as well, whatever is in a buffer when workers are forked."""
    main = """
class Printing(Numbers):
    def __getitem__(self, index):
        # each in one write, or lines of two processes mix
        print(f"sample {index}\\n", end="")
        print(f"to stderr {index}\\n", end="", file=sys.stderr)
        return index
print("before")
for _ in range(2):
    for batch in DataLoader(Printing(8), batch_size=4, num_workers=2):
        print("batch\\n", end="")
print("after")
"""
    program = run(NUMBERS + main, PYTHONUNBUFFERED=buffering)
    assert program.returncode == 0
    expected = ["before", "after"] + ["batch"] * 4 + [f"sample {i}" for i in range(8)] * 2
    assert sorted(program.out.splitlines()) == sorted(expected)
    assert sorted(program.err.splitlines()) == sorted([f"to stderr {i}" for i in range(8)] * 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("face", QUICK_FACES)
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError(index)",
        "raise TwoArguments(index, 'two')",
        "raise Unpicklable(index)",
        "raise ReduceRaises(index)",
        "raise UnpicklingKills(index)",
        "raise ExceptionGroup('group', [ValueError(index), KeyError(index)])",
        "raise StopIteration",
        "raise StopAsyncIteration",
        "raise TimeoutError(index)",
        "raise asyncio.CancelledError",
        "raise EOFError",
        "raise BrokenPipeError",
        "raise MemoryError",
        "raise Frozen(index)",
        "raise RecursionError",
        "return (lambda: (yield))()",
        "return lambda: index",
        "return NeverAgain()",
        "return (yield_ := [], yield_.append(yield_))[0]",
        "def f(): return f()\n        f()",
    ],
)
def test_what_a_sample_can_be_or_raise(run: Run, statement: str, num_workers: int, face: str) -> None:
    """An error for that batch at most; the others come; nothing hangs, nothing is left."""
    main = f"""
class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{{one}} {{two}}")
class Unpicklable(Exception):
    def __init__(self, index):
        self.lock = threading.Lock()
class ReduceRaises(Exception):
    def __reduce__(self):
        raise RuntimeError("no")
import dataclasses
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    index: int
def kill():
    raise SystemExit(3)
class UnpicklingKills(Exception):
    def __reduce__(self):
        return kill, ()
class NeverAgain:
    def __reduce__(self):
        return int, ("not a number",)
class Hostile(Numbers):
    def __getitem__(self, index):
        if index == 9:
            {statement.replace(chr(10), chr(10) + "    ")}
        return index
loader = DataLoader(Hostile(), batch_size=4, num_workers={num_workers}, collate_fn=list)
seen, errors = [], []
async def everything(iterator):
    while len(seen) + len(errors) < 10:
        try:
            seen.append(await anext(iterator))
        except StopAsyncIteration as error:
            if len(seen) + len(errors) < 10:
                errors.append(error)
        except BaseException as error:
            errors.append(error)
if sys.argv[1] == "for":
    iterator = iter(loader)
    while len(seen) + len(errors) < 10:
        try:
            seen.append(next(iterator))
        except BaseException as error:
            errors.append(error)
else:
    asyncio.run(everything(aiter(loader)))
good = [batch for batch in seen if all(type(i) is int for i in batch)]
assert good == [[i, i + 1, i + 2, i + 3] for i in range(0, 40, 4) if i != 8], (seen, errors)
assert len(errors) <= 1
print(*(type(error).__name__ for error in errors))
"""
    program = run(NUMBERS + main, face)
    assert program.returncode == 0, program.explain("failed")
    assert program.err == ""
