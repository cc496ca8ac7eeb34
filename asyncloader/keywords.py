"""Names of keyword arguments: what signatures tell of them, which were changed, what a wrong one was meant to be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from asyncloader.observe.notices import warn

RENAMED = {"run_ahead_bytes": "max_buffered_bytes"}
"""Options by the names that they had in the release before, which are taken with a warning in this one."""

OF_WORKERS = frozenset(
    {
        "persistent_workers",
        "prefetch_factor",
        "multiprocessing_context",
        "timeout",
        "max_tasks_per_child",
        "max_worker_memory",
    }
)
"""Options about workers, which a loader that is made anew without any is not given: torch refuses some of them."""

P = ParamSpec("P")
R = TypeVar("R")


def checked(init: Callable[P, R]) -> Callable[P, R]:
    """Have a function take keywords by the names that they had before, and say what others were meant to be.

    The signature stays that of the function: Lightning, `help()` and type checkers read it.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if strange := kwargs.keys() - signature.parameters.keys():
            for name in sorted(strange):
                _take_up(name, kwargs, list(signature.parameters))
        return init(*args, **kwargs)

    call.__dict__["__signature__"] = signature
    return call


def _take_up(name: str, kwargs: dict[str, Any], names: list[str]) -> None:
    """Give a keyword the name that it has now; raise if it never was one."""
    if (now := RENAMED.get(name)) is None:
        close = get_close_matches(name, [*names[1:], *RENAMED], 1)
        meant = f". Did you mean {RENAMED.get(close[0], close[0])!r}?" if close else ""
        raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}{meant}")
    if now in kwargs:
        raise TypeError(f"DataLoader.__init__() got {now!r} twice: {name!r} is its old name")
    _warn_of(name)
    kwargs[now] = kwargs.pop(name)


class Renamed:
    """An attribute of a loader under the name that it had before."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type) -> Any:
        if loader is None:
            return self
        _warn_of(self._name)
        return getattr(loader, RENAMED[self._name])

    def __set__(self, loader: Any, value: Any) -> None:
        _warn_of(self._name)
        setattr(loader, RENAMED[self._name], value)


def _warn_of(name: str) -> None:
    warn(f"{name} is called {RENAMED[name]} now; the old name goes with the next release", DeprecationWarning)


def name_options(init: Any, options: Mapping[str, inspect.Parameter]) -> None:
    """Add options to the signature of an ``__init__`` that takes any keywords, before those."""
    if not isinstance(init, FunctionType):
        return
    signature = inspect.signature(init)
    *named, last = signature.parameters.values() or [None]
    if last is None or last.kind is not inspect.Parameter.VAR_KEYWORD:
        return
    added = [parameter for name, parameter in options.items() if name not in signature.parameters]
    init.__dict__["__signature__"] = signature.replace(parameters=[*named, *added, last])
