"""How many bytes a batch has that was handed over without being encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

UNKNOWN = -1
"""What `batch_bytes` returns of a batch that holds something which cannot be looked into."""

_OVERHEAD = 64
_PLAIN = frozenset({int, float, bool, complex, type(None)})
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONSTANTS = (int, float, complex, type(None), type, np.generic, torch.dtype, torch.device, range, slice)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch: what tensors, arrays, texts, containers and objects of Python classes hold.

    Returns:
        UNKNOWN if anything in it is of another kind: an image of PIL, an object that C code keeps its data in.
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided:
        return _OVERHEAD + batch.nbytes
    try:
        return _Sizes().of(batch)
    except Exception:  # of a class of the user's as well: nothing depends on it but how far workers run ahead
        return UNKNOWN


class _UnknownSizeError(Exception):
    """Something cannot be sized."""


class _Sizes:
    """Adds up what one batch holds; what it holds twice counts once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, thing: Any) -> int:
        """Return the bytes of `thing` with all that it holds."""
        if isinstance(thing, (str, bytes, bytearray)):
            return _OVERHEAD + len(thing)
        if isinstance(thing, _CONSTANTS):
            return _OVERHEAD
        if id(thing) in self._seen:
            return 0
        self._seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            return _OVERHEAD + self._tensor(thing)
        if isinstance(thing, np.ndarray):
            held = self._all(thing.ravel().tolist()) if thing.dtype.hasobject else 0
            return _OVERHEAD + int(thing.nbytes) + held
        if isinstance(thing, Mapping):
            return _OVERHEAD + self._all(thing.keys()) + self._all(thing.values())
        if isinstance(thing, _SEQUENCES):
            return _OVERHEAD + self._all(thing)
        return _OVERHEAD + self._buffer_or_attributes(thing)

    def _all(self, things: Iterable[Any]) -> int:
        members = list(things)
        if _PLAIN.issuperset(map(type, members)):
            return 32 * len(members)
        return sum(map(self.of, members))

    def _tensor(self, tensor: torch.Tensor) -> int:
        try:
            return tensor.nbytes
        except (RuntimeError, NotImplementedError) as error:  # sparse, nested
            raise _UnknownSizeError from error

    def _buffer_or_attributes(self, thing: Any) -> int:
        try:
            return memoryview(thing).nbytes
        except TypeError:
            pass
        total = 0
        for cls in type(thing).__mro__[:-1]:
            slots = vars(cls).get("__slots__")
            if slots is None and not cls.__dictoffset__:
                raise _UnknownSizeError  # made in C: who knows what it holds
            for name in (slots,) if isinstance(slots, str) else slots or ():
                if name not in ("__dict__", "__weakref__"):
                    hidden = name.startswith("__") and not name.endswith("__")
                    total += self._slot(thing, f"_{cls.__name__.lstrip('_')}{name}" if hidden else name)
        return total + self._all(getattr(thing, "__dict__", {}).values())

    def _slot(self, thing: Any, name: str) -> int:
        try:
            return self.of(object.__getattribute__(thing, name))
        except AttributeError:  # not set
            return 0
