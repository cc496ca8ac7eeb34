"""``num_workers="auto"``: the number that there is, what it may be, and that the data do not depend on it."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.machine import usable_cores
from asyncloader.settings import AutoWorkers
from tests.test_num_workers import Stream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Drawing(Dataset[Any]):
    """Samples with random numbers."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3), np.random.rand()


class Stateful(Drawing):
    """A dataset with a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def bits(batch: Any) -> Any:
    """What must be the same."""
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


class Whims:
    """A controller that looks at each batch, and wants another number each time."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.here, self.elsewhere = 2, 0
        self.due = 0.0
        self.reason = "a whim"

    def begin(self) -> None:
        """Another run has begun."""

    def observe(self, load: Any) -> int:
        """Want the next number."""
        self.here = self.numbers[load.made % len(self.numbers)]
        return self.here

    def limit(self, count: int) -> None:
        """There cannot be so many."""
        self.here = count


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_data_do_not_depend_on_the_number(backend: Any, persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the controller wants, at every batch; also when a run begins in the middle of it."""

    def epochs(num_workers: Any) -> list[Any]:
        torch.manual_seed(5)
        options: dict[str, Any] = {"persistent_workers": persistent, "worker_backend": backend}
        dataset: Any = Drawing() if backend == "process" else range(120)
        loader: Any = DataLoader(dataset, 2, shuffle=True, num_workers=num_workers, **options)
        seen = [bits(batch) for _ in range(2) for batch in loader]
        loader.close()
        return seen

    fixed = epochs(1)
    whims = Whims([1, 3, 2, 4, 1])
    monkeypatch.setattr("asyncloader.iteration.workplace.Controller", lambda *args, **kwargs: whims)
    assert epochs("auto") == fixed


def test_the_number_is_an_int_that_remembers() -> None:
    """So libraries read it, and loaders that are made anew of it look after themselves too."""
    loader = DataLoader(Drawing(), num_workers="auto", max_workers=5)
    assert loader.num_workers == 2
    assert isinstance(loader.num_workers, int)
    assert json.dumps(loader.num_workers) == "2"
    anew: Any = DataLoader(Drawing(), num_workers=loader.num_workers, max_workers=loader.max_workers)
    assert anew._settings().is_auto
    for made in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert made._settings().is_auto
        assert made.max_workers == 5
    loader.set_num_workers(3)
    assert (loader.num_workers, loader._settings().is_auto) == (3, False)


def test_what_was_found_is_for_the_next_epoch_and_in_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this loader and of one that goes on; but no more than that may have."""
    whims = Whims([3])
    monkeypatch.setattr("asyncloader.iteration.workplace.Controller", lambda *args, **kwargs: whims)
    loader = DataLoader(Drawing(), 2, num_workers="auto")
    assert loader.state_dict()["num_workers"] == 2
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert loader.num_workers == 3
    state = loader.state_dict()
    assert state["num_workers"] == 3
    list(iterator)
    assert loader.state_dict()["num_workers"] == 3
    for most, expected in ((None, 3), (2, 2)):
        resumed: Any = DataLoader(Drawing(), 2, num_workers="auto", max_workers=most)
        resumed.load_state_dict(state)
        assert resumed.num_workers == expected
    fixed = DataLoader(Drawing(), 2, num_workers=1)
    fixed.load_state_dict(state)
    assert fixed.num_workers == 1


def test_how_many_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores, shared among the ranks of the machine; more that wait; or what the user says."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cores = usable_cores()
    settings = DataLoader(Drawing(), num_workers="auto")._settings()
    assert (settings.most_computing, settings.most_waiting) == (cores, 4 * cores)
    settings = DataLoader(Drawing(), num_workers="auto", max_workers=1)._settings()
    assert (settings.num_workers, settings.most_computing, settings.most_waiting) == (1, 1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(8 * cores))
    settings = DataLoader(Drawing(), num_workers="auto")._settings()
    assert (settings.most_computing, settings.most_waiting) == (1, 4)


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (Stream(), {}, "an iterable dataset is divided"),
        (Stateful(), {}, "a state of its own in each"),
        (Drawing(), {"seeding": "worker"}, 'with seeding="worker"'),
        (Drawing(), {"max_workers": 0}, "max_workers should be an integer of at least 1"),
        (Drawing(), {"max_workers": 3, "num_workers": 2}, "max_workers is for num_workers"),
    ],
    ids=["stream", "state", "seeding", "bound", "fixed"],
)
def test_what_cannot_work_is_refused_at_once(dataset: Any, options: Any, why: str) -> None:
    """And says why."""
    with pytest.raises(ConfigurationError, match=why):
        DataLoader(dataset, **{"num_workers": "auto", **options})


def test_the_verdict_gives_no_advice_about_it() -> None:
    """It says who looks after it."""
    loader = DataLoader(Drawing(), 2, num_workers="auto")
    list(loader)
    assert "num_workers" not in loader.stats().verdict.advice
    assert loader.stats().options["auto"]


def test_nobody_is_warned_of_more_workers_than_cores(recwarn: pytest.WarningsRecorder) -> None:
    """Who waits needs no core."""
    loader: Any = DataLoader(Drawing(), num_workers="auto")
    loader.num_workers = AutoWorkers(1000)
    loader.check_worker_number_rationality()
    assert not [warning for warning in recwarn if "This DataLoader will create" in str(warning.message)]
