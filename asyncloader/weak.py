"""Calls that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def while_alive(method: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """Return a function that calls a method of an object, without keeping that object alive.

    In contrast to that of `weakref.WeakMethod`, the weak reference has no callback: what a signal's handler raises in
    one, while the object goes, is lost.

    Args:
        method: The method, bound to its object.
        otherwise: Returned when the object is gone.
    """
    bound: Any = method
    ref, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: Any) -> T:
        return otherwise if (alive := ref()) is None else function(alive, *args)

    return call
