"""Exceptions on their way to the consumer: the same object again where possible, and never a worse error in its
place."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import traceback
from typing import Any

import pytest

from asyncloader.messages.failure import CapturedError, RemoteTraceback

WHERE = "in DataLoader worker process 3"


class TwoArguments(Exception):
    """Keeps what it was made of."""

    def __init__(self, one: int, two: str) -> None:
        super().__init__(one, two)
        self.one = one
        self.two = two


class OtherArguments(Exception):
    """Cannot be made again of its `args`, as pickle tries to."""

    def __init__(self, one: int, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Unpicklable(Exception):
    """Holds a lock."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    """Does not want to be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no")


def end(status: int) -> None:
    """End the process that unpickles."""
    raise SystemExit(status)


class UnpicklingEnds(Exception):
    """Is a trap."""

    def __reduce__(self) -> Any:
        return end, (3,)


class StrRaises(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses new attributes."""

    code: int

    def __reduce__(self) -> Any:
        return Frozen, (self.code,)


@dataclasses.dataclass(frozen=True)
class FrozenStiff(Exception):
    """Refuses even those that pickle sets."""

    code: int


class Changing(Exception):
    """Comes out of pickle as something else."""

    def __reduce__(self) -> Any:
        return int, (5,)


def travel(error: BaseException, keys: Any = None) -> Exception:
    """Raise the error in a function, capture it as a worker does, pickle it, rebuild it as the parent does."""

    def inside_the_dataset() -> None:
        raise error

    try:
        inside_the_dataset()
    except BaseException as caught:
        data = pickle.dumps(CapturedError.capture(caught, WHERE))
    remote: CapturedError = pickle.loads(data)
    return remote.rebuild(keys)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"),
        ValueError(),
        KeyError("missing"),
        KeyError(("a", 1)),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration("value"),
        TwoArguments(1, "x"),
        ExceptionGroup("both", [ValueError(1), ExceptionGroup("inner", [KeyError("k")])]),
        AssertionError([1, 2, 3]),
        Frozen(7),
        StrRaises(),
    ],
    ids=repr,
)
def test_the_same_exception_arrives(error: Exception) -> None:
    """Its type, its arguments, its attributes; with the worker's traceback as cause, and two notes."""
    copy = travel(error, [1, 2])
    assert type(copy) is type(error)
    assert repr(copy) == repr(error)
    assert copy.args == error.args or isinstance(error, ExceptionGroup)
    own = {name: value for name, value in vars(copy).items() if name not in ("__notes__", "keys")}
    assert own == vars(error) or isinstance(error, ExceptionGroup)
    assert isinstance(copy.__cause__, RemoteTraceback)
    assert "in inside_the_dataset" in str(copy.__cause__)
    assert copy.__notes__ == [f"Caught {type(error).__name__} {WHERE}.", "The batch has the indices [1, 2]."]


@pytest.mark.parametrize(
    "error",
    [OtherArguments(1, "x"), Unpicklable(), ReduceRaises("r"), UnpicklingEnds("u"), Changing("c"), FrozenStiff(3)],
    ids=lambda error: type(error).__name__,
)
def test_what_does_not_survive_becomes_a_runtime_error(error: Exception) -> None:
    """With torch's text: what it was, where, and the traceback."""
    copy = travel(error, ["key"])
    assert type(copy) is RuntimeError
    assert str(copy).startswith(
        f"Caught {type(error).__name__} {WHERE}.\nOriginal Traceback (most recent call last):\n"
    )
    assert "in inside_the_dataset" in str(copy)
    assert copy.__notes__ == ["The batch has the indices ['key']."]


def test_a_class_that_only_the_worker_knows() -> None:
    """It travels by value; where it does not, its text does."""

    class Local(Exception):
        pass

    copy = travel(Local("here"))
    assert (type(copy).__name__, str(copy)) == ("Local", "here")


def test_notes_of_the_users_come_first() -> None:
    """They are kept."""
    error = ValueError("x")
    error.add_note("the user's own")
    assert travel(error).__notes__ == ["the user's own", f"Caught ValueError {WHERE}."]


def test_causes_are_in_the_traceback() -> None:
    """What led to the exception is told, by the text of the worker's traceback."""
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as second:
        copy = travel(second)
    text = "".join(traceback.format_exception(copy))
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.rindex("ValueError: second")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_is_no_exception_becomes_a_runtime_error(error: BaseException) -> None:
    """Raised in the trainer as it was, it would end the trainer, or a task of it."""
    copy = travel(error)
    assert type(copy) is RuntimeError
    assert type(error).__name__ in str(copy)
