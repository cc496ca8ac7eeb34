"""Faults and resumes for any loader: each case is a program of its own, in which one thing goes wrong.

    python -m asyncloader.testing.suite my_adapters:Mine [...] --json found.json
    pytest -p asyncloader.testing.plugin --pyargs asyncloader.testing.suite --loader my_adapters:Mine

An adapter (`Adapter`) says how a loader is made. An epoch has 16 batches of 4 samples and two workers; what happens,
happens at sample 30. A case is *good* if all batches come (or nothing is left behind, or a state is resumed exactly),
*loud* if an error says that they do not, and *bad* if batches are missing in silence, the loop hangs, or processes are
left. pytest fails what is bad. Linux only: processes are found in /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import math
import os
import pickle
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader.threads import kernel_stat

__all__ = ["CASES", "Adapter", "judge", "run_case"]

CASES = {
    "killed": "A worker is killed (SIGKILL, the out-of-memory killer)",
    "segmentation fault": "A native library crashes in a worker",
    "exit": "A worker calls `os._exit(0)`",
    "always killed": "A sample kills every worker that reads it",
    "hang": "A sample hangs; a timeout of 1 s",
    "raise": "A sample raises",
    "skip": "A sample raises, and may be skipped",
    "leak": "Each sample leaks 8 MiB: the most that a worker holds",
    "break": "The loop is left after one batch: seconds until the workers are gone",
    "trainer killed": "The trainer is killed (SIGKILL) while a worker is in a long sample: workers left after 2 s",
    "interrupt": "Ctrl-C while a sample hangs: seconds until the program has ended",
    "resume": "States at every batch of a shuffled, augmented epoch, resumed",
    "resume elsewhere": "The same, with one worker in place of two",
    "resume on fewer ranks": "States at every step of two ranks, resumed on one",
    "resume on more ranks": "The same of one rank, resumed on two",
}
BATCHES, BATCH_SIZE, FATAL = 16, 4, 30
LIMIT_S = 30.0
_WHOLE = list(range(BATCHES * BATCH_SIZE))
_EXACT, _OTHER_DRAWS, _ONCE = "to the bit", "other random numbers", "each once"
_WRONG, _LOST = "other samples", "lost or repeated"
_MOST_ERRORS = 3
_LEAK_BYTES = 8 << 20
_LEAK_BOUND_MB = 230  # a worker is renewed after the batches that it has in hand; without a bound it holds 256

_IN_A_SAMPLE: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "always killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(0),
    "raise": lambda: 1 / 0,
    "skip": lambda: 1 / 0,
    **dict.fromkeys(("hang", "trainer killed", "interrupt"), lambda: time.sleep(3600)),
}
_TELLING = ("break", "trainer killed", "interrupt")
"""In these cases the parent hears, through a FIFO in the flag's place, that the program has come so far."""


class Adapter:
    """How the suite uses a loader. Only `make` has to be written; a loader without states raises in `state`."""

    def make(self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False) -> Any:
        """Return a loader of batches of 4, in order, with the options that the case needs, where there are some.

        In the cases with ranks `rank` and `num_ranks` are given as well: which part of the epoch the loader has.
        """
        raise NotImplementedError

    def merge(self, states: list[Any]) -> Any:
        """Return what each of another number of ranks goes on from, of the states of all ranks: the first one's."""
        return states[0]

    def state(self, loader: Any, iterator: Any) -> Any:
        """Return the state of a loader of which `iterator` has given some batches."""
        return loader.state_dict()

    def load(self, loader: Any, state: Any) -> Iterator[Any]:
        """Return an iterator of a new loader that goes on from the state."""
        loader.load_state_dict(state)
        return iter(loader)


