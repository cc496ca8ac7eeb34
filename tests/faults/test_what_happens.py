"""The suite of faults for any loader: what docs/faults.md says of ours is what happens, and what is bad is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncloader.testing import suite

ROOT = Path(__file__).parents[2]
OURS = "tests.faults.adapters:Ours"
MEASURED = {"break", "interrupt", "leak"}  # figures, and no words


def recorded() -> dict[str, dict[str, Any]]:
    """Return what `make compare-loaders` has seen, by case and adapter."""
    found: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "results" / "faults.json").read_text())["cases"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)  # fifteen programs, of which some wait for what hangs
def test_what_was_recorded_of_ours_is_true() -> None:
    """Each case, in a program of its own."""
    with ThreadPoolExecutor(2) as two_at_a_time:
        seen = dict(
            zip(suite.CASES, two_at_a_time.map(lambda case: suite.run_case(OURS, case), suite.CASES), strict=True)
        )
    for case, cells in recorded().items():
        assert seen[case]["verdict"] == cells[OURS]["verdict"], (case, seen[case])
        if case not in MEASURED:
            assert seen[case]["words"] == cells[OURS]["words"]


def test_the_page_has_what_was_recorded() -> None:
    """Every case in a line, with the words of each loader."""
    page = (ROOT / "docs" / "faults.md").read_text()
    assert list(recorded()) == list(suite.CASES)
    for case, cells in recorded().items():
        assert f"\n| {suite.CASES[case]} | {' | '.join(cell['words'] for cell in cells.values())} |\n" in page


EXACT, DRAWS, ONCE, REFUSED = (
    ["resumed", words] for words in ("to the bit", "other random numbers", "each once", "`ValueError`")
)


@pytest.mark.parametrize(
    ("case", "events", "seen", "verdict"),
    [
        ("killed", [["batch", list(range(64))]], {"status": 0}, ("good", "all 16 batches")),
        ("killed", [["batch", [0, 1]]], {"status": 0}, ("bad", "1 of 16 batches, ends as if all was well")),
        ("killed", [["batch", [0]], ["error", "E"]], {"status": 0}, ("loud", "1 of 16 batches, `E`")),
        ("killed", [["error", "E"], ["error", "E"]], {"hung": True}, ("loud", "0 of 16 batches, `E` 2 times, hangs")),
        ("killed", [["batch", [0]]], {"hung": True}, ("bad", "1 of 16 batches, hangs")),
        ("exit", [["batch", [0]]], {"status": 1}, ("loud", "1 of 16 batches")),
        ("skip", [["batch", [n for n in range(64) if n != 30]]], {"status": 0}, ("good", "all but the sample")),
        ("raise", [["batch", [n for n in range(64) if n != 30]]], {"status": 0}, ("bad", None)),
        ("killed", [["batch", [0, *range(64)]]], {"status": 0}, ("bad", None)),  # a sample twice
        ("break", [], {"seconds": None}, ("bad", "not in time")),
        ("break", [], {"seconds": 0.0, "late": True}, ("bad", "does not come so far")),
        ("trainer killed", [], {"left": 2}, ("bad", "2")),
        ("trainer killed", [], {"left": 0, "late": True}, ("bad", "does not come so far")),
        ("leak", [], {"most_mb": 900}, ("loud", "900 MB")),
        ("leak", [], {"most_mb": 201}, ("good", "201 MB")),  # ours on a busy machine: the batches that it had in hand
        ("leak", [["batch", [0]]], {"most_mb": 90, "hung": True}, ("bad", "1 of 16 batches, hangs")),
        ("resume", [], {"status": 1}, ("loud", "has no state, or refuses")),
        ("resume", [], {"hung": True}, ("bad", "hangs")),
        ("resume", [EXACT] * 17, {}, ("good", "17 of 17 to the bit")),
        ("resume", [EXACT] * 16, {"status": 1}, ("loud", "16 of 17 to the bit")),
        ("resume", [EXACT] * 3, {"hung": True}, ("bad", "3 of 17 to the bit, hangs")),
        ("resume", [EXACT, *[DRAWS] * 16], {}, ("loud", "16 of 17 other random numbers, 1 to the bit")),
        ("resume", [*[EXACT] * 16, ["resumed", "other samples"]], {}, ("bad", "16 of 17 to the bit, 1 other samples")),
        ("resume on fewer ranks", [ONCE] * 9, {}, ("good", "9 of 9 each once")),
        ("resume on more ranks", [*[ONCE] * 5, *[REFUSED] * 4], {}, ("loud", "5 of 9 each once, 4 `ValueError`")),
        ("resume on more ranks", [*[ONCE] * 8, ["resumed", "lost or repeated"]], {}, ("bad", None)),
    ],
)
def test_verdicts(case: str, events: list[Any], seen: dict[str, Any], verdict: tuple[str, str | None]) -> None:
    """What is missing in silence is bad, and so is a hang; an error that says so is not."""
    found = suite.judge(case, events, seen)
    assert found[0] == verdict[0]
    assert verdict[1] in (None, found[1])


@pytest.mark.slow
def test_an_adapter_that_makes_no_loader_is_no_verdict() -> None:
    """What a package that is missing would look like is not that a loader loses its batches."""
    with pytest.raises(RuntimeError, match=r"(?s)made no loader.*NotImplementedError"):
        suite.run_case("asyncloader.testing.suite:Adapter", "break")


PRINTS = """
from asyncloader.testing.suite import Adapter

