"""What a dataset is, in 32 bytes: another dataset, or the same with other code or content, has others.

Its class with the code of its methods and the attributes of the class, and all that its own attributes hold. What its
methods call elsewhere, and what the files contain whose names it holds, is not seen; nor are attributes of classes that
cannot be pickled, such as locks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import types
from typing import Any

import torch

from asyncloader.datasets.arrays import Mapped, mapped
from asyncloader.datasets.blocks import KIND
from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.errors import ConfigurationError

_PLAIN = frozenset({int, str, float, bool, bytes, complex, list, tuple, dict, type(None)})
_BYTES = 32
_ANNOTATIONS = ("__annotate__", "__annotate_func__")
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_LRUCache = type(functools.cache(len))


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
            return kind.__name__, sorted(_digest(item, dict(self._seen)) for item in obj)  # in no order: each by itself
        if isinstance(obj, MemoryFile):
            return "memory", _content(obj)
        if (place := obj if kind is Mapped else mapped(obj)) is not None:
            return "memmap", os.stat(place.path).st_mtime_ns, *place
        if kind is torch.Tensor and obj.device.type == "cpu":
            return "tensor", str(obj.dtype), tuple(obj.shape), _bytes_of(obj)
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, types.ModuleType):
            return "module", obj.__name__
        if (code := _called(obj)) is not None:
            return kind.__name__, _digest(code, self._seen)
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
        held = [(key, self._entry(value)) for key, value in sorted(vars(kind).items()) if not _is_pythons(key, value)]
        bases = [base for base in kind.__bases__ if base is not object]
        return "class", *name, _digest((held, bases), self._seen)

    def _entry(self, value: Any) -> bytes:
        """Return that of an entry of a class: a method or an attribute; none of an attribute that cannot be pickled."""
        seen = dict(self._seen)  # what was seen on the way to an error has not been told
        try:
            digest = _digest(value, seen)
        except Exception:
            if isinstance(value, types.FunctionType) or _called(value) is not None:
                raise
            wrapped = getattr(value, "__wrapped__", None)  # of a decorator that is an object
            return self._entry(wrapped) if isinstance(wrapped, types.FunctionType) else b""
        self._seen.update(seen)
        return digest


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
    return file is None or file.startswith(_LIBRARY) or "site-packages" in file or "dist-packages" in file


def _is_pythons(name: str, value: Any) -> bool:
    """Whether an entry of a class is no method and no attribute: bookkeeping of Python's, or of a decorator's."""
    if name in _ANNOTATIONS:
        return True
    if not (name.startswith("__") and name.endswith("__")):
        return False
    return isinstance(value, type) or not (callable(value) or _called(value) is not None)


def _called(value: Any) -> Any:
    """Return what a wrapper of Python's calls, where its pickle would not tell; None of others."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, functools.cached_property):
        return value.func
    if isinstance(value, functools.singledispatchmethod):
        return value.func, dict(value.dispatcher.registry)
    return value.__wrapped__ if isinstance(value, _LRUCache) else None
