"""Random generators of any kind, the global ones among them: their states, in memory and as text.

kind                            who has one                          state as text
torch.Generator                 torch, loaders, samplers             7 kB
random.Random                   Python's module                      4 kB
numpy's RandomState             numpy's module                       4 kB
numpy's Generator               datasets                             not needed
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from time import sleep
from typing import Any

import numpy as np
import numpy.random  # otherwise every forked worker would import it by itself: 9 to 30 ms before its first batch
import torch

KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_numpy: Any = np.random.mtrand
GLOBAL: tuple[Any, ...] = (torch.default_generator, random._inst, _numpy._rand)
"""Those that whoever has no generator of its own draws from: torch's, Python's, numpy's."""


_FEW_OBJECTS = 50
_COLLECTIONS = 20 if sys.version_info < (3, 12) else 0
"""So often at most, where garbage is collected when an object is made. Later versions do so between lines of Python."""


def state_of(generator: Any) -> Any:
    """Return the state of a generator, which it can be set to."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state() if is_old(generator) else generator.get_state(legacy=False)  # or it would warn
    if isinstance(generator, random.Random):
        return generator.getstate()
    _collect_what_is_due()
    return generator.get_state()


def _collect_what_is_due() -> None:
    """Collect garbage before torch is asked for a state, so that hardly any is collected meanwhile.

    torch makes the tensor while it holds the generator's lock. If garbage is collected there, and that frees a tensor,
    other threads run meanwhile; one that asks for a state as well waits for that lock, and for ever, as it keeps the
    interpreter's.
    """
    for _ in range(_COLLECTIONS):
        threshold = gc.get_threshold()[0]
        if not (gc.isenabled() and 0 < threshold < gc.get_count()[0] + min(_FEW_OBJECTS, threshold // 2)):
            break
        gc.collect(0)
        sleep(0)  # another thread that collects has its turn: nothing is collected while it does


def is_old(generator: np.random.RandomState) -> bool:
    """Whether a generator is numpy's first kind: a Mersenne Twister, which can be seeded again."""
    return isinstance(generator._bit_generator, np.random.MT19937)


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that it had."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def check_of(generator: Any, state: Any = None) -> int:
    """Return a number that tells a state of a generator, by default where it is, from others. 1 to 20 us.

    It is the same in any process, and with the mark of `mark_of`.
    """
    state = state_of(generator) if state is None else state
    if isinstance(generator, torch.Generator):
        return zlib.crc32(state.numpy()[_SEED_BYTES if generator.device.type == "cpu" else 0 :].data)
    # A Gaussian that was made with the last one, and is kept for the next draw, belongs to the state. A hash of numbers
    # alone is the same in every process.
    if isinstance(generator, random.Random):
        return (hash(state[1]) ^ (0 if state[2] is None else hash(state[2]))) & 0xFFFFFFFF
    if isinstance(generator, np.random.RandomState) and type(state) is tuple:
        _, words, position, has_gauss, gauss = state
        return zlib.crc32(words.data, int(position)) ^ (hash(gauss) & 0xFFFFFFFF if has_gauss else 0)
    return zlib.crc32(
        json.dumps(state, default=lambda words: words.tolist()).encode()
    )  # not `repr`: numpy's can be set


_WORD = (1 << 32) - 1
_PLACES = 624
"""Words that a Mersenne Twister makes at a time."""
_PIECE = 4 * _PLACES * 4096
_MOST_PIECES = 25
"""So many bytes of it are looked at in one go, and so often at most: 64 million draws, for which 0.4 s are taken."""
_MARK = 0x6C6F6164 << 32
_SEED_BYTES = 8  # of the state of torch's generators for the CPU, which do not draw by it