class Numbers(Dataset[float]):
    """Each sample is its index, plus a random number below 1: the augmentation. Something may happen at sample 30.

    Args:
        case: What happens.
        flag: A file that is made when it happens, so that it happens once; where it leaks, what workers hold is in it.
    """

    def __init__(self, case: str, flag: str) -> None:
        self.case = case
        self.flag = flag
        self.leaked: list[bytes] = []

    def __repr__(self) -> str:
        return "Numbers()"  # without an address: Grain's states have it

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> float:
        if self.case == "leak":
            self.leaked.append(os.urandom(1) * _LEAK_BYTES)
            held = Path("/proc/self/smaps_rollup").read_text().partition("Private_Dirty:")[2].split()[0]
            with open(self.flag, "a") as most:
                most.write(f"{held}\n")
        if index == FATAL and self.case in _IN_A_SAMPLE and self._may_happen():
            _IN_A_SAMPLE[self.case]()
        return index + torch.rand((), dtype=torch.float64).item()

    def _may_happen(self) -> bool:
        if self.case in _TELLING:
            Path(self.flag).write_bytes(b"!")
            return True
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            return True
        return self.case in ("always killed", "raise", "skip")


# --------------------------------------------------------------------------------------------------- in the program


def _say(*event: Any) -> None:
    print(json.dumps(event), flush=True)


