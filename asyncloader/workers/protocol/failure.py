"""Exceptions of user code on their way from the worker to the consumer.

The same exception arrives where it can be pickled and unpickled: its type, its arguments, its attributes. The
worker's traceback is its ``__cause__``, and torch's words and the indices are its notes. What does not survive
pickling becomes a RuntimeError with torch's text.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from asyncio import CancelledError
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch

from asyncloader.errors import describe_keys

Raised = TypeVar("Raised", bound=BaseException)


_NO_CUDA_HERE = (
    "This worker was forked from a process that had initialised CUDA, and no forked process can use CUDA then. Pass "
    'multiprocessing_context="forkserver"; or leave CUDA to the training loop: make CPU tensors in the dataset, with '
    "pin_memory=True."
)


class EndOfData(Exception):
    """There are no more samples. Not StopIteration, which a bug in user code can be."""


def stand_in(error: BaseException, *, in_async_for: bool = False) -> BaseException:
    """Return what to raise at the consumer: the error, or another one if it would mean something else there.

    StopIteration would end a ``for`` loop before its time, StopAsyncIteration an ``async for``, and nobody would know
    that the epoch is short (PEP 479 says the same of generators); CancelledError would cancel the consumer's task.
    """
    misleading = (
        (StopIteration, CancelledError, StopAsyncIteration) if in_async_for else (StopIteration, CancelledError)
    )
    if not isinstance(error, misleading):
        return error
    other = RuntimeError(f"The dataset, its sampler or collate_fn raised {type(error).__name__}.")
    other.__cause__ = error
    return with_notes(other, getattr(error, "__notes__", []))


def another(error: Raised) -> Raised:
    """Return an exception like this one, if it can be copied, for one that is raised more than once.

    What is raised keeps the frames that it passes: whoever holds it would hold the trainer's.
    """
    try:
        other = copy.copy(error)
    except Exception:
        return error
    if type(other) is not type(error):
        return error
    for name in ("__cause__", "__context__", "__suppress_context__", "__traceback__"):
        BaseException.__setattr__(other, name, getattr(error, name))
    return other


class RemoteTraceback(Exception):
    """The worker's traceback as text, shown as the cause of what was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception as it crosses the channel.

    Attributes:
        type_name: Name of its class.
        text: Its traceback, formatted in the worker.
        pickled: The exception itself, or None if it does not survive pickling.
        where: For torch's words: "in DataLoader worker process 3".
        advice: What to do about it, where the worker knows.
    """

    type_name: str
    text: str
    pickled: bytes | None
    where: str
    advice: tuple[str, ...] = ()

    @classmethod
    def capture(cls, error: BaseException, where: str) -> RemoteError:
        """Describe the exception, in the worker."""
        text = "".join(traceback.format_exception(error))
        advice = (_NO_CUDA_HERE,) if _is_of_cuda_after_fork(text) else ()
        return cls(type(error).__name__, text, _pickled(error), where, advice)

    def rebuild(self, keys: Any) -> Exception:
        """Make the exception to raise, in the parent."""
        words = f"Caught {self.type_name} {self.where}."
        indices = [] if keys is None else [f"The batch has the indices {describe_keys(keys)}."]
        error = self._unpickled()
        if error is None:
            return with_notes(RuntimeError(f"{words}\nOriginal {self.text}"), [*self.advice, *indices])
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(self.text))
        return with_notes(error, [words, *self.advice, *indices])

    def _unpickled(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except BaseException:  # whatever the user's classes do, it must not end the loop
            return None  # its class is not known here; the text is
        return error if isinstance(error, Exception) else None


class BadSample(NamedTuple):
    """A sample that raised: its key, its place in the batch, and what it raised."""

    key: Any
    position: int
    error: RemoteError


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for the keys of a ticket that could not be unpickled in a worker, with what that raised."""

    failure: RemoteError


@dataclass(frozen=True, slots=True)
class LocalError:
    """An exception of a worker in this process, on its way to the consumer: as it is.

    Attributes:
        error: What was raised.
        where: For torch's words; "" if there is no worker in the user's eyes.
    """

    error: BaseException
    where: str

    def rebuild(self, keys: Any) -> BaseException:
        """Return the exception to raise, with notes."""
        error = stand_in(self.error)
        notes = [f"Caught {type(self.error).__name__} {self.where}."] if self.where else []
        if keys is not None:
            notes.append(f"The batch has the indices {describe_keys(keys)}.")
        there = getattr(error, "__notes__", ())
        return with_notes(error, [note for note in notes if note not in there])


def _is_of_cuda_after_fork(text: str) -> bool:
    """Whether a traceback is of CUDA in a process that was forked after its parent had initialised CUDA.

    torch notes such a fork (`_is_in_bad_fork`). Other libraries, which share the driver's context with torch, raise
    errors of their own: "initialization error", "CUDA_ERROR_NOT_INITIALIZED".
    """
    return "cuda" in text.lower() and torch.cuda._is_in_bad_fork()


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception if it comes out again as what it was.

    By reference if possible, so that ``except`` in the trainer knows its class; by value (cloudpickle) if the class is
    known in neither module that a name can lead to, as after ``python -c`` with spawn.
    """
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            data: bytes = dumps(error)
            if type(pickle.loads(data)).__name__ == type(error).__name__:
                return data
        except BaseException:  # SystemExit as well: it is not what the user raised
            continue
    return None


def with_notes(error: Raised, notes: list[str]) -> Raised:
    """Add the notes, past a ``__setattr__`` of the user's: a frozen dataclass has one that refuses."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), *notes])
    return error