def mark_of(generator: Any) -> Any:
    """Mark a generator; return what tells later whether it was seeded or set since. It draws the same as before.

    torch's generators name their seeds, and whoever seeds one may give it the seed that it had. So the upper half of
    the seed that it names is changed, until somebody sets it.
    """
    if not isinstance(generator, torch.Generator):
        return state_of(generator)
    if generator.device.type == "cpu":  # others draw by the seed that they name
        state = state_of(generator)
        state.numpy()[:_SEED_BYTES].view(np.uint64)[:] = generator.initial_seed() & _WORD | _MARK
        generator.set_state(state)
    return generator.initial_seed()


def is_set_since(generator: Any, mark: Any) -> bool:
    """Whether a generator was seeded, or set to a state, since that mark; draws alone do not count.

    Python's and numpy's were if 64 million draws after the mark do not lead to where they are.
    """
    if isinstance(generator, torch.Generator):
        return bool(generator.initial_seed() != mark)
    state = state_of(generator)
    if dict in (type(state), type(mark)):  # another kind of numpy's
        return False
    (words, place), (then, place_then) = _twister(state), _twister(mark)
    if np.array_equal(words, then):
        return place < place_then
    sought, twin = _at(words, 0).bytes(64), _at(then, _PLACES)
    return not any(sought in twin.bytes(_PIECE) for _ in range(_MOST_PIECES))


def _at(words: Any, place: int) -> np.random.RandomState:
    """Return a Mersenne Twister in this state."""
    twister = np.random.RandomState(0)
    twister.set_state(("MT19937", words, place, 0, 0.0))
    return twister


def _twister(state: Any) -> tuple[Any, int]:
    """Return the words of a Mersenne Twister, Python's or numpy's, and its place in them."""
    if isinstance(state[0], str):
        return state[1], state[2]
    *words, place = state[1]
    return np.array(words, np.uint32), place


def states_of(generators: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return generators with their states, for `restore`."""
    return [(generator, state_of(generator)) for generator in generators]


def restore(states: Sequence[tuple[Any, Any]]) -> None:
    """Set generators to states that they had. A caller that a Ctrl-C takes out of here calls once more."""
    for pair in states:
        set_state(*pair)


@contextlib.contextmanager
def left_alone(generators: Iterable[Any] = GLOBAL) -> Iterator[None]:
    """Leave generators as they are, whatever is drawn from them, or seeded, meanwhile. 100 us for the global ones."""
    states = states_of(generators)
    try:
        yield
    finally:
        try:
            restore(states)
        except BaseException:  # Ctrl-C: all are set once more
            restore(states)
            raise


# A thread that draws from a global generator of torch or numpy holds a lock, without the lock of the interpreter. In a
# process that is forked meanwhile, the lock is held for ever.


def wait_drawn() -> None:
    """Wait until no other thread draws from torch's global generator, right before a fork.

    To read the state takes the generator's lock, here with the interpreter's held: threads that come out of a draw wait
    for that one before they draw again. Not those that draw several times in one call of C++.
    """
    state_of(torch.default_generator)


def unlock_in_child() -> None:
    """Have nobody hold numpy's global generator: the thread that did is not in this process."""
    with contextlib.suppress(AttributeError):  # private to CPython and numpy
        _numpy._rand._bit_generator.lock._at_fork_reinit()


def encode(generator: Any, state: Any) -> Any:
    """Write the state of a generator of torch's, Python's or numpy's as plain data."""
    if isinstance(generator, torch.Generator):
        return _packed(state.numpy())
    if isinstance(generator, random.Random):
        version, words, gauss = state
        return [version, _packed(np.array(words, np.uint32)), gauss]
    name, keys, *rest = state
    return [name, _packed(keys), *rest]


def decode(generator: Any, plain: Any) -> Any:
    """Read what `encode` has written."""
    if isinstance(generator, torch.Generator):
        return torch.from_numpy(_unpacked(plain, np.uint8))
    if isinstance(generator, random.Random):
        version, words, gauss = plain
        return version, tuple(_unpacked(words, np.uint32).tolist()), gauss
    name, keys, *rest = plain
    return (name, _unpacked(keys, np.uint32), *rest)


def _packed(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _unpacked(text: str, kind: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), kind).copy()