def _program(adapter: Adapter, case: str, flag: str) -> None:
    """Run one case; print what happens, a line each, as it happens."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell has started us in the background
    warnings.simplefilter("ignore")
    loader = adapter.make(Numbers(case, flag), case)
    _say("made", type(loader).__module__.partition(".")[0])
    if case.startswith("resume"):
        _resume(adapter, case)
        return
    iterator = iter(loader)
    del loader  # who leaves the loop has nothing of it
    errors = 0
    while errors < _MOST_ERRORS:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            errors += 1
            _say("error", type(error).__name__)
            continue
        _say("batch", [math.floor(number) for number in batch])
        if case == "break":
            del iterator, batch
            Path(flag).write_bytes(b"!")
            sys.stdin.read()  # until the parent has seen the workers go
            return


def _resume(adapter: Adapter, case: str) -> None:
    """Take states, of several ranks when all have given as many batches; go on from each."""
    before, after = {"resume on fewer ranks": (2, 1), "resume on more ranks": (1, 2)}.get(case, (1, 1))

    def make(seed: int, num_ranks: int, num_workers: int = 2) -> Iterator[Any]:
        for rank in range(num_ranks):
            torch.manual_seed(seed)  # each would be a program of its own
            ranks = {} if before == after else {"rank": rank, "num_ranks": num_ranks}
            yield adapter.make(Numbers(case, ""), case, num_workers=num_workers, shuffle=True, **ranks)

    loaders = list(make(0, before))
    iterators = [iter(loader) for loader in loaders]
    given: list[list[float]] = []
    states: dict[int, bytes] = {}
    for done in range(0, BATCHES + 1, max(before, after)):  # where a step ends with either number of ranks
        while len(given) < done:
            given += [list(map(float, next(iterator))) for iterator in iterators]
        states[done] = pickle.dumps(adapter.merge(list(map(adapter.state, loaders, iterators))))
    given += [list(map(float, batch)) for iterator in iterators for batch in iterator]  # should be none
    for done, state in states.items():
        try:
            rest = [
                list(map(float, batch))
                for loader in make(done + 1, after, 1 if case == "resume elsewhere" else 2)
                for batch in adapter.load(loader, pickle.loads(state))
            ]
        except Exception as error:
            _say("resumed", f"`{type(error).__name__}`")
            continue
        _say("resumed", _compare(given[:done], rest, given[done:], in_order=before == after))


def _compare(given: list[list[float]], rest: list[list[float]], tail: list[list[float]], in_order: bool) -> str:
    if not tail and sorted(_samples(rest)) == _WHOLE:
        rest = []  # a loader may go on with the next epoch
    if not in_order:
        return _ONCE if sorted(_samples(given + rest)) == _WHOLE else _LOST
    if rest == tail:
        return _EXACT
    same = [_samples([batch]) for batch in rest] == [_samples([batch]) for batch in tail]
    return _OTHER_DRAWS if same else _WRONG


def _samples(batches: list[list[float]]) -> list[int]:
    return [math.floor(number) for batch in batches for number in batch]


# ----------------------------------------------------------------------------------------------------- in the parent


def run_case(adapter: str, case: str) -> dict[str, Any]:
    """Run one case in a program of its own.

    Args:
        adapter: ``module:class``.
        case: One of `CASES`.

    Returns:
        Plain values: "verdict" ("good", "loud", "bad"), "words" for a table, and "events".

    Raises:
        RuntimeError: if there is no loader to judge, with what the adapter raised.
    """
    with (  # no pipes, which a loader that prints much would fill
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryDirectory() as folder,
    ):
        flag = Path(folder, "happened")
        # Not as the main module, whose classes workers would have to be sent by value.
        command = [
            sys.executable,
            "-c",
            "from asyncloader.testing.suite import main; main()",
            adapter,
            "--program",
            case,
            str(flag),
        ]
        if case in _TELLING:
            os.mkfifo(flag)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=errors, start_new_session=True)
        seen: dict[str, Any] = {}
        watch: Callable[..., None] = _WATCHES.get(case, _wait)
        try:
            watch(process, flag, seen)
        finally:
            for pid in (process.pid, *_workers(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
        for file in (said, errors):
            file.seek(0)
        events = [json.loads(line) for line in said if line.startswith('["')]
        if not events:
            raise RuntimeError(f"{adapter} has made no loader:\n{errors.read()}")
    verdict, words = judge(case, events, seen)
    return {"verdict": verdict, "words": words, "events": events, **seen}


def _wait(process: subprocess.Popen[bytes], flag: Path, seen: dict[str, Any], limit_s: float = LIMIT_S) -> None:
    try:
        seen["status"] = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        seen["hung"] = True


def _weigh(process: subprocess.Popen[bytes], flag: Path, seen: dict[str, Any]) -> None:
    _wait(process, flag, seen)
    seen["most_mb"] = max(map(int, flag.read_text().split())) >> 10 if flag.exists() else 0


def _watch_break(process: subprocess.Popen[bytes], flag: Path, seen: dict[str, Any]) -> None:
    seen["late"] = not _is_reached(flag)
    seen["seconds"] = _wait_ended(_workers(process.pid), 10.0)


def _kill(process: subprocess.Popen[bytes], flag: Path, seen: dict[str, Any]) -> None:
    seen["late"] = not _is_reached(flag)
    process.kill()
    process.wait()
    _wait_ended(_workers(process.pid), 2.0)
    seen["left"] = len(_workers(process.pid))


def _interrupt(process: subprocess.Popen[bytes], flag: Path, seen: dict[str, Any]) -> None:
    seen["late"] = not _is_reached(flag)
    process.send_signal(signal.SIGINT)
    seen["seconds"] = _wait_ended([process.pid], LIMIT_S)


_wait_long = partial(_wait, limit_s=10 * LIMIT_S)  # loaders are started up to 19 times
_WATCHES: dict[str, Callable[..., None]] = {
    "leak": _weigh,
    "break": _watch_break,
    "trainer killed": _kill,
    "interrupt": _interrupt,
    **{case: _wait_long for case in CASES if case.startswith("resume")},
}


def _is_reached(fifo: Path) -> bool:
    with open(fifo, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as told:
        return bool(select.select([told], [], [], LIMIT_S)[0])


def _wait_ended(processes: list[int], limit_s: float) -> float | None:
    """Return how many seconds it took until all of them had ended; None if it took too long."""
    began = time.monotonic()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            with open(descriptor, "rb", buffering=0):
                if not select.select([descriptor], [], [], max(0.0, began + limit_s - time.monotonic()))[0]:
                    return None
    return time.monotonic() - began


def _workers(session: int) -> list[int]:
    """Return the living processes of a program but for itself, whoever is their parent by now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = kernel_stat(folder)[:4]
            is_helper = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if int(of) == session and state != "Z" and int(folder.name) != session and not is_helper:
                found.append(int(folder.name))
    return found


