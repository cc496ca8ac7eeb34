"""Streams whose persistent workers are killed at the edges of epochs.

The stream provides its state, that of the generator of its noise included. What has to hold: each epoch gives each
sample once, with the noise and in the order of a run without kills; and a state that is taken between two epochs begins
the next one, in the same loader and in a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from asyncloader import DataLoader
from tests.faults.chaos.chaotic import share
from tests.faults.chaos.disturbed import difference
from tests.faults.chaos.left import nothing_left
from tests.support import generators

EPOCHS = 4


class Stream(IterableDataset[Any]):
    """Numbers with noise, each worker's share of them; the stream provides its state, with that of its generator.

    Args:
        length: Samples of an epoch, of all workers together.
        seed: Of the noise.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.at = 0
        self.passes = 0
        self.resumes = False
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        first, step = share()
        if not self.resumes:
            self.at = 0
        self.resumes = False
        while (index := first + self.at * step) < self.length:
            self.at += 1
            yield self.passes, index, self.rng.random()
        self.passes += 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return how far this worker is, and what its noise goes on from."""
        version, words, gauss = self.rng.getstate()
        return {"at": self.at, "passes": self.passes, "rng": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        version, words, gauss = state["rng"]
        self.at, self.passes, self.resumes = state["at"], state["passes"], bool(state["at"])
        self.rng.setstate((version, tuple(words), gauss))


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Of the stream.
        length: Of an epoch.
        options: Of the loader.
        kills: By epoch: which worker, and when it is killed: "begun", "first" (after the first batch), "last" (after
            the last batch), "over".
        cuts: After which epochs a state is taken, and who goes on: "same" or "new".
    """

    seed: int
    length: int
    options: dict[str, Any]
    kills: dict[int, tuple[int, str]]
    cuts: dict[int, str]

    @classmethod
    def draw(cls, seed: int, place: str | None = None) -> Plan:
        """Draw a run. Its workers are processes, whatever is said: others cannot be killed."""
        chance = random.Random(f"{seed} edges")
        workers = chance.randint(1, 3)
        options = {
            "num_workers": workers,
            "batch_size": chance.choice([1, 2, 4]),
            "prefetch_factor": chance.choice([1, 2, 4]),
            "persistent_workers": chance.random() < 0.8,
            "snapshot_every_n_steps": chance.choice([1, 1, 2, 5]),
        }
        moments = ["begun", "first", "last", "over"]
        kills = {epoch: (chance.randrange(workers), chance.choice(moments)) for epoch in range(EPOCHS)}
        kills = {epoch: kill for epoch, kill in kills.items() if chance.random() < 0.6}
        cuts = {epoch: chance.choice(["same", "new"]) for epoch in range(EPOCHS - 1) if chance.random() < 0.3}
        return cls(seed, chance.randint(1, 40), options, kills, cuts)

    def check(self) -> list[str]:
        """Play the run; return what happened in it.

        Raises:
            AssertionError: if an epoch is not that of a run without kills and states.
        """
        with nothing_left():
            whole = list(self._train(dataclasses.replace(self, kills={}, cuts={})))
            seen = list(self._train(self))
        expected = [sorted(epoch) for epoch in whole]
        for number, epoch in enumerate(expected):
            indices = [index for _, index, _ in epoch]
            assert indices == list(range(self.length)), f"epoch {number} of the undisturbed run: {indices}"
        assert seen == whole, "killed at an edge: " + difference(seen, whole)
        return [
            *(f"killed: {moment}, epoch {epoch}" for epoch, (_, moment) in self.kills.items()),
            *(f"cut: {who}" for who in self.cuts.values()),
        ]

    def _train(self, plan: Plan) -> Iterator[list[tuple[int, int, float]]]:
        generators.seed_all(plan.seed)
        loader = self._make_loader()
        try:
            for number in range(EPOCHS):
                worker, moment = plan.kills.get(number, (0, ""))
                iterator = iter(loader)
                workers = list(iterator._workers)
                if moment == "begun":
                    _kill(workers[worker])
                seen: list[tuple[int, int, float]] = []
                for batch in iterator:
                    if not seen and moment == "first":
                        _kill(workers[worker])
                    passes, indices, noise = (part.tolist() for part in batch)
                    seen += zip(passes, indices, noise, strict=True)
                    if len(seen) == plan.length and moment == "last":
                        _kill(workers[worker])
                yield seen
                if moment == "over":
                    _kill(workers[worker])
                del iterator, workers
                if number in plan.cuts:
                    state = json.loads(json.dumps(loader.state_dict()))
                    if plan.cuts[number] == "new":
                        loader.close()
                        loader = self._make_loader()
                    loader.load_state_dict(state)
        finally:
            loader.close()

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            Stream(self.length, self.seed), multiprocessing_context="fork", max_retries=20, **self.options
        )


def _kill(worker: Any) -> None:
    """Kill a worker, unless it has gone already, as those of an epoch that is over have, or goes in this moment."""
    if worker.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
