"""Calls that keep nothing alive."""

from __future__ import annotations

import signal
import weakref

import pytest

from asyncloader.weak import while_alive


class Interrupted:
    """A signal comes while it goes."""

    def answer(self) -> str:
        return "here"


def test_a_method_is_called_while_its_object_is_there() -> None:
    there = Interrupted()
    call = while_alive(there.answer, "gone")
    assert call() == "here"
    del there
    assert call() == "gone"


def test_what_a_handler_raises_while_the_object_goes_is_not_lost() -> None:
    """Code of Python's that is run by a weak reference would be where the handler runs."""

    def preempt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        there = Interrupted()
        call = while_alive(there.answer, "gone")
        assert [ref.__callback__ for ref in weakref.getweakrefs(there)] == [None]
        with pytest.raises(KeyboardInterrupt):
            del there
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert call() == "gone"
