"""Checks of single options, with errors that say what is allowed, and of their names.

scheduling: Literal["static", "dynamic"]          one of these words
max_retries: Annotated[int, Least(0)]             an integer, 0 or more
concurrency: Annotated[int | None, Least(1)]      the same, or None
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

from asyncloader.errors import ConfigurationError

_ADVICE = {
    "seed": "the seed of the order and of augmentation is the generator's: generator=torch.Generator().manual_seed(3); "
    "or call torch.manual_seed(3) before the run",
    "rank": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "world_size": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "num_replicas": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "transform": "transforms are the dataset's; to_device(loader, device, transform=...) is for batches on a device",
}
"""Of arguments that other loaders have, and for which no name here is close."""

P = ParamSpec("P")
R = TypeVar("R")


class Least(NamedTuple):
    """In the type of an option: the smallest integer that is allowed, and what it counts."""

    least: int
    unit: str = ""


def check_of(kind: Any) -> Callable[[str, object], None] | None:
    """Return what checks an option, by name and value, against its type; None where that does not say what is allowed.

    The check raises a ConfigurationError for another value.
    """
    kind, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind)
    words = next((each for each in kinds if get_origin(each) is Literal), None)
    bound = next((mark for mark in marks if isinstance(mark, Least)), None)
    if words is None and bound is None:
        return None
    takes_objects = bool(set(kinds) - {words, type(None)})

    def check(name: str, value: object) -> None:
        if value is None and type(None) in kinds:
            return
        if words is not None and (isinstance(value, str) or not takes_objects):
            one_of(name, value, words)
        if bound is not None:
            at_least(name, value, least=bound.least, unit=bound.unit)

    return check


def one_of(name: str, value: object, kind: object) -> None:
    """Raise a ConfigurationError if a value is none of those of a `Literal`."""
    allowed = get_args(kind)
    if value not in allowed:
        close = get_close_matches(str(value), allowed, 1)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"{name} should be one of {', '.join(map(repr, allowed))}, but got {value!r}{meant}")


def says_auto(num_workers: object) -> bool:
    """Whether a number of workers is "auto", with which a loader is made. Other words are left to torch to refuse.

    Raises:
        ConfigurationError: if it is nearly that word.
    """
    if not isinstance(num_workers, str) or num_workers == "auto":
        return num_workers == "auto"
    if get_close_matches(num_workers.strip().lower(), ["auto"]):
        raise ConfigurationError(
            f"num_workers should be an integer or 'auto', but got {num_workers!r}. Did you mean 'auto'?"
        )
    return False


def no_word(num_workers: object) -> None:
    """Raise a ConfigurationError if the number of workers of a loader that is made already was set to "auto"."""
    if says_auto(num_workers):
        raise ConfigurationError(
            "num_workers should be a number where it is set later, but got 'auto': make the loader with "
            'num_workers="auto"'
        )


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}{end}": 1000**n for n, prefix in enumerate("KMGT", 1) for end in ("", "B")}
_UNITS |= {f"{prefix}I{end}": 1024**n for n, prefix in enumerate("KMGT", 1) for end in ("", "B")}


def as_bytes(name: str, value: Any) -> Any:
    """Return a number of bytes that may be written with a unit ("4GB", "512 MiB"), or as 4e9; others as they are.

    Raises:
        ConfigurationError: for a string that is no such number.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigurationError(
            f'{name} should be a number of bytes, or one with a unit such as "4GB" or "512MiB", but got {value!r}'
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


def at_least(name: str, value: Any, *, least: int, unit: str = "") -> int:
    """Return an integer of any kind, numpy's and torch's too, as Python's own.

    Raises:
        ConfigurationError: The value is no integer, or a smaller one.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:
            return number
    raise ConfigurationError(f"{name} should be an integer of at least {least}{unit}, but got {value!r}")


def checked(init: Callable[P, R]) -> Callable[P, R]:
    """Have a function say what a keyword that it does not know was meant to be.

    The signature stays that of the function: Lightning, `help()` and type checkers read it.
    """
    signature = inspect.signature(init)
    _, *names = signature.parameters

    @functools.wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in sorted(kwargs.keys() - signature.parameters.keys()):
            close = get_close_matches(name, names, 1)
            meant = f". Did you mean {close[0]!r}?" if close else ""
            meant = f": {_ADVICE[name]}" if name in _ADVICE else meant
            raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}{meant}")
        return init(*args, **kwargs)

    call.__dict__["__signature__"] = signature
    return call