class Prints(Adapter):
    def make(self, dataset, case, **options):
        print("[" * 100_000)
        return [[at + 0.5 for at in range(64)]]
"""


@pytest.mark.slow
def test_a_loader_may_print_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, and lines that are not the suite's."""
    (tmp_path / "printing.py").write_text(PRINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert suite.run_case("printing:Prints", "killed")["verdict"] == "good"


COUNTS = """
from asyncloader.testing.suite import Adapter

class Counts(Adapter):
    def make(self, dataset, case, *, num_workers=2, shuffle=False, rank=0, num_ranks=1):
        return [[first + each + 0.5 for each in range(4)] for first in range(4 * rank, 64, 4 * num_ranks)]

    def state(self, loader, iterator):
        return len(loader) - iterator.__length_hint__()

    def load(self, loader, state):
        return iter(loader[state:])

class Sums(Counts):
    def merge(self, states):
        return sum(states)

class Unranked(Counts):
    def make(self, dataset, case, *, num_workers=2, shuffle=False):
        return super().make(dataset, case)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "case", "verdict"),
    [
        ("Counts", "resume", ("good", "17 of 17 to the bit")),
        ("Counts", "resume on fewer ranks", ("bad", "8 of 9 lost or repeated, 1 each once")),
        ("Sums", "resume on fewer ranks", ("good", "9 of 9 each once")),
        ("Unranked", "resume on more ranks", ("loud", "has no state, or refuses")),
    ],
)
def test_states_that_count_the_batches_of_a_rank(
    adapter: str, case: str, verdict: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They serve as many ranks, and others if all ranks' are added up; with one rank's, samples come twice."""
    (tmp_path / "counting.py").write_text(COUNTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = suite.run_case(f"counting:{adapter}", case)
    assert (found["verdict"], found["words"]) == verdict


LOSES = """
from asyncloader.testing.suite import Adapter

class Loses(Adapter):
    def make(self, dataset, case, **options):
        return [[0.5, 1.5, 2.5, 3.5]]
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pytest_runs_the_suite_for_an_adapter(tmp_path: Path) -> None:
    """As a plug-in: what is loud passes, what is missing in silence fails."""
    (tmp_path / "mine.py").write_text(LOSES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "asyncloader.testing.plugin", "-p", "no:cacheprovider"]
    command += ["--pyargs", "asyncloader.testing.suite", "-k", "raise", "--loader", OURS, "--loader", "mine:Loses"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert "1 of 16 batches, ends as if all was well" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
