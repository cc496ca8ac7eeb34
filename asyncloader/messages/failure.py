"""Exceptions of user code on their way from the worker to the consumer.

The same exception arrives where it can be pickled and unpickled: its type, its arguments, its attributes. The
worker's traceback is its ``__cause__``, and torch's words and the indices are its notes; ``error.keys`` has the indices
of the whole batch, unless the exception has such an attribute of its own. An exception that does not survive pickling
becomes a RuntimeError with torch's text.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from asyncio import CancelledError
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from asyncloader.errors import describe_keys

Raised = TypeVar("Raised", bound=BaseException)

_OF_BATCH, _OF_SAMPLE = "The batch has the indices", "The sample has the index"

OF_OPENING = "It stands for all batches of the worker, which could not be set up."


class EndOfData(Exception):
    """The data have no more samples. Not StopIteration, which a bug in user code can raise."""


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

    A raised exception keeps the frames that it passes: an exception that is held would hold the trainer's frames.
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


class Blame(NamedTuple):
    """The sample of a batch that an exception is about.

    Attributes:
        position: In the batch, from 0.
        is_odd: The sample was there, and could not be collated with the others; otherwise it raised.
    """

    position: int
    is_odd: bool = False

    def describe(self, keys: Any) -> str:
        """Name the sample by its index, or by its position where there are no indices; "" if there is none to name."""
        if isinstance(keys, (list, tuple)):
            if not 0 <= self.position < len(keys):
                return ""
            sample = f"sample with the index {describe_keys(keys[self.position])}"
        else:
            sample = f"sample at position {self.position} of the batch (from 0)"
        return f"The {sample} keeps the batch from being collated." if self.is_odd else f"The {sample} raised it."


def _notes_of_batch(error: BaseException, keys: Any, blame: Blame | None) -> list[str]:
    """Return notes that name the batch, and the sample in it; the error gets the indices as its attribute."""
    if keys is None:
        return [blame.describe(None)] if blame is not None and blame.is_odd else []
    is_batch = isinstance(keys, (list, tuple))
    shown = describe_keys(keys)
    words = f"{_OF_BATCH if is_batch else _OF_SAMPLE} {shown}"
    said = (note.startswith((_OF_BATCH, _OF_SAMPLE)) for note in getattr(error, "__notes__", ()))
    is_own = "keys" in vars(error) and not any(said)
    if not is_own and not hasattr(type(error), "keys"):
        BaseException.__setattr__(error, "keys", keys)
        words += ", all of them in error.keys" * words.endswith(")")
    is_one = not is_batch or (len(keys) == 1 and not (blame is not None and blame.is_odd))
    sample = "" if blame is None or is_one else blame.describe(keys)
    return [sample, f"{words}."] if sample else [f"{words}."]


class RemoteTraceback(Exception):
    """The worker's traceback as text, shown as the cause of what was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class CapturedError:
    """An exception on its way to the consumer: as it crosses the channel, or as it is, of a worker in this process.

    Attributes:
        type_name: Name of its class.
        where: For torch's words: "in DataLoader worker process 3"; "" if there is no worker in the user's eyes.
        text: Its traceback, formatted in a worker process.
        pickled: The exception, of a worker process; None if it does not survive pickling.
        error: The exception itself, of a worker in this process.
        blame: The sample that it is about, where that is known.
    """

    type_name: str
    where: str
    text: str = ""
    pickled: bytes | None = None
    error: BaseException | None = None
    blame: Blame | None = None

    @classmethod
    def capture(cls, error: BaseException, where: str) -> CapturedError:
        """Describe the exception, in the worker, for another process."""
        return cls(type(error).__name__, where, "".join(traceback.format_exception(error)), _pickled(error))

    def rebuild(self, keys: Any) -> BaseException:
        """Make the exception to raise, in the parent.

        Args:
            keys: The keys of the batch; None for a stream, which has none.
        """
        words = f"Caught {self.type_name} {self.where}."
        if self.error is not None:
            error = stand_in(self.error)
        elif (unpickled := self._unpickled()) is not None:
            BaseException.__setattr__(error := unpickled, "__cause__", RemoteTraceback(self.text))
        else:
            error, words = RuntimeError(f"{words}\nOriginal {self.text}"), ""
        notes = [words] * bool(words and self.where) + _notes_of_batch(error, keys, self.blame)
        there = getattr(error, "__notes__", ())  # an exception of this process may be raised for several batches
        return with_notes(error, [note for note in notes if note not in there])

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
    error: CapturedError


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception if it comes out again as what it was.

    By reference if possible, so that ``except`` in the trainer knows its class; by value (cloudpickle) if the class is
    known in neither module that a name can lead to, as after ``python -c`` with spawn.
    """
    for dumps in (pickle.dumps, _dumps_by_value):
        try:
            data: bytes = dumps(error)
            if type(pickle.loads(data)).__name__ == type(error).__name__:
                return data
        except BaseException:  # SystemExit as well: it is not what the user raised
            continue
    return None


def _dumps_by_value(error: BaseException) -> bytes:
    import cloudpickle  # here: hardly any worker needs it

    pickled: bytes = cloudpickle.dumps(error)
    return pickled


def is_of_opening(error: object) -> bool:
    """Whether an exception stands for a batch because its worker could not be set up."""
    return any(OF_OPENING in text for text in (str(error), *getattr(error, "__notes__", ())))


def with_notes(error: Raised, notes: list[str]) -> Raised:
    """Add the notes, past a ``__setattr__`` of the user's: a frozen dataclass has one that refuses."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), *notes])
    return error
