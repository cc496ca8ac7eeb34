"""`asyncloader compare`: the first batch in which two runs differ, and what is no answer."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from typer.testing import CliRunner, Result

from asyncloader import DataLoader, tracing
from asyncloader.cli.app import app
from asyncloader.observe.trace import fingerprints_of

BATCH = 4


class Numbers(Dataset[Any]):
    """Sample i is i; but one is another number."""

    def __init__(self, odd: int | None = None, length: int = 24) -> None:
        self.odd, self.length = odd, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(-index if index == self.odd else index)


def compare(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)


def told(result: Result) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def timeline(path: Path, dataset: Any = None, *, epochs: int = 2, **options: Any) -> Path:
    """Take all batches of some epochs, and return where their timeline is."""
    loader = DataLoader(dataset or Numbers(), BATCH, trace=path, **{"fingerprint": True, **options})
    for _ in range(epochs):
        list(loader)
    loader.close()
    return path


def test_runs_with_the_same_batches_are_alike(tmp_path: Path) -> None:
    """However these were made, and in whatever order they came."""
    one = timeline(tmp_path / "one.json")
    for number, options in enumerate(({}, {"num_workers": 2}, {"num_workers": 2, "in_order": False})):
        result = compare(one, timeline(tmp_path / f"other{number}.json", **options))
        assert (result.exit_code, told(result)) == (0, "the 12 batches that both have are alike")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_batch_that_differs_is_named(num_workers: int, tmp_path: Path) -> None:
    """By its epoch and its number, with both fingerprints, and how many more differ."""
    files = timeline(tmp_path / "one.json"), timeline(tmp_path / "two.json", Numbers(odd=9), num_workers=num_workers)
    result = compare(*files)
    assert result.exit_code == 1
    assert told(result).startswith("batch 2 of epoch 0 is the first that differs, of 2 among the 12 that both have:")
    assert "loader.batch_keys(0, 2) tells its samples, loader.batch(0, 2) makes it again." in told(result)
    found = json.loads(compare(*files, "--json").stdout)["differs"]
    assert [found[name] for name in ("epoch", "loader", "number", "differing", "both")] == [0, 0, 2, 2, 12]
    prints = [found["fingerprints"][str(path)] for path in files]
    assert prints[0] != prints[1]
    assert all(re.fullmatch("[0-9a-f]{16}", one) for (one,) in prints)


def test_a_run_that_lacks_batches_is_named(tmp_path: Path) -> None:
    """Whichever of the two: one ended early, or was resumed."""
    whole, part = timeline(tmp_path / "whole.json"), timeline(tmp_path / "part.json", epochs=1)
    for files in ((whole, part), (part, whole)):
        result = compare(*files)
        assert result.exit_code == 1
        assert "lacks batch 0 of epoch 1 and 5 more of the other" in told(result)
        assert "part.json lacks" in re.sub(r"\s", "", result.output).replace("lacks", " lacks")
        assert "the 6 batches that both have are alike" in told(result)


def test_runs_without_a_common_batch_cannot_be_compared(tmp_path: Path) -> None:
    """They are neither alike nor not: of different epochs, for instance."""
    loader = DataLoader(Numbers(), BATCH, fingerprint=True)
    list(loader)
    resumed = DataLoader(Numbers(), BATCH, fingerprint=True, trace=tmp_path / "second.json")
    resumed.load_state_dict(loader.state_dict())
    list(resumed)
    resumed.close()
    result = compare(timeline(tmp_path / "first.json", epochs=1), tmp_path / "second.json")
    assert result.exit_code == 2
    words = "no batch is in both: FIRST begins with batch 0 of epoch 0, SECOND with batch 0 of epoch 1"
    for name in ("FIRST", "SECOND"):
        words = words.replace(name, str(tmp_path / f"{name.lower()}.json"))
    assert words.replace(" ", "") in told(result).replace(" ", "")


def test_a_timeline_is_read_line_by_line(tmp_path: Path) -> None:
    """A long run's is larger than memory: reading one takes the memory of what is found, not that of the file."""
    path = timeline(tmp_path / "one.json", Numbers(length=4000))
    tracemalloc.start()
    found = fingerprints_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 2000
    assert peak < path.stat().st_size


