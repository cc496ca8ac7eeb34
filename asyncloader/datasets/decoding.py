"""Functions of the user's that make samples of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from asyncloader.datasets.blocking import in_thread


class Decoder:
    """Calls ``decode(data)``, or ``decode(data, key)`` if it takes two arguments; without one, data are the sample.

    Args:
        decode: The function, or None.
    """

    def __init__(self, decode: Callable[..., Any] | None) -> None:
        self._decode = decode
        self._takes_key = decode is not None and _takes_two(decode)

    def __call__(self, data: Any, key: Any) -> Any:
        """Make a sample."""
        if self._decode is None:
            return data
        return self._decode(data, key) if self._takes_key else self._decode(data)

    async def call_async(self, data: Any, key: Any) -> Any:
        """Make a sample: on the loop in a worker, whose loop has nothing else to do; otherwise on a thread."""
        if self._decode is None or get_worker_info() is not None:
            return self(data, key)
        return await in_thread(self, data, key)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a C extension: most decoders take bytes alone
        return False
    required = [
        each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    return len(required) >= 2 or any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
