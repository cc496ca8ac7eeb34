"""The session carries out what was decided, in order; no loop, no workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncloader.engine.actions import Deliver, Dismiss
from asyncloader.engine.session import Session
from asyncloader.engine.taking import Item
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome


def test_a_run_is_not_over_before_its_last_batch_is_handed_over() -> None:
    """Though carrying out one action may lead to others, which are carried out at once."""
    seen: list[str] = []
    session: Any = object.__new__(Session)
    session._is_applying = False
    session.flush = lambda: None
    session.run = SimpleNamespace(
        follow=lambda *, may_be_over: seen.extend(["the run may be over"] * may_be_over),
        handoff=SimpleNamespace(put=lambda item: seen.append("a batch is handed over")),
    )
    session.supervisor = SimpleNamespace(do=lambda action: session.apply([]))
    session.apply([Dismiss(0), Deliver(Item(Outcome(Kind.BATCH, data="data"), 0))])
    assert seen == ["a batch is handed over", "the run may be over"]
