"""Numbers that look random, made of others: what seeds and orders are told apart by."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Mix integers into 64 bits that look random: the finalizer of splitmix64, over each number in turn.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    return mix_on(0, *numbers)


def mix_on(state: int, *numbers: int) -> int:
    """Mix further integers into what `mix` has returned: ``mix_on(mix(1), 2) == mix(1, 2)``."""
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