def judge(case: str, events: list[Any], seen: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict of a case, and words for it."""
    errors = [event[1] for event in events if event[0] == "error"]
    if seen.get("late"):
        return "bad", "does not come so far"
    if "most_mb" in seen and not seen.get("hung"):
        return ("good" if seen["most_mb"] <= _LEAK_BOUND_MB else "loud"), f"{seen['most_mb']} MB"
    if "left" in seen:
        return ("bad", str(seen["left"])) if seen["left"] else ("good", "none")
    if "seconds" in seen:
        return ("bad", "not in time") if seen["seconds"] is None else ("good", f"{seen['seconds']:.2f} s")
    if case.startswith("resume"):
        states = BATCHES // (2 if "ranks" in case else 1) + 1
        return _judge_resumes([event[1] for event in events if event[0] == "resumed"], states, seen)
    batches = [event[1] for event in events if event[0] == "batch"]
    samples = sorted(_samples(batches))
    if samples == _WHOLE:
        words = [f"all {BATCHES} batches"]
    elif case == "skip" and samples == [sample for sample in _WHOLE if sample != FATAL]:
        words = ["all but the sample"]
    else:
        words = [f"{len(batches)} of {BATCHES} batches"]
    words += [f"`{errors[0]}`" + f" {len(errors)} times" * (len(errors) > 1)] if errors else []
    if seen.get("hung"):  # where an error came before, a loop that does not go on after it is told
        return ("loud" if errors else "bad"), ", ".join([*words, "hangs"])
    if words[0].startswith("all"):
        return "good", words[0]
    return (
        ("loud", ", ".join(words)) if errors or seen.get("status") else ("bad", f"{words[0]}, ends as if all was well")
    )


def _judge_resumes(found: list[str], states: int, seen: dict[str, Any]) -> tuple[str, str]:
    if not found and not seen.get("hung"):
        return "loud", "has no state, or refuses"
    words = [f"{count} {word}" for word, count in Counter(found).most_common()]
    words += ["hangs"] if seen.get("hung") else []
    told = ", ".join(words).replace(" ", f" of {states} ", 1)
    if seen.get("hung") or {_WRONG, _LOST} & set(found):
        return "bad", told
    return "good" if len(found) == states and set(found) <= {_EXACT, _ONCE} else "loud", told


# ------------------------------------------------------------------------------------- from the command line, in pytest


def pytest_generate_tests(metafunc: Any) -> None:
    """Pytest's hook for this module: every case with every adapter."""
    metafunc.parametrize("case", CASES)
    metafunc.parametrize("loader", metafunc.config.getoption("--loader"))


def test_no_silent_loss(loader: str, case: str) -> None:
    """Batches all come, or an error says that they do not; nothing hangs, nothing is left."""
    found = run_case(loader, case)
    assert found["verdict"] != "bad", found["words"]


def main() -> None:
    """Measure adapters, print the matrix, and write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("adapters", nargs="+", metavar="MODULE:CLASS")
    parser.add_argument("--json", type=Path, help="where all that was seen goes")
    parser.add_argument("--program", nargs=2, metavar=("CASE", "FLAG"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        module, _, name = arguments.adapters[0].partition(":")
        _program(getattr(importlib.import_module(module), name)(), *arguments.program)
        return
    found: dict[str, dict[str, Any]] = {}
    for case, words in CASES.items():
        print(words, flush=True)
        found[case] = {}
        for adapter in arguments.adapters:
            found[case][adapter] = each = run_case(adapter, case)
            print(f"  {adapter:40} {each['verdict']:5} {each['words']}", flush=True)
    if arguments.json:
        report = {"measured with": _versions(found), "cases": found}
        arguments.json.write_text(json.dumps(report, indent=1))


def _versions(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the versions of Python, of torch and of the loaders' packages."""
    events = [event for cells in found.values() for cell in cells.values() for event in cell["events"]]
    modules = {"torch", *(event[1] for event in events if event[0] == "made")}
    distributions = metadata.packages_distributions()
    names = sorted({name for module in modules for name in distributions.get(module, ())})
    return {"Python": platform.python_version(), **{name: metadata.version(name) for name in names}}


if __name__ == "__main__":
    main()