def test_a_run_that_was_left_and_resumed_is_alike(tmp_path: Path) -> None:
    """In one file or in two: batches that were given twice are the same."""
    whole, path = timeline(tmp_path / "whole.json", epochs=1), tmp_path / "again.json"
    loader = DataLoader(Numbers(), BATCH, fingerprint=True, trace=path)
    iterator = iter(loader)
    states = [next(iterator) is not None and loader.state_dict() for _ in range(4)]
    loader.load_state_dict(states[1])
    list(loader)
    assert compare(whole, path).exit_code == 0


def test_loaders_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    """They are counted in the order of their first runs."""
    files = tmp_path / "one.json", tmp_path / "two.json"
    for path, odd in zip(files, (None, 5), strict=True):
        with tracing(path):
            training = DataLoader(Numbers(), BATCH, fingerprint=True)
            for _ in training:
                list(DataLoader(Numbers(odd, length=8), BATCH, fingerprint=True))
                break
            list(training)
    result = compare(*files)
    assert result.exit_code == 1
    assert told(result).startswith("batch 1 of epoch 0 of loader 1 is the first that differs, of 1 among the 9")


def test_states_are_alike_or_not(tmp_path: Path) -> None:
    """At the same place; and at others nobody can say."""
    files = {}
    for name, odd in (("same", None), ("again", None), ("odd", 6)):
        loader = DataLoader(Numbers(odd), BATCH, fingerprint=True, num_workers=int(name == "again"))
        iterator = iter(loader)
        for count in range(1, 4):
            next(iterator)
            files[name, count] = tmp_path / f"{name}{count}.state"
            torch.save(loader.state_dict(), files[name, count])
        loader.close()
    assert compare(files["same", 3], files["again", 3]).exit_code == 0
    assert compare(files["same", 1], files["odd", 1]).exit_code == 0
    result = compare(files["same", 3], files["odd", 3])
    assert result.exit_code == 1
    assert "not alike" in told(result)
    assert json.loads(compare(files["same", 3], files["odd", 3], "--json").stdout)["states"]["alike"] is False
    assert compare(files["same", 1], files["same", 2]).exit_code == 2
    torch.save({**torch.load(files["same", 3]), "position": 1, "ahead": [1, 2]}, tmp_path / "early")
    assert compare(tmp_path / "early", files["again", 3]).exit_code == 0


def test_what_does_not_say_is_bad_input(tmp_path: Path) -> None:
    """With what is wrong with it, and what to do."""
    good, other = timeline(tmp_path / "good.json"), tmp_path / "other"
    loader = DataLoader(Numbers(), BATCH)
    state = tmp_path / "state"
    torch.save(loader.state_dict(), state)
    for contents, words in (
        (None, "No such file"),
        (b"", "a state that a loader has saved"),
        (b"PK", "a state that a loader has saved"),
        (b"[1, 2]", "other is no timeline that asyncloader has written"),
        (b"[\xff", "other is no timeline that asyncloader has written"),
        (b"[\n]\n", "give the loader fingerprint=True beside trace="),
        (b'[\n{"args": {"fingerprint": "12"}}\n]\n', "other is cut short, or no timeline"),
        (good.read_bytes().removesuffix(b"]\n"), "other is cut short"),
        (good.read_bytes().rpartition(b'"}}')[0], "other is cut short"),
        (timeline(tmp_path / "without.json", fingerprint=False).read_bytes(), "has no fingerprints of batches"),
        (b"<html>", "good.json looks like a timeline, and"),
        (state.read_bytes(), "good.json looks like a timeline, and"),
    ):
        if contents is not None:
            other.write_bytes(contents)
        for files in ((good, other), (other, good)):
            if contents in (b"", b"PK"):  # beside a timeline it is taken for a state
                files = other, state
            result = compare(*files)
            assert result.exit_code == 2, told(result)
            assert words.replace(" ", "") in told(result).replace(" ", "")
    result = compare(state, state)
    assert (result.exit_code, "has no fingerprint of the batches before it" in told(result)) == (2, True)
