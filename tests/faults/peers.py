"""What happens when something goes wrong, in our loader and in others: measured, for the table in docs/faults.md.

    python -m tests.faults.peers             # print the table
    python -m tests.faults.peers --write     # and put it into docs/faults.md

Each cell is a program of its own: an epoch of 16 batches of 4 with two forked workers, in which one thing happens at
sample 30, or to the program. It has 20 s; a program that is not done by then hangs. After three errors it stops.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch.utils.data
from torch.utils.data import Dataset

PAGE = Path(__file__).parents[2] / "docs/faults.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
BATCHES = 16
BATCH_SIZE = 4
FATAL = 30  # the sample at which it happens, in batch 7
LIMIT_S = 20.0
MOST_ERRORS = 3
GONE_S = 10.0
WANTED = [list(range(i, i + BATCH_SIZE)) for i in range(0, BATCHES * BATCH_SIZE, BATCH_SIZE)]


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise ValueError("a bad sample")


IN_A_SAMPLE: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(0),
    "hang": _hang,
    "raise": _raise,
    "always killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}

SITUATIONS = {
    "killed": "A worker is killed (SIGKILL, the out-of-memory killer)",
    "segmentation fault": "A native library crashes in a worker",
    "exit": "A worker calls `os._exit(0)`",
    "always killed": "A sample kills every worker that reads it",
    "hang": "A sample hangs; `timeout=1`",
    "raise": "A sample raises",
    "skip": "A sample raises, and may be skipped",
    "break": "The loop is left after one batch: seconds until the workers are gone",
    "trainer killed": "The trainer is killed (SIGKILL) while a worker is in a long sample: workers left after 2 s",
    "interrupt": "Ctrl-C while a sample hangs: seconds until the program has ended",
}


class Case(Dataset[int]):
    """Numbers; something happens at sample FATAL, once or each time.

    Args:
        what: One of IN_A_SAMPLE, or anything else for nothing.
        flag: A file that is made when it happens.
    """

    def __init__(self, what: str, flag: str) -> None:
        self.what = what
        self.flag = flag

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> int:
        what = {"skip": "raise", "trainer killed": "hang", "interrupt": "hang"}.get(self.what, self.what)
        if index == FATAL and what in IN_A_SAMPLE and self._may_happen():
            IN_A_SAMPLE[what]()
        return index

    def _may_happen(self) -> bool:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            return True
        return self.what in ("always killed", "raise", "skip")


# ------------------------------------------------------------------------------------------------------- the loaders


def ours(dataset: Dataset[int], what: str) -> Iterable[Any]:
    """asyncloader's, with the option for the situation where there is one."""
    from asyncloader import DataLoader

    options: dict[str, Any] = {"hang": {"timeout": 1, "on_timeout": "retry"}, "skip": {"on_error": "skip"}}
    return DataLoader(dataset, BATCH_SIZE, num_workers=2, **options.get(what, {}))


def torchs(dataset: Dataset[int], what: str) -> Iterable[Any]:
    """torch's own."""
    return torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=2, timeout=what == "hang")


