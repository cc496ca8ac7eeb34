"""The command line, with real runs of a loader whose samples take a millisecond."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from typer.testing import CliRunner, Result

from asyncloader.cli.app import app
from asyncloader.cli.doctor import copies, crew, library_threads, start_method
from asyncloader.cli.measure import Run
from asyncloader.cli.report import Report
from asyncloader.cli.search import Search, choose
from asyncloader.cli.source import Source, find
from asyncloader.loader import DataLoader
from asyncloader.observe.verdict import Verdict
from tests.nursery import Program
from tests.test_num_workers import Stream

ROOT = Path(__file__).resolve().parents[2]
DIGITS = f"{ROOT / 'examples' / 'digits.py'}:make_loader"
MODULE = """
from torch.utils.data import DataLoader
from tests.loads import Load

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
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray may have been started on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command puts the folder of the user's module first."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.parametrize("digits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bench_compares_both_loaders(made: str, digits: bool) -> None:
    """Both sides ran, with figures that can be; ours is judged."""
    found = called_json("bench", DIGITS if digits else made, "--seconds", "0.3", "--rounds", "1")
    torchs, ours = found["sides"]
    assert (torchs[""], ours[""]) == ("torch", "asyncloader")
    for side in found["sides"]:
        assert side["batches/s"] > 0
        assert 0 <= side["waited %"] <= 100
        assert side["first batch ms"] > 1
        assert side["MB"] > 100
    assert ours["ratio"] == pytest.approx(ours["batches/s"] / torchs["batches/s"])
    assert found["verdict"]["limit"] in LIMITS


