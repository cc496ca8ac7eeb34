"""Which sample of a batch keeps it from being collated: one with a part that cannot be, or unlike the others.

For errors only, and of what the samples show from outside: types, shapes, lengths, keys.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data._utils.collate import default_collate_fn_map

_FEW = 64  # parts of a sample that are looked into; a sequence with more is known by its length
_DEEPEST = 8


_NOWHERE = sys.maxsize

Outline: TypeAlias = tuple[tuple[str, str, bool], ...]
"""A sample from outside: its parts from the outermost on, each with its path in Python's notation, words for it, and
whether torch's default collation takes such a thing."""


def find_odd_sample(samples: Sequence[Any], *, must_be_alike: bool) -> tuple[int, str] | None:
    """Find the sample that collating has most likely failed for.

    Args:
        samples: The samples of the batch.
        must_be_alike: They are collated by torch's default, which stacks them. Other functions may expect samples that
            differ: then a None counts only where another sample has none.

    Returns:
        The sample's position and what is odd about the sample, to follow "the sample with the index 7"; or None.
    """
    try:
        outlines = [tuple(_outline(sample, "", 0)) for sample in samples]
    except Exception:  # of the user's classes; the error is raised all the same
        return None
    if not outlines:
        return None
    is_bad = _cannot_be_collated if must_be_alike else _is_none
    first = [next((place for place, part in enumerate(outline) if is_bad(part)), _NOWHERE) for outline in outlines]
    if (place := min(first)) < _NOWHERE and (must_be_alike or _NOWHERE in first):
        position = first.index(place)  # collation goes from part to part, and in each from sample to sample
        path, words = outlines[position][place][:2]
        return position, f"has {words} at {path}" if path else f"is {words}"
    usual = Counter(outlines).most_common(1)[0][0]
    position = next((number for number, outline in enumerate(outlines) if outline != usual), -1)
    if not must_be_alike or position < 0:
        return None
    return position, _difference(outlines[position], usual)


def _difference(odd: Outline, usual: Outline) -> str:
    """Say in which part two outlines differ first. Lengths and keys come before what is in them, so both have it."""
    (path, ours, _), (_, theirs, _) = next(pair for pair in zip(odd, usual, strict=False) if pair[0] != pair[1])
    at = f" at {path}" if path else ""
    verb = "has" if at else "is"
    return f"{verb} {ours}{at}, where others of the batch {'have' if at else 'are'} {theirs}"


def _is_none(part: tuple[str, str, bool]) -> bool:
    return part[1] == "None"


def _cannot_be_collated(part: tuple[str, str, bool]) -> bool:
    return not part[2]


def _outline(thing: Any, path: str, depth: int) -> Iterator[tuple[str, str, bool]]:
    words = _unfit(thing)
    yield path, words or _words(thing), not words
    if depth == _DEEPEST:
        return
    if isinstance(thing, Mapping) and len(thing) <= _FEW:
        for key, value in thing.items():
            yield from _outline(value, f"{path}[{key!r}]", depth + 1)
    elif isinstance(thing, (list, tuple)) and len(thing) <= _FEW:
        for number, item in enumerate(thing):
            yield from _outline(item, f"{path}[{number}]", depth + 1)


def _unfit(thing: Any) -> str:
    """Say what torch's default collation cannot take, even if all samples have such a thing; "" for others."""
    name = type(thing).__name__
    if thing is None:
        return "None"
    if isinstance(thing, (float, int, str, bytes, Mapping, Sequence)):
        return ""
    if not isinstance(thing, (np.ndarray, np.generic)):
        return "" if isinstance(thing, tuple(default_collate_fn_map)) else f"a {name}"
    if thing.dtype.kind not in "biufc":
        return f"a {name} of the dtype {thing.dtype}"
    if not thing.dtype.isnative:
        return f"a {name} whose bytes are in the other order ({thing.dtype.str})"
    is_flipped = any(stride < 0 for stride in thing.strides)
    return f"a {name} that is a flipped view (.copy() makes one that can be collated)" * is_flipped


def _words(thing: Any) -> str:
    """Name a part by what torch's default collation looks at."""
    name = type(thing).__name__
    if isinstance(thing, (bool, int, float)):
        return "a number"
    if isinstance(thing, (str, bytes)):
        return f"a {name}"
    shape: Hashable = getattr(thing, "shape", None)
    if isinstance(shape, tuple):
        return f"a {name} of the shape {tuple(shape)}"
    if isinstance(thing, Mapping):
        return f"a {name} with the keys {_shortened(list(thing))}"
    if isinstance(thing, (list, tuple)):
        return f"a {name} of {len(thing)}"
    return f"a {name}"


def _shortened(keys: list[Any]) -> str:
    return str(keys) if len(keys) <= _FEW else f"{str(keys[:_FEW])[:-1]}, ...]"
