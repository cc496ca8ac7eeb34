"""The command line, with real runs of a loader whose samples take a millisecond."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
import torch.utils.data
from typer import BadParameter
from typer.testing import CliRunner, Result

from asyncloader.cli import measure, selftest
from asyncloader.cli.app import app
from asyncloader.cli.bench import candidates, choose
from asyncloader.cli.source import Source, find
from asyncloader.loader import DataLoader
from asyncloader.online import Feed
from tests.support.nursery import Program
from tests.test_num_workers import Stream

ROOT = Path(__file__).resolve().parents[2]
DIGITS = f"{ROOT / 'examples' / 'digits.py'}:make_loader"
MODULE = """
from torch.utils.data import DataLoader
from tests.support.loads import Load

def make():
    return DataLoader(Load(100_000, 0.001), batch_size=4, num_workers=1), len

def numbers():
    return [1, 2]
"""
COMMAND = "from asyncloader.cli import main\nmain()"
LIMITS = ("unknown", "starting", "training", "fetch", "collate", "transfer", "network", "pin", "order", "overhead")


def call(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def called_json(*arguments: str | Path) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def made(tmp_path: Path) -> Iterator[str]:
    """A function that makes a loader, as commands are given it; it imports little, unlike the example."""
    path = tmp_path / "made_for_test.py"
    path.write_text(MODULE)
    yield f"{path}:make"
    sys.modules.pop(path.stem, None)


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command puts the folder of the user's module first."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.parametrize("digits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bench_compares_both_loaders(made: str, digits: bool) -> None:
    """Both sides ran, with figures that can be; ours is judged."""
    found = called_json("bench", DIGITS if digits else made, "--seconds", "0.3", "--rounds", "1")
    torchs, ours, *_ = found["sides"]
    assert (torchs[""], ours[""]) == ("torch", "asyncloader")
    for side in found["sides"]:
        assert side["batches/s"] > 0
        assert 0 <= side["waited %"] <= 100
        assert side["first batch ms"] > 1
    assert ours["ratio"] == pytest.approx(ours["batches/s"] / torchs["batches/s"])
    assert found["verdict"]["limit"] in LIMITS


def test_bench_names_the_best_of_what_it_tried(made: str, run: Callable[..., Program]) -> None:
    """As plain text, for this is no terminal: a line for each choice, and the one to take, or that none stands out."""
    done = run(COMMAND, "bench", made, "--seconds", "0.3", "--rounds", "2")
    lines = done.out.splitlines()
    assert done.returncode == 0, done.explain("")
    assert lines[0] == "medians of 2 runs of 0.3 s, taking turns; ratio to torch in the same round"
    assert re.match(r" +batches/s +low +high +ratio +waited % +first batch ms +CPU ms/batch", lines[1])
    tried = {line.strip().split("  ")[0] for line in lines[2:] if line.startswith(" ")}
    assert {"torch", "asyncloader"} < tried <= {"torch", "asyncloader", *candidates(find(made))}
    recommended = [line.partition("of what was tried: ")[2] for line in lines if "of what was tried" in line]
    undecided = [line for line in lines if line.startswith("Nothing stands out: ")]
    assert len(recommended) + len(undecided) == 1
    assert all(line.removeprefix("DataLoader(..., ").removesuffix(")") in tried for line in recommended)
    assert "\x1b" not in done.out


def test_streams_are_not_tried_with_other_workers() -> None:
    """Their batches depend on who makes them."""
    assert candidates(Source(DataLoader(Stream()), None)) == {}
    names = list(candidates(Source(DataLoader([1]), None)))  # type: ignore[arg-type]
    assert names[:2] == ["num_workers=0", "num_workers=1"]
    assert names[-1].endswith("worker_backend='thread'")


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({"0": [10, 10, 10], "1": [20, 21, 19], "2": [20, 20, 20]}, ["1"]),
        ({"0": [10, 10, 10], "1": [20, 21, 19], "2": [30, 31, 29]}, ["2"]),
        ({"0": [10, 10, 10], "1": [10, 10.1, 10.2]}, ["0"]),  # more workers bring less than 5 %
        ({"0": [10, 10, 10], "1": [12, 9, 12]}, ["0", "1"]),  # the rounds do not agree
        ({"0": [10, 20, 30], "1": [20, 40, 60]}, ["1"]),  # the rounds differ, and agree in this
        ({"0": [10, 10, 10], "1": [20, 20, 20], "2": [24, 19, 24]}, ["1", "2"]),
        ({"0": [10, 10, 10], "1": [9, 9, 9], "2": [11, 11, 11]}, ["2"]),
        ({"0": [10]}, ["0"]),
        ({"0": [10], "1": [20]}, ["1"]),
    ],
    ids=str,
)
def test_what_stands_out(rates: dict[str, list[float]], best: list[str]) -> None:
    """The cheapest that no other is ahead of in every round; several where the rounds do not agree."""
    assert sorted(choose(rates)) == best


TRAINING = """
import argparse, time, torch
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __init__(self, size, bad): self.size, self.bad = size, bad
    def __len__(self): return self.size
    def __getitem__(self, index):
        if index == self.bad: raise ValueError("a bad photo")
        return torch.zeros(3)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    parser.add_argument("--bad", type=int, default=-1)
    parser.add_argument("--method", default="fork")
    options = parser.parse_args()
    loader = DataLoader(
        Photos(options.size, options.bad), 4, num_workers=1, multiprocessing_context=options.method
    )
    for epoch in range(100):
        for batch in loader:
            time.sleep(0.002)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_script_is_measured_as_it_is(method: str, run: Callable[..., Program], tmp_path: Path) -> None:
    """With its arguments, and steps as long as its own; workers that are not forked find its classes."""
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    of_script = ("--size", "400", f"--method={method}")
    if method == "fork":
        done = run(COMMAND, "bench", path, *of_script, "--rounds", "1", "--seconds", "0.2", "--json")
        assert [side[""] for side in json.loads(done.out)["sides"]][:2] == ["torch", "asyncloader"]
    else:
        done = run(COMMAND, "trace", path, "-o", tmp_path / "run.json", "--batches", "5", "--", *of_script)
        assert (tmp_path / "run.json").exists(), done.explain("")
    assert done.returncode == 0, done.explain("")
    assert re.search(r"steps of [2-9]\.?\d* ms, as .*train.py takes, in place of its own", done.err)


