"""States in files: whole or not at all, with and without a loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import DataLoader, StateMismatchError


class Words(IterableDataset[int]):
    """A stream whose state holds an object that JSON does not know, and a tensor."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def __iter__(self) -> Any:
        for number in range(len(self.seen), 12):
            self.seen[number] += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"seen": Counter(self.seen), "tensor": torch.arange(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["seen"]) is Counter
        assert state["tensor"].tolist() == [0, 1]
        self.seen = Counter(state["seen"])


def make() -> DataLoader[int]:
    """A shuffled loader of 20 numbers."""
    return DataLoader(list(range(20)), 4, shuffle=True, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]


def numbers(loader: DataLoader[Any]) -> list[int]:
    """Return what is left."""
    return [int(number) for batch in loader for number in batch]


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    """What is in it is JSON, and nothing else is left in the folder."""
    whole = numbers(make())
    loader, path = make(), tmp_path / "loader.json"
    iterator = iter(loader)
    next(iterator)
    loader.save_state(path)
    next(iterator)
    loader.save_state(str(path))
    assert json.loads(path.read_text()) == loader.state_dict()
    resumed = make()
    resumed.load_state(path)
    assert numbers(resumed) == whole[8:]
    assert os.listdir(tmp_path) == ["loader.json"]


async def test_an_async_trainer_does_it_without_blocking_its_loop(tmp_path: Path) -> None:
    """The state is that of the call, also if the run goes on before it is awaited, or while it is written."""
    whole = numbers(make())
    loader, path = make(), tmp_path / "loader.json"
    iterator = aiter(loader)
    await anext(iterator)
    saving = loader.asave_state(path)
    await anext(iterator)
    writing = asyncio.ensure_future(saving)
    await asyncio.sleep(0)  # it begins
    await anext(iterator)
    await writing
    resumed = make()
    await resumed.aload_state(path)
    assert [int(number) async for batch in resumed for number in batch] == whole[4:]
    assert os.listdir(tmp_path) == ["loader.json"]


def test_a_link_leads_to_the_state_afterwards_too(tmp_path: Path) -> None:
    """The file that it names is replaced, and not the link."""
    loader, there, link = make(), tmp_path / "runs" / "7.json", tmp_path / "latest.json"
    there.parent.mkdir()
    link.symlink_to(there)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        loader.save_state(link)
        assert json.loads(there.read_text()) == loader.state_dict()
    assert link.is_symlink()
    assert os.listdir(there.parent) == ["7.json"]


def test_states_with_objects_of_the_users(tmp_path: Path) -> None:
    """They come back as what they were; what is more than data is refused unless it is trusted."""
    loader, path = DataLoader(Words(), 4), tmp_path / "state"
    next(iter(loader))
    loader.save_state(path)
    resumed = DataLoader(Words(), 4)
    resumed.load_state(path, weights_only=False)
    assert numbers(resumed) == list(range(4, 12))

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    torch.save({"version": Evil()}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        resumed.load_state(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', "nonsense"])
def test_files_that_hold_no_state(tmp_path: Path, content: str) -> None:
    """An error, and the loader is as it was."""
    path = tmp_path / "state"
    path.write_text(content)
    loader = make()
    with pytest.raises((ValueError, EOFError, StateMismatchError, RuntimeError, pickle.UnpicklingError)):
        loader.load_state(path)
    assert sorted(numbers(loader)) == list(range(20))


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say: the state before stays, and nothing is left beside it."""
    loader, path = make(), tmp_path / "state"
    loader.save_state(path)
    before = path.read_bytes()
    next(iter(loader))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        loader.save_state(path)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(loader.asave_state(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]


def test_whoever_is_killed_while_writing_leaves_a_whole_state(tmp_path: Path) -> None:
    """SIGKILL at any moment: there is always one that loads."""
    path = tmp_path / "state"
    make().save_state(path)
    script = f"""
from tests.run.test_state_file import make
loader = make()
for _ in loader: pass
print("writes", flush=True)
while True:
    loader.save_state({str(path)!r})
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(50):
            make().load_state(path)
        writer.send_signal(signal.SIGKILL)
    make().load_state(path)
