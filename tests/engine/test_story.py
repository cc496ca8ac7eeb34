"""What the scheduler was told, kept for reports, and told again to another scheduler."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.engine.scheduler import Scheduler
from asyncloader.errors import InternalError
from tests.support import inside
from tests.support.patience import wait_until
from tests.support.story import replay


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


class Fatal(Numbers):
    """One sample kills the worker once."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        if index == 21 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["plain", "fatal", "resized"])
def test_a_story_brings_another_scheduler_where_the_first_one_is(kind: str, scheduling: Any, tmp_path: Any) -> None:
    """Whatever has happened to workers."""
    dataset = Fatal(tmp_path) if kind == "fatal" else Numbers()
    loader = DataLoader(dataset, 2, num_workers=2, scheduling=scheduling, max_buffered_bytes=0)
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(15)]
    if kind == "resized":
        loader.set_num_workers(3)
        wait_until(lambda: len(inside.run(iterator).scheduler.takers) == 3)  # it would join after the story was told
    seen += iterator
    assert [batch.tolist() for batch in seen] == [[at, at + 1] for at in range(0, 60, 2)]
    told = inside.run(iterator).scheduler
    story = loader.stats(story=True).story
    assert loader.stats().story == ()
    again = replay(story, inside.options(DataLoader(dataset, 2, num_workers=2, scheduling=scheduling)))
    assert again.gone_count == told.gone_count == 30
    assert again.is_finished
    assert len(again.takers) == len(told.takers)
    assert (kind == "fatal") is any(event[0] == "vacated" for event in story)


def test_an_error_of_our_own_has_the_end_of_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a report."""

    def broken(self: Scheduler, *args: Any) -> Any:
        raise RuntimeError("measured")

    monkeypatch.setattr(Scheduler, "measured", broken)
    with pytest.raises(InternalError) as caught:
        list(DataLoader(Numbers(), 2, num_workers=1))
    (note,) = [note for note in caught.value.__notes__ if "events" in note]
    assert note.startswith("The last events of the run: planned ")
    assert "made 0 [" in note
