"""Memory as an object that tensors, arrays and views of it refer to, and that tells its end."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

_types: dict[int, Any] = {}


class LeaseRef(weakref.ref[Any]):
    """Stands guard over the object that all tensors, arrays and views of one buffer refer to.

    Attributes:
        lease: The lease that ends with that object.
    """

    __slots__ = ("lease",)
    lease: Any


def exporter_at(address: int, nbytes: int) -> Any:
    """Return an object that exports the memory there, as the buffer protocol has it, and can be weakly referred to.

    Its type is the ctypes array of the next power of two, since ctypes never frees array types; so it exports more than
    `nbytes`.
    """
    bits = nbytes.bit_length()
    kind = _types.get(bits)
    if kind is None:
        kind = _types[bits] = ctypes.c_ubyte * (1 << bits)
    return kind.from_address(address)
