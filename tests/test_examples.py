"""Each example runs by itself, as a user starts it: in its own process, to its closing lines, without a warning."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import asyncloader
from tests.services.postgres import PLACES
from tests.services.process import program
from tests.support.programs import run_python

pytestmark = [pytest.mark.docs, pytest.mark.timeout(450)]  # several times as long beside other work

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the digits; the first example that needs them writes them there."""
    return tmp_path_factory.mktemp("examples") / "digits"


def run_example(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own."""
    return run_python(ROOT / "examples" / name, *arguments)


def closing_lines(done: subprocess.CompletedProcess[str], count: int) -> list[str]:
    """Return the last lines of what an example printed; see that it ended well, and warned of nothing."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()[-count:]


def test_the_demonstration_shows_what_it_says() -> None:
    """Weights are the same with either loader, after a death and after a resume; torch's loader ends at the death."""
    done = run_example("demo.py", "--epochs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"DataLoader worker \(pid \d+\) is killed .*\n", done.stderr)) == 1  # the log says so
    # When its worker dies, torch's loader may leave tracebacks there as well: of a file that its handler of SIGCHLD
    # kept it from closing, or of the thread with which its other worker shares tensors.
    assert str(Path(asyncloader.__file__).parent) not in done.stderr
    *_, waited, _, death, torchs, ours, resume, left, none = map(str.strip, filter(None, done.stdout.splitlines()))
    same = "The weights are the same, to the bit."
    assert re.fullmatch(rf"Training waited [\d.]+ s for torch's loader, [\d.]+ s for ours\. {same}", waited)
    assert death.startswith("2. One of two workers is killed")
    assert re.match(r"torch +\d+ of 24 batches, then \w+Error:", torchs)  # a connection's, if the worker was sending
    assert re.fullmatch(rf"asyncloader +24 of 24 batches\. {same}", ours)
    assert resume.startswith("3. A checkpoint after batch 10")
    assert re.fullmatch(rf"asyncloader +14 batches were left\. {same}", left)
    assert none.startswith("torch ")


def test_async_grpo_on_two_ranks_of_two_peers() -> None:
    """Each prompt is trained once, or dropped by name, or left alone at the end; no sample is older than the bound."""
    (line,) = closing_lines(run_example("train_grpo.py"), 1)
    found = re.fullmatch(r"0 kills, 0 restarts: (\d+) prompts trained once, (\d+) dropped, ([01]) left", line)
    assert found, line
    assert sum(map(int, found.groups())) == 120


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_async_grpo_loses_no_prompt_when_processes_are_killed() -> None:
    """Ten kills of producers and of processes of the training."""
    done = run_example("train_grpo.py", "--kills", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("10 kills, ")


def test_a_loop_like_torchtitans_resumes() -> None:
    """The losses of a training that was stopped are those of one that was not."""
    (line,) = closing_lines(run_example("train_titan_like.py"), 1)
    assert re.fullmatch(r"loss 4\.\d+ to 0\.\d+ in 12 steps; stopped after 7 and resumed: the same losses", line)


def test_train_digits_reports_accuracy_and_waiting(digits: Path) -> None:
    """Three epochs train, and the closing lines tell the accuracy and the time spent waiting for data."""
    done = run_example("train_digits.py", "--epochs", "3", "--min-accuracy", "0.6", "--data", digits)
    accuracy, waiting = closing_lines(done, 2)
    assert re.fullmatch(r"test accuracy \d+\.\d% after 3 epochs", accuracy)
    assert re.fullmatch(r"training took \d+\.\d s, \d+\.\d\d s of it \(\d+%\) waiting for data", waiting)
    assert len(list(digits.glob("*/*.png"))) == 1797


@pytest.mark.slow
def test_train_digits_fails_below_the_accuracy_asked_for(digits: Path) -> None:
    """One epoch does not reach 99 %, and the exit code says so."""
    done = run_example("train_digits.py", "--epochs", "1", "--min-accuracy", "0.99", "--data", digits, "--workers", "0")
    assert done.returncode == 1
    assert done.stderr == "test accuracy is below 99%\n"


@pytest.mark.slow
def test_train_digits_reaches_97_percent() -> None:
    """What `make demo` runs, as it runs it, reaches its accuracy, or exits with 1."""
    accuracy, _ = closing_lines(run_example("train_digits.py"), 2)
    assert float(accuracy.split()[2].rstrip("%")) >= 97


def test_train_async_answers_while_it_trains(digits: Path) -> None:
    """The endpoint is answered at many different steps, and every epoch leaves a checkpoint that can be loaded."""
    done = run_example("train_async.py", "--epochs", "3", "--min-accuracy", "0.6", "--data", digits)
    accuracy, answers = closing_lines(done, 2)
    assert re.fullmatch(r"test accuracy \d+\.\d% with the weights from the last of 3 checkpoints", accuracy)
    seen = re.fullmatch(
        r"(\d+) requests answered during training, at (\d+) different steps: median .* ms, slowest (\d+) ms", answers
    )
    assert seen is not None
    requests, steps, slowest_ms = map(int, seen.groups())
    assert requests >= steps >= 5
    assert slowest_ms < 1000


@pytest.mark.services
def test_train_from_object_store_compares_and_trains(digits: Path) -> None:
    """With 20 ms for each object ours reads ten times as many at the least, and trains on them."""
    done = run_example("train_from_object_store.py", "--epochs", "2", "--min-accuracy", "0.5", "--data", digits)
    _, compared, *_ = closing_lines(done, 6)
    found = re.fullmatch(r"torch's DataLoader reads \d+ images/s, ours \d+ \((\d+) times as many\)", compared)
    assert found is not None
    assert int(found[1]) >= 10


@pytest.mark.services
def test_train_from_postgres_compares_and_trains(digits: Path) -> None:
    """A query for each batch: the comparison is printed, the network trains, the server is gone at the end."""
    program("postgres", *PLACES)
    done = run_example("train_from_postgres.py", "--epochs", "2", "--min-accuracy", "0.5", "--data", digits)
    _, compared, *_ = closing_lines(done, 6)
    assert re.fullmatch(
        r"torch's DataLoader reads \d+ images/s row by row, ours \d+ \(\d+\.\d times as many\)", compared
    )


def test_train_gpt_has_the_losses_of_a_run_without_a_stop() -> None:
    """Two ranks, stopped after four steps, and one rank for the rest: each loss is printed beside the other."""
    done = run_example("train_gpt.py", "--steps", "10", "--stop-after", "4")
    *rows, difference = closing_lines(done, 5)
    steps = [re.fullmatch(r" *(\d+) +(\d\.\d{4}) +(\d\.\d{4})(   two ranks)?", row) for row in rows]
    assert [(int(row[1]), bool(row[4])) for row in steps if row] == [(1, True), (4, True), (5, False), (10, False)]
    assert all(abs(float(row[2]) - float(row[3])) < 1e-3 for row in steps if row)
    assert re.fullmatch(r"largest difference of 10 losses: 0\.000\d{3}", difference)


def test_train_gpt_streams_gives_each_document_once_on_changing_ranks() -> None:
    """Two ranks that are killed, three that are killed, one to the end: losses are those of a run without a kill."""
    documents, losses = closing_lines(run_example("train_gpt_streams.py"), 2)
    assert re.fullmatch(r"\d{3} documents, each once", documents)
    assert losses == "the losses equal those of the run that nobody has killed, bit for bit"


@pytest.mark.slow
def test_tinyloader_experiment_draws_a_picture(tmp_path: Path) -> None:
    """A small run measures the loaders that are there, prints a table with all of them and draws the picture."""
    picture = tmp_path / "new" / "tinyloader.png"
    small = ("--epochs", "1", "--samples", "128", "--workers", "0", "2", "--step-s", "0.01", "--out", picture)
    done = run_example("tinyloader_experiment.py", *small)
    header, _, none, two, _, closing = closing_lines(done, 6)
    assert closing == f"drawn to {picture}"
    others = {"StatefulDataLoader": "torchdata", "SPDL": "spdl"}
    names = ["torch", *(name for name, package in others.items() if importlib.util.find_spec(package)), "asyncloader"]
    assert header == f"| workers, step of 10 ms | naive loop | {' | '.join(names)} |"
    assert [cell.endswith(" ms") for cell in none.strip("| ").split(" | ")[1:]] == [
        True,
        *(name != "SPDL" for name in names),  # it has processes or nothing
    ]
    assert re.fullmatch(rf"\| 2 \|  (\| \d+\.\d\d ms ){{{len(names)}}}\|", two)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_prometheus_metrics_answers_while_it_trains(digits: Path) -> None:
    """A scrape after two epochs shows the batches of the last one, and the time of each stage."""
    pytest.importorskip("prometheus_client")
    done = run_example("prometheus_metrics.py", "--epochs", "2", "--data", digits)
    lines = closing_lines(done, 40)
    assert 'loader_batches_total{loader="train"} 23.0' in lines
    assert 'loader_stage_seconds_count{loader="train",stage="fetch"} 23.0' in lines


@pytest.mark.parametrize("rollouts", ["tasks", "http", "processes"])
def test_async_rl_trains_within_the_bound_and_resumes(rollouts: str) -> None:
    """Whoever makes the rollouts: both runs learn, the second one goes on in the middle, and the gain is told."""
    if rollouts == "http":
        pytest.importorskip("aiohttp")
    done = run_example("async_rl.py", "--steps", "20", "--rollouts", rollouts)
    *_, resumed, ages, accuracies, gain = closing_lines(done, 5)
    assert re.fullmatch(r"resumed at version 10, with \d+ groups that wait for training", resumed)
    assert re.fullmatch(r"max_staleness=2: \d+\.\d{3} s a step, samples by age \{0: \d+, 1: \d+, 2: \d+\}", ages)
    found = re.fullmatch(r"accuracy (\d+)% with rollouts and training in turn, (\d+)% with both at once", accuracies)
    assert found is not None
    assert min(map(int, found.groups())) > 20
    assert re.fullmatch(rf"both at once are \d+\.\d\d times as fast, with rollouts by {rollouts}", gain)
