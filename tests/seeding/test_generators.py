"""Generators of any kind: their states are kept, told apart, written down, and given back."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.seeding.generators import (
    GLOBAL,
    check_of,
    decode,
    encode,
    is_set_since,
    left_alone,
    mark_of,
    set_state,
    state_of,
)
from tests.faults.test_interrupts_everywhere import NEVER, CtrlC

KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator(), lambda own: torch.rand(1, generator=own).item()),
    "python": (random.Random(1), lambda own: own.gauss(0, 1)),
    "numpy": (np.random.RandomState(1), lambda own: own.standard_normal()),
    "numpy's new ones": (np.random.default_rng(1), lambda own: own.random()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_told_apart_from_what_it_was(kind: str) -> None:
    """And is at the same place again once it is set back."""
    generator, draw = KINDS[kind]
    draw(generator)
    state, check = state_of(generator), check_of(generator)
    expected = [draw(generator), draw(generator)]
    assert check_of(generator) != check
    set_state(generator, state)
    assert check_of(generator) == check
    with left_alone([generator]):
        assert [draw(generator), draw(generator)] == expected
    assert check_of(generator) == check


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_a_gaussian_that_was_kept_for_the_next_draw_is_seen_to_be_drawn(kind: str) -> None:
    """Two come of the same numbers: the second draw moves nothing else."""
    generator, draw = KINDS[kind]
    generator.seed(5)
    checks = [check_of(generator)]
    for _ in range(2):
        draw(generator)
        checks.append(check_of(generator))
    assert len(set(checks)) == 3


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_state_goes_through_json(kind: str) -> None:
    """The second number of a pair of normal ones too, which is kept for later."""
    generator, draw = KINDS[kind]
    draw(generator)
    text = json.dumps(encode(generator, state_of(generator)))
    expected = [draw(generator), draw(generator)]
    set_state(generator, decode(generator, json.loads(text)))
    assert [draw(generator), draw(generator)] == expected


def test_the_global_generators_are_those_that_modules_draw_from() -> None:
    """torch's, Python's and numpy's."""
    for generator, draw in zip(GLOBAL, (partial(torch.rand, 1), random.random, np.random.rand), strict=True):
        check = check_of(generator)
        draw()
        assert check_of(generator) != check


class Watched(torch.Generator):
    """Knows whether it is asked for its state at the moment."""

    is_asked = False

    def get_state(self) -> torch.Tensor:
        self.is_asked = True
        try:
            return super().get_state()
        finally:
            self.is_asked = False


@pytest.mark.parametrize("left", [1, 2, 3, 30])
def test_no_garbage_is_collected_while_torch_holds_a_generator(left: int) -> None:
    """Other threads might run by that, and wait for the generator with the lock of the interpreter."""
    watched, collected, made = Watched(), list[bool](), list[list[Any]]()

    def note(phase: str, info: dict[str, Any]) -> None:
        collected.append(watched.is_asked)

    gc.callbacks.append(note)
    try:
        while gc.get_count()[0] + left <= gc.get_threshold()[0]:
            made.append([])
        state_of(watched)
    finally:
        gc.callbacks.remove(note)
    assert not any(collected)


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)
def test_an_interrupt_leaves_the_trainer_its_generators() -> None:
    """At whichever moment it comes: a sampler draws from them later."""
    moment = 0
    while True:
        moment += 1
        before = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
        with CtrlC(NEVER), left_alone():
            pass
        try:
            with CtrlC(moment), left_alone():
                random.random(), np.random.rand(), torch.rand(1)
            break
        except KeyboardInterrupt:
            pass
        assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == before, moment
    assert moment > 4


@pytest.mark.parametrize("generator", [random.Random(3), np.random.RandomState(3)], ids=["random", "numpy"])
def test_draws_are_told_from_seeds(generator: Any) -> None:
    """However many: a matrix of weights is a million. What is seeded, or put back, may be drawn from as well."""
    seed = generator.seed
    for count in (0, 1, 311, 312, 313, 1_500_000):
        mark = mark_of(generator)
        generator.getrandbits(64 * count + 1) if isinstance(generator, random.Random) else generator.random_sample(
            count
        )
        assert not is_set_since(generator, mark), count
        if count:
            seed(count)
            generator.random() if isinstance(generator, random.Random) else generator.random_sample()
            assert is_set_since(generator, mark)


def test_of_other_kinds_nobody_knows_how_far_they_were_drawn_from() -> None:
    """So they count as not seeded."""
    generator = np.random.RandomState(np.random.PCG64(3))
    mark = mark_of(generator)
    generator.random_sample()
    assert not is_set_since(generator, mark)
