"""Stacks of workers in messages: what is the user's, and no more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncloader import DataLoader
from asyncloader.stack_text import shorten, stack_of
from tests.engine.test_timeouts import Gated
from tests.support.patience import hung, patiently

STANDARD = f'  File "{sys.modules["threading"].__file__}", line 982 in run'
USERS = '  File "/home/me/train.py", line 7 in __getitem__'
OURS = '  File "/lib/asyncloader/worker/fetch.py", line 154 in _fetch'
TRAINERS = '  File "/home/me/train.py", line 90 in <module>'
CURRENT = "Current thread 0x00007f7fee3beb80 (most recent call first):"
OTHER = "Thread 0x00007f7fcbd7d6c0 (most recent call first):"
LEFT_OUT = "  (frames of asyncloader, and of what started the worker, are left out)"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([CURRENT, USERS, OURS, TRAINERS], [CURRENT, USERS, LEFT_OUT]),
        ([CURRENT, USERS, STANDARD, OURS, OURS, TRAINERS], [CURRENT, USERS, STANDARD, LEFT_OUT]),
        ([OTHER, OURS, STANDARD, "", CURRENT, USERS, OURS], [OTHER, LEFT_OUT, "", CURRENT, USERS, LEFT_OUT]),
        ([OTHER, STANDARD, OURS, "", CURRENT, USERS], [OTHER, STANDARD, LEFT_OUT, "", CURRENT, USERS]),
        ([OTHER, USERS, STANDARD, "", CURRENT, USERS, OURS], [OTHER, USERS, STANDARD, "", CURRENT, USERS, LEFT_OUT]),
        (["Fatal Python error: Aborted", "", CURRENT, USERS, OURS], None),
        ([OTHER, OURS, STANDARD, "", CURRENT, OURS, TRAINERS], []),
        (["what a library wrote"], []),
    ],
)
def test_stacks_of_faulthandler(written: list[str], shown: list[str] | None) -> None:
    """Frames from the loader's first one on are left out; text beside stays, and so does one without other frames."""
    if shown is None:
        shown = [*written[:-1], LEFT_OUT]
    text = "\n".join([*written, ""])
    assert shorten(text) == ("\n".join([*shown, ""]) if shown else text)


def test_a_stack_without_frames_of_the_loader() -> None:
    """Stays as it is; and where there is no frame there is no text."""
    text = stack_of(sys._getframe())
    assert "in test_a_stack_without_frames_of_the_loader" in text
    assert text.count("  File ") > 3
    assert stack_of(None) == ""


@pytest.mark.forked("the timeout is shorter than the import of this module")
@pytest.mark.parametrize("options", [{}, {"worker_backend": "thread"}, {"concurrency": 3}], ids=str)
def test_a_timeout_shows_the_lines_of_the_dataset(options: dict[str, object], tmp_path: Path) -> None:
    """And neither those of the loader, nor those of the trainer that forked the worker."""
    loader = DataLoader(Gated(tmp_path / "gate"), 4, num_workers=1, timeout=0.6, **options)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(patiently(iterator))
    error = hung(iterator, "in wait_for_the_gate")
    stack, message = error.stack, str(error)
    assert "in wait_for_the_gate" in stack
    assert "test_timeouts.py" in stack
    assert "asyncloader/workers" not in stack
    assert "test_stack_text.py" not in stack
    assert 'raise timeout if samples may take so long, or have another worker try it: on_timeout="retry".' in message
    del error
    (tmp_path / "gate").touch()
    list(patiently(iterator))
