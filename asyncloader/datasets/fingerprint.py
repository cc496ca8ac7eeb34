"""What a dataset is, in 32 bytes: another dataset, or the same with other code or content, has others.

Its class with the code of its methods, and all that its attributes hold. What its methods call elsewhere, and what the
files contain whose names it holds, is not seen.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import types
from typing import Any

import numpy as np
import torch

from asyncloader.datasets.blocks import KIND
from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.errors import ConfigurationError

_PLAIN = frozenset({int, str, float, bool, bytes, complex, list, tuple, dict, type(None)})
_BYTES = 32


def fingerprint_of(dataset: Any) -> bytes:
    """Return the same for the same dataset, in every process.

    Raises:
        ConfigurationError: It holds something of which that cannot be said.
    """
    try:
        return _digest(dataset, {})
    except Exception as error:
        raise ConfigurationError(
            f"it cannot be told whether this {type(dataset).__name__} is what a cache was made of ({error}); "
            'say so yourself with fingerprint="...", and change that text when the dataset changes'
        ) from error


def given(fingerprint: str, *more: Any) -> bytes:
    """Return that of a text of the user's."""
    return hashlib.blake2b(repr((fingerprint, *more)).encode(), digest_size=_BYTES).digest()


def _digest(thing: Any, seen: dict[int, Any]) -> bytes:
    written = _Hash()
    _Pickler(written, seen).dump(thing)
    return written.hash.digest()


class _Hash:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=_BYTES)

    def write(self, data: Any) -> None:
        self.hash.update(data)


class _Pickler(pickle.Pickler):
    """Pickles into a hash, what is equal alike: without the memo, by which it would matter what is the same object."""

    def __init__(self, file: Any, seen: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self.fast = True
        self._seen = seen

    def persistent_id(self, obj: Any) -> Any:
        """Name what is not pickled as it is."""
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind in (set, frozenset):
            return kind.__name__, sorted(_digest(item, self._seen) for item in obj)
        if isinstance(obj, MemoryFile):
            return "memory", _content(obj)
        if isinstance(obj, np.memmap) and obj.filename:
            changed = os.stat(obj.filename).st_mtime_ns
            return "memmap", os.fspath(obj.filename), changed, obj.offset, obj.shape, obj.dtype.str
        if kind is torch.Tensor and obj.device.type == "cpu":
            return "tensor", str(obj.dtype), tuple(obj.shape), _bytes_of(obj)
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        return None

    def _function(self, function: types.FunctionType) -> Any:
        if id(function) in self._seen:
            return "function", function.__qualname__
        self._seen[id(function)] = function  # kept, so that no other gets its id
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        held = (_code(function.__code__), function.__defaults__, function.__kwdefaults__, cells)
        return "function", function.__module__, function.__qualname__, _digest(held, self._seen)

    def _class(self, kind: type) -> Any:
        name = kind.__module__, kind.__qualname__
        if id(kind) in self._seen or _is_installed(kind.__module__):
            return "class", *name
        self._seen[id(kind)] = kind
        held = {key: _plain_function(value) for key, value in sorted(vars(kind).items()) if _is_code(value)}
        bases = [base for base in kind.__bases__ if base is not object]
        return "class", *name, _digest((held, bases), self._seen)


def _content(file: MemoryFile) -> bytes:
    """Return what tells the rows of a list from others; a file that is written to is told from none."""
    memory = file.map()
    return hashlib.blake2b(memory[24:], digest_size=_BYTES).digest() if memory[:8] == KIND else b""


def _bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1)
    return hashlib.blake2b(whole.view(torch.uint8).numpy().data, digest_size=_BYTES).digest()


def _code(code: types.CodeType) -> Any:
    return code.co_code, list(map(_constant, code.co_consts)), code.co_names, code.co_varnames


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_installed(module: str) -> bool:
    """Whether code is of a package or of Python, and changes with versions rather than with the user's work."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or "site-packages" in file or file.startswith(sys.base_prefix + "/lib/python")


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, property))


def _plain_function(value: Any) -> Any:
    if isinstance(value, property):
        return [_plain_function(one) for one in (value.fget, value.fset) if one is not None]
    return getattr(value, "__func__", value)