def test_tune_prints_the_line_to_paste(made: str, run: Callable[..., Program], tmp_path: Path) -> None:
    """What was tried, which is best, the line, what limits it, a picture; as plain text, for this is no terminal."""
    picture = tmp_path / "tune.png"
    done = run(COMMAND, "tune", made, "--seconds", "0.3", "--max-workers", "1", "--picture", picture)
    lines = done.out.splitlines()
    assert done.returncode == 0, done.explain("")
    assert lines[0] == "medians of 3 runs of 0.3 s, taking turns; * is what to take"
    assert re.match(r"  options +batches/s +low +high +waited % +first batch ms +MB", lines[1])
    assert re.match(r"  num_workers=0 +[\d.]+ .*", lines[2])
    found = [line for line in lines if line.startswith("DataLoader(")]
    if not any(line.startswith("No num_workers stands out: 0 and 1 were") for line in lines):
        assert re.fullmatch(r"DataLoader\(\.\.\., num_workers=[01](, prefetch_factor=\d)?\)", "".join(found))
        assert any(line.startswith("What limits it now: ") for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in done.out


def test_tune_keeps_to_its_memory(made: str) -> None:
    """Where nothing fits it says so."""
    found = called_json("tune", made, "--seconds", "0.1", "--max-workers", "0", "--memory-gb", "0.01")
    assert [row[""] for row in found["tried"]] == ["too much memory"]
    assert found["line"] == {}


@pytest.mark.parametrize(
    ("rates", "value", "rivals"),
    [
        ({0: [10, 10, 10], 1: [20, 21, 19], 2: [20, 20, 20]}, 1, []),
        ({0: [10, 10, 10], 1: [20, 21, 19], 2: [30, 31, 29]}, 2, []),
        ({0: [10, 10, 10], 1: [10, 10.1, 10.2]}, 0, []),  # more workers bring less than 5 %
        ({0: [10, 10, 10], 1: [12, 9, 12]}, None, [0, 1]),  # the rounds do not agree
        ({0: [10, 20, 30], 1: [20, 40, 60]}, 1, []),  # the rounds differ, and agree in this
        ({0: [10, 10, 10], 1: [20, 20, 20], 2: [24, 19, 24]}, None, [1, 2]),
        ({0: [10, 10, 10], 1: [9, 9, 9], 2: [11, 11, 11]}, 2, []),
        ({0: [10]}, 0, []),
        ({0: [10], 1: [20]}, 1, []),
    ],
    ids=str,
)
def test_what_stands_out(rates: dict[int, list[float]], value: int | None, rivals: list[int]) -> None:
    """The cheapest that no other is ahead of in every round; none where the rounds do not agree."""
    choice = choose(rates)
    assert choice.value == value
    assert sorted(choice.rivals) == rivals


class Scripted(Search):
    """Runs whose rates are given, one after the other."""

    def __init__(self, rates: dict[int, list[float]], **verdict: Any) -> None:
        super().__init__(Source(DataLoader([1]), None), Report(True), seconds=1.0, memory_bytes=1e12)  # type: ignore[arg-type]
        self.rates = {value: iter(each) for value, each in rates.items()}
        self.stats = types.SimpleNamespace(verdict=Verdict("fetch", "more would help", verdict, 2.0))
        self.order: list[int] = []

    def _run(self, options: dict[str, Any]) -> Run:
        value = options["num_workers"]
        self.order.append(value)
        rate = next(self.rates[value])
        return Run(int(100 * rate), 100.0, 0.1, 50.0, 1.0, 0, self.stats)  # type: ignore[arg-type]


def test_tune_takes_turns_and_does_not_contradict_itself() -> None:
    """Round by round; what the verdict advises and was tried without gain is not advised."""
    search = Scripted({0: [10, 10, 10], 1: [20, 20, 20], 2: [20, 20, 20], 3: [20, 20, 20]}, num_workers=2)
    search.along("num_workers", [0, 1, 2, 3], lambda word: None)
    assert search.order == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert search.best is not None
    assert search.best[0] == {"num_workers": 1}
    found = search.limit()
    assert found is not None
    assert "num_workers=2 would be the next thing to try, and was tried: it is no faster here" in found[0]
    assert found[1].advice == {}
    assert [row[""] for row in search.rows] == ["", "*", "", ""]
    search = Scripted({0: [10, 10, 10], 1: [20, 20, 20]}, num_workers=4)
    search.along("num_workers", [0, 1], lambda word: None)
    assert search.limit() == ("What limits it now: more would help", search.stats.verdict)


def test_tune_names_nothing_where_nothing_stands_out() -> None:
    """Five runs on a busy machine chose 0, 0, 2, 0 and 1 workers; it says what was ahead when."""
    search = Scripted({0: [10, 12, 10], 1: [12, 10, 12], 2: [9, 9, 9]})
    search.along("num_workers", [0, 1, 2], lambda word: None)
    assert search.best is None
    assert search.undecided == {"num_workers": [0, 1]}


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
    done = run(
        COMMAND, "bench", path, "--size", "400", f"--method={method}", "--rounds", "1", "--seconds", "0.2", "--json"
    )
    assert done.returncode == 0, done.explain("")
    assert re.search(r"steps of [2-9]\.?\d* ms, as .*train.py takes, in place of its own", done.err)
    assert [side[""] for side in json.loads(done.out)["sides"]] == ["torch", "asyncloader"]
    done = run(COMMAND, "trace", path, "-o", tmp_path / "run.json", "--batches", "5", "--", "--size", "400")
    assert (tmp_path / "run.html").exists(), done.explain("")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "400", "--bad", "90"], "asyncloader bench: ValueError: a bad photo"),
        (["--size", "none"], "ended without reading from a loader"),
        (["--size"], "ended without reading from a loader"),
    ],
)
def test_errors_of_a_script_are_one_line(
    arguments: list[str], words: str, run: Callable[..., Program], tmp_path: Path
) -> None:
    """And no traceback of the command's inside."""
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    done = run(COMMAND, "bench", path, "--rounds", "1", "--seconds", "0.2", *arguments)
    assert done.returncode in (1, 2)
    assert words in " ".join(re.sub("[│╭╮╰╯─]", " ", done.err).split())
    assert "Traceback" not in done.err


def test_an_error_of_a_script_before_it_reads_is_one_line(run: Callable[..., Program], tmp_path: Path) -> None:
    """It names the line of the script."""
    path = tmp_path / "train.py"
    path.write_text("1 / 0")
    done = run(COMMAND, "bench", path)
    assert done.err == "asyncloader bench: ZeroDivisionError: division by zero (train.py, line 1)\n"


def test_arguments_are_for_scripts(made: str) -> None:
    """An option that is spelt wrong is not passed over."""
    done = call("bench", made, "--round", "1")
    assert done.exit_code == 2
    assert "arguments are for a script, not for a function: --round 1" in " ".join(
        re.sub("[│╭╮╰╯─]", " ", done.output).split()
    )