@pytest.mark.parametrize("arguments", [["--size", "none"], pytest.param(["--size"], marks=pytest.mark.slow)])
def test_a_script_that_reads_from_no_loader(arguments: list[str], run: Callable[..., Program], tmp_path: Path) -> None:
    """It is an error of the command line, without a traceback."""
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    done = run(COMMAND, "bench", path, "--rounds", "1", "--seconds", "0.2", *arguments)
    assert done.returncode == 2
    assert "ended without reading from a loader" in " ".join(re.sub("[│╭╮╰╯─]", " ", done.err).split())
    assert "Traceback" not in done.err


def test_errors_of_the_user_are_shown_as_such(run: Callable[..., Program], tmp_path: Path) -> None:
    """With their class and the user's frames: of the script, of the function, of the dataset; and none of ours."""
    path = tmp_path / "train.py"
    path.write_text("def make():\n    raise ValueError('not made')\n1 / 0")
    done = run(COMMAND, "bench", path)
    assert done.returncode == 1
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert ", line 3, in <module>\n    1 / 0\n" in done.err
    assert done.err.endswith("ZeroDivisionError: division by zero\n")
    path.write_text("def make():\n    raise ValueError('not made')")
    done = run(COMMAND, "trace", f"{path}:make", "-o", tmp_path / "run.json")
    assert done.returncode == 1
    assert done.err.endswith("ValueError: not made\n")
    path.write_text(TRAINING)
    of_torch = ("bench", path, "--rounds", "1", "--seconds", "0.2", "--size", "400", "--bad", "0")
    of_ours = ("trace", path, "-o", tmp_path / "run.json", "--", "--size", "400", "--bad", "200")
    for arguments in (of_torch, of_ours):  # a worker raises it
        done = run(COMMAND, *arguments)
        assert done.returncode == 1
        assert f'{path}", line 9, in __getitem__' in done.err
        assert "ValueError: a bad photo" in done.err
        assert str(ROOT / "asyncloader" / "cli") not in done.err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
def test_numbers_are_checked(made: str, seconds: str) -> None:
    """Before anything is run."""
    done = call("bench", made, "--seconds", seconds)
    assert done.exit_code == 2
    assert "should be a number above 0" in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def test_a_timeline_that_cannot_be_written_is_refused_first(made: str, tmp_path: Path) -> None:
    """And not after the loader was run."""
    done = call("trace", "no_such_module:make", "--output", tmp_path / "nowhere" / "run.json")
    assert done.exit_code == 2
    assert "the timeline cannot be written" in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


