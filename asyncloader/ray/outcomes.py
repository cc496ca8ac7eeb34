"""Outcomes of workers on other machines, as those of this one would have told them; and keys on their way there."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cloudpickle

from asyncloader.messages.failure import RemoteError
from asyncloader.messages.outcome import Failure, Outcome, unpack
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
    if type(outcome) is Failure and isinstance(error := outcome.error, RemoteError):
        hint = _ELSEWHERE if error.type_name in _MISSING else ""
        return outcome._replace(record=record, error=replace(error, where=f"{error.where} on node {agent.node}{hint}"))
    return outcome._replace(record=record)


def by_value(keys: Any) -> bytes | RemoteError:
    """Pickle keys that did not come out there as they were pickled first: their classes may be the main module's."""
    try:
        return bytes(cloudpickle.dumps(keys, 5))
    except Exception as error:
        return RemoteError.capture(error, "in the main process")
