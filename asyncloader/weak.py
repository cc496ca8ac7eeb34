"""Calls that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def while_alive(method: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """Return a function that calls a method of an object, without keeping that object alive.

    Args:
        method: The method, bound to its object.
        otherwise: Returned when the object is gone.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        return otherwise if (alive := ref()) is None else alive(*args)

    return call