def stateful(dataset: Dataset[int], what: str) -> Iterable[Any]:
    """torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH_SIZE, num_workers=2, timeout=what == "hang")


def spdls(dataset: Dataset[int], what: str) -> Iterable[Any]:
    """SPDL's loader with torch's interface."""
    from spdl.dataloader import get_pytorch_dataloader

    loader: Iterable[Any] = get_pytorch_dataloader(
        dataset, BATCH_SIZE, num_workers=2, timeout=1 if what == "hang" else None, in_order=True
    )
    return loader


def nodes(dataset: Dataset[int], what: str) -> Iterable[Any]:
    """torchdata.nodes."""
    import torchdata.nodes as tn

    keys = tn.Batcher(tn.SamplerWrapper(torch.utils.data.SequentialSampler(dataset)), BATCH_SIZE)  # type: ignore[arg-type]
    fetch = _Fetch(dataset)
    return tn.Loader(tn.ParallelMapper(keys, fetch, num_workers=2, method="process", multiprocessing_context="fork"))


class _Fetch:
    def __init__(self, dataset: Dataset[int]) -> None:
        self.dataset = dataset

    def __call__(self, keys: list[int]) -> torch.Tensor:
        return torch.tensor([self.dataset[key] for key in keys])


LOADERS = {
    "asyncloader": ours,
    "torch": torchs,
    "StatefulDataLoader": stateful,
    "SPDL": spdls,
    "torchdata.nodes": nodes,
}


# --------------------------------------------------------------------------------------------------- in the program


def program(name: str, what: str, flag: str) -> None:
    """Run one cell; print what happens, a line each, as it happens."""
    warnings.simplefilter("ignore")
    loader = LOADERS[name](Case(what, flag), what)
    iterator = iter(loader)
    errors = 0
    while errors < MOST_ERRORS:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            errors += 1
            say("error", type(error).__name__)
            continue
        say("batch", batch.tolist())
        if what == "break":
            children = psutil.Process().children(recursive=True)
            begun = time.perf_counter()
            del iterator, batch, loader
            psutil.wait_procs(children, timeout=GONE_S)
            say("seconds", time.perf_counter() - begun)
            return


def say(*event: Any) -> None:
    """Tell the parent."""
    print(json.dumps(event), flush=True)


# ----------------------------------------------------------------------------------------------------- in the parent


def cell(loader: str, what: str, folder: Path) -> str:
    """Run one cell and put into words what happened."""
    flag = folder / f"{loader} {what}"
    command = [sys.executable, "-m", "tests.faults.peers", "--program", loader, what, str(flag)]
    said = folder / f"{loader} {what}.out"
    with said.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
    try:
        if what in ("trainer killed", "interrupt"):
            return _disturb(process, what, flag)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        hung = process.poll() is None
    finally:
        _kill(process)
    return _words([json.loads(line) for line in said.read_text().splitlines()], hung)


def _kill(process: subprocess.Popen[bytes]) -> None:
    everybody = [*_descendants(process.pid), psutil.Process(process.pid)] if process.poll() is None else []
    for one in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _disturb(process: subprocess.Popen[bytes], what: str, flag: Path) -> str:
    """Kill or interrupt the trainer when a worker is in the sample that hangs, and it has nothing to take."""
    _wait_for(flag.exists)
    time.sleep(0.5)
    workers = _descendants(process.pid)
    begun = time.monotonic()
    process.send_signal(signal.SIGKILL if what == "trainer killed" else signal.SIGINT)
    if what == "trainer killed":
        process.wait()
        _, left = psutil.wait_procs(workers, timeout=2.0)
        words = f"{len(left)}" if left else "none"
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        seconds = time.monotonic() - begun
        words = f"{seconds:.1f} s" if seconds < LIMIT_S else "hangs"
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    return words


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _words(events: list[Any], hung: bool) -> str:
    seconds = [event[1] for event in events if event[0] == "seconds"]
    if seconds:
        return f"{seconds[0]:.2f} s" if seconds[0] < GONE_S else f"not in {GONE_S:.0f} s"
    batches = [event[1] for event in events if event[0] == "batch"]
    errors = [event[1] for event in events if event[0] == "error"]
    if sorted(batches) == WANTED:
        count = f"all {BATCHES} batches"
    elif list(itertools.chain(*batches)) == [i for i in range(BATCHES * BATCH_SIZE) if i != FATAL]:
        count = f"all {BATCHES} batches, one without the sample"
    else:
        count = f"{len(batches)} of {BATCHES} batches"
    parts = [f"`{errors[0]}`" + (f" {len(errors)} times" if len(errors) > 1 else "")] if errors else []
    if hung:
        parts.append("hangs")
    elif not errors and len(batches) < BATCHES:
        parts.append("ends as if all was well")
    return ", ".join([count, *parts])


def table(loaders: Iterable[str], situations: Iterable[str], folder: Path) -> Iterator[list[str]]:
    """Give the rows of the table, the words for what happens first."""
    for what in situations:
        yield [SITUATIONS[what], *(cell(loader, what, folder) for loader in loaders)]


def documented() -> dict[str, str]:
    """Read from the page what it says of our loader, by situation."""
    measured = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [[text.strip() for text in line.strip("|").split("|")] for line in measured.splitlines() if line[:1] == "|"]
    by_words = {row[0]: row[1] for row in rows[2:]}
    return {what: by_words[words] for what, words in SITUATIONS.items()}


def main() -> None:
    """Measure the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--program", nargs=3, metavar=("LOADER", "SITUATION", "FLAG"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        program(*args.program)
        return
    import tempfile

    names = f"torch {version('torch')}, torchdata {version('torchdata')}, spdl-core {version('spdl_core')}"
    lines = ["| " + " | ".join(["what happens", *LOADERS]) + " |", "|---" * (len(LOADERS) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for row in table(LOADERS, SITUATIONS, Path(folder)):
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    python = sys.version.split()[0]
    lines += ["", f"Measured with {names.replace('+cpu', '')}, Python {python}, Linux, two forked workers.", ""]
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + END + after)


if __name__ == "__main__":
    main()
