"""Samplers that draw while they are read, and the generators of the program: the same order after every resume.

What tests/run/test_generators.py goes through without batches, here with loaders, workers and read-ahead as they
are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

from asyncloader import DataLoader
from tests.support import effort, generators

LENGTH = 18
BATCH = 4

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Lazily(Sampler[int]):
    """Draws each index from one of the global generators in turn."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            drawn = (random.random, np.random.rand, lambda: float(torch.rand(())))[number % 3]()
            yield int(drawn * 1000)


SAMPLERS: dict[str, Callable[[torch.Generator], Any]] = {
    "shuffled": lambda own: RandomSampler(range(LENGTH), generator=own),
    "two permutations": lambda own: RandomSampler(range(LENGTH // 2), num_samples=LENGTH - 1, generator=own),
    "replacement": lambda own: RandomSampler(range(1000), True, 2 * LENGTH, own),
    "lazily": lambda own: Lazily(),
}

NONE: dict[str, Any] = {"num_workers": 0}
THREADS: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without workers": (NONE, NONE),
    "threads": (THREADS, THREADS),
    "threads, then none": (THREADS, NONE),
    "none, then threads": (NONE, THREADS),
    "one worker, then four": ({"num_workers": 1}, {"num_workers": 4}),
    "three workers, then none": ({"num_workers": 3}, NONE),
    "none, then two workers": (NONE, {"num_workers": 2, "worker_backend": "process"}),
    "persistent workers": (
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True},
    ),
}
CASES = [
    (sampler, how, way)
    for sampler in SAMPLERS
    for how in ("restored", "not restored", "in place")
    for way in WAYS
    # Real processes take their time: with the samplers of which most can go wrong.
    if NONE in WAYS[way] or THREADS in WAYS[way] or sampler in ("replacement", "lazily")
    # What draws on while it is read goes on exactly where nothing is put back: nobody else draws here.
    if sampler != "lazily" or how == "not restored"
    if how != "in place" or way in ("without workers", "threads", "persistent workers")
]


class Program:
    """A program with its generators and a loader."""

    def __init__(self, sampler: str, seed: int, options: dict[str, Any]) -> None:
        generators.seed_all(seed)
        self.own = torch.Generator().manual_seed(seed)
        made = SAMPLERS[sampler](self.own)
        self.loader = DataLoader(range(1000), BATCH, sampler=made, generator=self.own, **options)  # type: ignore[arg-type]

    def epoch(self) -> list[Any]:
        return [batch.tolist() for batch in self.loader]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("sampler", "how", "way"), CASES)
def test_a_run_is_resumed_at_every_batch(sampler: str, how: str, way: str) -> None:
    """The rest of the epoch, and the epoch after it, are those of the run that was not interrupted."""
    was, now = WAYS[way]
    if how == "in place":
        now = was
    whole = Program(sampler, 1, was)
    epochs = [whole.epoch() for _ in range(3)]
    whole.loader.close()
    in_process = all(options in (NONE, THREADS) for options in (was, now))
    step = (1 if in_process else 3) * (2 if effort.is_quick else 1)
    for done in range(0, len(epochs[1]) + 1, step):
        program = Program(sampler, 1, was)
        program.epoch()
        iterator = iter(program.loader)
        for _ in range(done):
            next(iterator)
        state, saved = json.loads(json.dumps(program.loader.state_dict())), generators.save(program.own)
        if how != "in place":
            iterator.close()  # type: ignore[attr-defined]
            program.loader.close()
            program = Program(sampler, 1 + done // step % 2, now)  # with the same seed as before, too
        if how == "restored":
            generators.restore(saved, program.own)
        program.loader.load_state_dict(state)
        assert program.epoch() == epochs[1][done:], f"after {done} batches"
        assert program.epoch() == epochs[2], f"after {done} batches"
        program.loader.close()
