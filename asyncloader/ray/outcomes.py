"""Outcomes of workers on other machines, as those of this one would have told them; and keys on their way there."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace
from typing import Any

import cloudpickle

from asyncloader.messages.failure import RemoteError
from asyncloader.messages.outcome import Outcome, unpack
from asyncloader.ray.wire import Frame, decode
from asyncloader.ray.worker import RemoteAgent

_MISSING = frozenset({"FileNotFoundError", "ModuleNotFoundError", "ImportError", "NotADirectoryError"})
_ELSEWHERE = (
    " (if that is only on the trainer's machine: files belong on storage that all nodes have, modules into the "
    "runtime_env of RayWorkers)"
)


def outcome_of(frame: Frame, agent: RemoteAgent) -> Outcome:
    """Return what a frame tells: times on this machine's clock, and of an error the machine where it was raised."""
    outcome = unpack(frame.kind, frame.body, functools.partial(decode, frame.buffers))
    record = outcome.record._replace(began=outcome.record.began - agent.clock.ahead_s)
    if isinstance(error := outcome.error, RemoteError):
        hint = _ELSEWHERE if error.type_name in _MISSING else ""
        return outcome._replace(record=record, error=replace(error, where=f"{error.where} on node {agent.node}{hint}"))
    return outcome._replace(record=record)


def pickled_keys(keys: Any) -> list[bytes]:
    """Pickle the keys of a ticket; by value if classes of the main module are in them, which is another one there."""
    data = pickle.dumps(keys, 5)
    return [cloudpickle.dumps(keys, 5) if b"__main__" in data else data]