OUTPUTS = {
    "full": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "closed": "import os; reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)",
}


@pytest.mark.interpreter
@pytest.mark.covering(1)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "arguments", [["doctor"], pytest.param(["doctor", "--json"], marks=pytest.mark.slow), ["--help"]]
)
def test_output_that_cannot_be_written(run: Callable[..., Program], arguments: list[str], output: str) -> None:
    """A full disk, and a pipe whose reader has gone: one line at most, and a status."""
    done = run(f"{OUTPUTS[output]}\n{COMMAND}", *arguments)
    assert done.returncode == 1, done.explain("")
    assert "Traceback" not in done.err
    if output == "full":
        assert done.err.splitlines()[-1:] == ["asyncloader: the output cannot be written: No space left on device"]


ASYNC_TRAINING = """
import asyncio
from asyncloader import DataLoader

async def train():
    async for batch in DataLoader(list(range(400)), 4, num_workers=1):
        await asyncio.sleep(0.004)

if __name__ == "__main__":
    asyncio.run(train())
"""


def test_steps_of_an_async_script_are_timed(run: Callable[..., Program], tmp_path: Path) -> None:
    """As those of others."""
    path = tmp_path / "train.py"
    path.write_text(ASYNC_TRAINING)
    done = run(COMMAND, "trace", path, "-o", tmp_path / "run.json", "--batches", "5")
    assert done.returncode == 0, done.explain("")
    (steps,) = re.findall(r"steps of ([\d.]+) ms, as .*train.py takes, in place of its own", done.err)
    assert float(steps) >= 4


class Spins(torch.utils.data.Dataset[int]):
    """Takes 5 ms of CPU time."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        until = process_time() + 0.005
        while process_time() < until:
            pass
        return index


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, DataLoader])
def test_cpu_time_of_workers_that_are_kept_counts(kind: Any) -> None:
    """They are alive when the run is over."""
    loader = kind(Spins(), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    seen = measure.run(loader, None, seconds=0.5)
    assert seen.cpu_s / (seen.batches + 1) > 0.008


def test_a_feed_without_producers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""
    monkeypatch.setattr(measure, "LONGEST_WAIT_S", 0.5)
    feed: Feed[int] = Feed(batch_size=1)
    with pytest.raises(RuntimeError, match=r"no batch came for 0.5 s"):
        measure.run(DataLoader(feed), None, seconds=1)
    feed.close()


def test_arguments_are_for_scripts(made: str) -> None:
    """An option that is spelt wrong is not passed over."""
    done = call("bench", made, "--round", "1")
    assert done.exit_code == 2
    assert "arguments are for a script, not for a function: --round 1" in " ".join(
        re.sub("[│╭╮╰╯─]", " ", done.output).split()
    )


def test_trace_of_a_loader(made: str, tmp_path: Path) -> None:
    """A run of the user's loader as a timeline."""
    path = tmp_path / "run.json"
    found = called_json("trace", made, "--batches", "5", "-o", path)
    assert found["trace"] == str(path)
    names = [event["name"] for event in json.loads(path.read_text())]
    assert names.count("take") == 6


def test_doctor_looks_at_this_machine() -> None:
    """Each check has a finding; workers could be started."""
    done = call("doctor", "--json")
    findings = {row["what"]: row for row in json.loads(done.stdout)["findings"]}
    assert list(findings) == [
        *("versions", "cores", "torch threads", "memory", "descriptors", "workers"),
    ]
    assert findings["workers"]["found"].startswith("2 started by ")
    assert done.exit_code == any(row[""] == "bad" for row in findings.values())
    assert "workers" in call("doctor").stdout


DOCTOR_IN_NEED = """
import resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
torch.set_num_threads(64)
from asyncloader.cli import main
main()
"""