def test_trace_of_a_loader(made: str, tmp_path: Path) -> None:
    """A run of the user's loader as a timeline and as a page; of a timeline that is there, the page alone."""
    path = tmp_path / "run.json"
    found = called_json("trace", made, "--batches", "5", "-o", path)
    assert found["trace"] == str(path)
    assert "<!doctype html>" in Path(found["page"]).read_text()
    names = [event["name"] for event in json.loads(path.read_text())]
    assert names.count("take") == 6
    assert called_json("trace", path) == {"page": str(tmp_path / "run.html")}


def test_doctor_looks_at_this_machine() -> None:
    """Each check has a finding; workers could be started."""
    done = call("doctor", "--json")
    findings = {row["what"]: row for row in json.loads(done.stdout)["findings"]}
    assert list(findings) == [
        *("versions", "cores", "torch threads", "memory", "/dev/shm", "descriptors", "processes", "start method"),
        *("library threads", "pinned memory", "workers", "Ray"),
    ]
    assert findings["workers"]["found"].startswith("2 started and delivered")
    assert done.exit_code == any(row[""] == "bad" for row in findings.values())
    assert "workers" in call("doctor").stdout


@pytest.mark.parametrize(("method", "is_advised"), [("fork", True), ("forkserver", False)])
def test_the_doctor_lists_libraries_with_threads(
    method: str, is_advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked workers lack these threads; what a program of theirs does by itself is not called bad."""
    monkeypatch.setitem(sys.modules, "polars", types.ModuleType("polars"))
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: method)
    finding = library_threads()
    assert "polars" in finding.found
    assert ("forkserver" in finding.advice) == is_advised
    assert not finding.is_bad


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


def test_without_the_extra_it_says_so(run: Callable[..., Program]) -> None:
    """The command is installed with the package; what it needs is not."""
    done = run(f"import sys; sys.modules['typer'] = None\n{COMMAND}")
    assert (done.returncode, done.err) == (1, "The command line needs typer: pip install 'asyncloader[cli]'\n")


def test_a_file_with_a_colon_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is there or not; what is there is a file whatever it is called."""
    monkeypatch.chdir(tmp_path)
    events = [{"ph": "X", "tid": 1, "ts": 0, "dur": 1, "name": "train", "args": {}}]
    for name in ("run-12:30.json", "run:12"):
        Path(name).write_text(json.dumps(events))
        assert called_json("trace", name) == {"page": str(Path(name).with_suffix(".html"))}
    done = call("trace", "run-12:31.json")
    assert done.exit_code == 2
    assert "No such file" in done.output


def test_a_file_that_is_not_there_is_named() -> None:
    """Not the module of its name."""
    with pytest.raises(ValueError, match=r"there is no file 'nope\.py' \(looked for in "):
        find("nope.py:make")


@pytest.mark.parametrize("name", [":f", ".:f", "..a:f", " :f", "a b:f", "missing.py:f", "json.py:f", "a..b:f"])
def test_what_names_no_function_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A module of another name is not taken in the place of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("def f(): ...")
    with pytest.raises(ValueError, match=r"cannot be imported|cannot import|there is no file"):
        find(name)


SCRIPT = """
import sys
import torch
from {package} import DataLoader

class Photos(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [{{"path": f"{{number:08}}.jpg", "box": [number, 0.5]}} for number in range({count})]
        self.names = {{str(number): f"{{number}} " * 20 for number in range({count})}}
        self.few = [1, 2, 3]
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return self.rows[index]

print("args", sys.argv[1:])
if __name__ == "__main__":
    loader = DataLoader(torch.utils.data.Subset(Photos(), range(10)), num_workers=4, multiprocessing_context="{how}")
    try:
        for batch in loader:
            print("not to be seen")
    except Exception:
        print("nor this")
"""


@pytest.mark.parametrize(("package", "how"), [("torch.utils.data", "fork"), ("asyncloader", "spawn")])
def test_doctor_finds_what_workers_will_copy(
    run: Callable[..., Program], tmp_path: Path, package: str, how: str
) -> None:
    """A script is run until it reads from its loader; lists and dicts are told with their cost and what to write."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(package=package, how=how, count=60_000))
    done = run(COMMAND, "doctor", path, "--json", "--", "fast", "--size=3")
    report = json.loads(done.out)
    assert "args ['fast', '--size=3']" in done.err
    assert "not to be seen" not in done.err
    findings = {row["what"]: row["found"] for row in report["findings"][12:]}
    assert sorted(findings) == ["Photos.names", "Photos.rows"]
    rows = re.fullmatch(r"list of 60,000, (\d+) MB; (\d+) MB more with 4 workers \((\w+)\)", findings["Photos.rows"])
    assert rows is not None
    assert 15 < int(rows[1]) < 40
    assert 3 * int(rows[1]) < int(rows[2]) < 5 * int(rows[1])
    assert rows[3] == how
    advice = report["advice: Photos.rows"]
    assert advice.startswith("from asyncloader import SharedList; self.rows = SharedList(self.rows) in Photos: ")
    assert int(re.search(r"(\d+) MB, once", advice)[1]) <= 5
    assert "self.names = SharedDict(self.names) in Photos" in report["advice: Photos.names"]


def test_doctor_says_when_there_is_nothing_to_copy(run: Callable[..., Program], tmp_path: Path) -> None:
    """Small lists are none of its business; a script that reads from no loader is an error of the command line."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(package="asyncloader", how="fork", count=50))
    done = run(COMMAND, "doctor", path)
    assert re.search(r"ok +dataset +holds no large list or dict", done.out), done.explain("")
    path.write_text("print('nothing')")
    done = run(COMMAND, "doctor", path)
    assert done.returncode == 2
    assert "ended without reading from a loader" in " ".join(re.sub("[│╭╮╰╯─]", " ", done.err).split())


def test_doctor_knows_how_many_workers_there_may_be() -> None:
    """Where their number looks after itself, and what they may take."""
    auto: Any = DataLoader(range(8), num_workers="auto", max_workers=5)  # type: ignore[arg-type]
    assert [tuple(one) for one in crew(auto)] == [
        ("num_workers", '"auto": 2 to begin with, up to 5 that compute, 5 that mostly wait', "", False)
    ]
    bound: Any = DataLoader(range(8), num_workers=2, max_worker_memory=1 << 30)  # type: ignore[arg-type]
    assert [one.found for one in crew(bound)] == ["1 GiB in each, 2 GiB in all workers"]
    large: Any = DataLoader(range(8), num_workers=2, max_worker_memory=1 << 50)  # type: ignore[arg-type]
    (finding,) = crew(large)
    assert finding.is_bad
    assert "GiB are left: at most " in finding.advice
    assert list(crew(torch.utils.data.DataLoader([1], num_workers=2))) == []
    rows = [{"row": number} for number in range(100_000)]
    (found,) = (one.found for one in copies(DataLoader(rows, num_workers="auto", max_workers=7)))  # type: ignore[arg-type]
    assert "with 7 workers" in found


def test_tune_leaves_a_loader_to_itself_as_well(made: str) -> None:
    """With what it came to, beside the rest; not where batches depend on who makes them."""
    search = Search(find(made), Report(True), seconds=0.05, memory_bytes=1e12)
    assert search.by_itself(2, print) == ""
    search.best = {"num_workers": 1}, Run(10, 1.0, 0.1, 0.5, 0.0, 0, None)
    assert re.match(r'num_workers="auto" came to [12] by itself, and to \d+% of that', search.by_itself(2, print))
    assert [row["options"] for row in search.rows] == ["num_workers=auto, max_workers=2"]
    stream: Any = Search(Source(DataLoader(Stream()), None), Report(True), seconds=0.05, memory_bytes=1e12)
    stream.best = search.best
    assert stream.by_itself(2, print) == ""


@pytest.mark.parametrize(("method", "is_bad"), [("fork", True), ("forkserver", False)])
def test_the_doctor_looks_for_cuda_beside_fork(method: str, is_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers of such a trainer cannot use CUDA. There is no GPU here: torch's answer is patched."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: method)
    found = start_method()
    assert found.is_bad is is_bad
    assert ("forkserver" in found.advice) is is_bad
