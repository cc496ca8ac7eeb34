"""States of users in the states of loaders: JSON where that says all of them, which is small, and safe to read.

Keys of samples may be tuples as well, which JSON would make lists of: they are written as Python's literals.
"""

from __future__ import annotations

import copy
import json
import math
from ast import literal_eval
from typing import Any

import numpy as np

_SCALARS = frozenset((str, int, float, bool, type(None)))


def says_all(state: Any) -> bool:
    """Whether JSON says all of a state, its types included: no tuple, no other class, no key that is not a string."""
    kind = type(state)
    if kind is dict:
        return all(type(key) is str for key in state) and says_all(list(state.values()))
    if kind is list:
        return all(part in _SCALARS or part is dict or part is list for part in set(map(type, state))) and all(
            map(says_all, [part for part in state if type(part) not in _SCALARS])
        )
    return kind in _SCALARS


def plain(state: Any) -> Any:
    """Write a user's state down as JSON where that says all of it; otherwise return a copy of it."""
    written = as_text(state)
    return copy.deepcopy(state) if written is state else written


def as_text(state: Any) -> Any:
    """Write a user's state down as JSON where that says all of it; otherwise return the state itself."""
    if state is None:
        return None
    try:
        if says_all(state):
            return json.dumps(state)
    except (ValueError, RecursionError):  # it contains itself, or is very deep
        pass
    return state


def unplain(state: Any) -> Any:
    """Turn what `plain` returned into the user's state, a new one each time."""
    return json.loads(state) if isinstance(state, str) else copy.deepcopy(state)


def plain_keys(keys: Any) -> Any:
    """Write keys down as what JSON says all of. Those of unknown classes stay as they are; JSON then refuses them."""
    try:
        if says_all(keys):  # most are
            return {"keys": keys} if type(keys) is dict else keys
        keys = _built_in(keys)
        return keys if says_all(keys) else {"literal": repr(keys)}
    except (TypeError, ValueError, RecursionError):
        return {"keys": keys, "not JSON": b""}


def unplain_keys(written: Any) -> Any:
    """Read what `plain_keys` has written."""
    if type(written) is not dict:
        return written
    return literal_eval(written["literal"]) if "literal" in written else written["keys"]


def _built_in(key: Any) -> Any:
    """Return the same key, of classes of Python's."""
    kind = type(key)
    if kind in (tuple, list):
        return kind(map(_built_in, key))
    if isinstance(key, (np.integer, np.str_, np.bool_)) and kind is not np.timedelta64:
        return key.item()
    if (kind not in _SCALARS and kind is not bytes) or (kind is float and not math.isfinite(key)):
        raise TypeError
    return key