def test_doctor_finds_what_is_wrong(run: Callable[..., Program]) -> None:
    """Too few descriptors and too many threads are found, with what to do about them, and the exit code says so."""
    done = run(DOCTOR_IN_NEED, "doctor")
    assert done.returncode == 1, done.explain("")
    assert re.search(r"bad +torch threads +64", done.out)
    assert re.search(r"bad +descriptors +100 at most", done.out)
    assert "descriptors: ulimit -n 100" in done.out or "descriptors: ulimit -n 4096" in done.out
    assert "Set OMP_NUM_THREADS=" in done.out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("digits", "should be module:function"),
        ("no_such_module:make", "cannot import"),
        ("{file}:nothing", "has no 'nothing'"),
        ("{file}:numbers", "made list, not a DataLoader"),
    ],
)
def test_a_target_that_cannot_be(made: str, target: str, words: str) -> None:
    """A misspelled target is an error of the command line's, in one sentence."""
    done = call("bench", target.format(file=made.removesuffix(":make")))
    assert done.exit_code == 2
    assert words in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def test_loaders_of_all_kinds_are_made_anew() -> None:
    """Samplers, batch samplers, no batching, iterable datasets and our options come through."""
    import torch.utils.data as data

    numbers: Any = list(range(20))

    class Stream(data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(numbers)

    sampler = data.BatchSampler(range(20), 7, False)
    for loader, first in (
        (DataLoader(numbers, 4, drop_last=True, max_buffered_bytes=0), [0, 1, 2, 3]),
        (data.DataLoader(numbers, batch_sampler=type("Mine", (data.BatchSampler,), {})(range(20), 3, True)), [0, 1, 2]),
        (data.DataLoader(numbers, batch_sampler=sampler), [0, 1, 2, 3, 4, 5, 6]),
        (data.DataLoader(numbers, None), 0),
        (data.DataLoader(Stream(), 5), [0, 1, 2, 3, 4]),
    ):
        numbered = type("Made", (), {"loader": loader})
        sys.modules["made_for_test"] = numbered  # type: ignore[assignment]
        made = find("made_for_test:loader").make(DataLoader, num_workers=0)
        batch = next(iter(made))
        assert (batch if isinstance(batch, int) else batch.tolist()) == first
        assert made.max_buffered_bytes == getattr(loader, "max_buffered_bytes", made.max_buffered_bytes)
    del sys.modules["made_for_test"]


WITHOUT_THE_EXTRA = "import sys; sys.modules.update(typer=None, rich=None, psutil=None)\n"
FORK_ONLY = "import multiprocessing; multiprocessing.get_all_start_methods = lambda: ['fork']\n"
PROMISES = ["order", "kill", "resume", "async for", "shared memory"]


def test_without_the_extra_it_says_so(run: Callable[..., Program]) -> None:
    """The command is installed with the package; what it needs is not."""
    done = run(WITHOUT_THE_EXTRA + COMMAND)
    assert (done.returncode, done.err) == (1, "The command line needs typer: pip install 'asyncloader[cli]'\n")


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_selftest_needs_no_extra(run: Callable[..., Program], forked: bool) -> None:
    """Every promise is kept here, by workers that are started in every way that there is."""
    guarded = COMMAND.replace("main()", 'if __name__ == "__main__": main()')
    done = run(WITHOUT_THE_EXTRA + FORK_ONLY * forked + guarded, "doctor", "--selftest", "--json", timeout_s=60)
    assert (done.returncode, done.err) == (0, ""), done.explain("")
    found = json.loads(done.out)
    assert found["ok"]
    starts = ["fork"] if forked else ["fork", "spawn", "forkserver"]
    assert list(found["checks"]) == [*(f"start by {name}" for name in starts), *PROMISES]
    assert {check["result"] for check in found["checks"].values()} == {"ok"}


def test_the_selftest_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches that differ and errors are told, by the promise that they break; the exit code says so."""
    monkeypatch.setattr(selftest, "_starts", dict)
    batch = [torch.tensor([1]), torch.tensor([0.5])]
    monkeypatch.setattr(selftest, "_loader", lambda *dataset, **options: [batch] * (1 + bool(options)))
    assert not selftest.selftest(as_json=False)
    about, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith("asyncloader ")
    told = {line[:20].strip(): line[29:].strip() for line in lines}
    assert list(told) == PROMISES
    assert told["kill"] == "batches differ"
    assert told["resume"].startswith("TypeError: ")


def test_a_file_that_is_not_there_is_named() -> None:
    """Not the module of its name."""
    with pytest.raises(BadParameter, match=r"there is no file 'nope\.py' \(looked for in "):
        find("nope.py:make")


@pytest.mark.parametrize("name", [":f", ".:f", "..a:f", " :f", "a b:f", "missing.py:f", "json.py:f", "a..b:f"])
def test_what_names_no_function_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A module of another name is not taken in the place of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("def f(): ...")
    with pytest.raises(BadParameter, match=r"cannot be imported|cannot import|there is no file"):
        find(name)
