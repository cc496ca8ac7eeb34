"""``num_workers="auto"``: the number that there is, what it may be, and that the data do not depend on it."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader, LoaderStats
from asyncloader.machine import usable_cores
from asyncloader.options import AutoWorkers
from tests.support import inside
from tests.test_num_workers import Stream

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]


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
        self.num_workers = 2
        self.due = 0.0
        self.reason = "a whim"

    def begin_run(self) -> None:
        """Another run has begun."""

    def observe(self, now: float, num_workers: int, stats: LoaderStats) -> None:
        """Want the next number."""
        self.num_workers = self.numbers[stats.workers.batches % len(self.numbers)]


@pytest.mark.covering(1)
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
    monkeypatch.setattr("asyncloader.run.worker_iterator.Controller", lambda *args, **kwargs: whims)
    assert epochs("auto") == fixed


def test_the_number_is_an_int_that_remembers() -> None:
    """So libraries read it, and loaders that are made anew of it look after themselves too."""
    loader = DataLoader(Drawing(), num_workers="auto", max_workers=5)
    assert loader.num_workers == 2
    assert isinstance(loader.num_workers, int)
    assert json.dumps(loader.num_workers) == "2"
    anew: Any = DataLoader(Drawing(), num_workers=loader.num_workers, max_workers=loader.max_workers)
    assert inside.options(anew).is_auto
    for made in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert inside.options(made).is_auto
        assert made.max_workers == 5
    loader.set_num_workers(3)
    assert (loader.num_workers, inside.options(loader).is_auto) == (3, False)


@pytest.mark.parametrize("word", ["Auto", "4"])
def test_other_words_than_auto_are_torchs_to_refuse(word: Any) -> None:
    """In its words."""
    with pytest.raises(TypeError, match="'<' not supported"):
        DataLoader(Drawing(), num_workers=word)


@pytest.mark.parametrize("num_workers", [0, 1, "auto"])
def test_auto_is_said_when_a_loader_is_made(num_workers: Any) -> None:
    """As an attribute it is a number."""
    assert_refused_later("auto", 'make the loader with num_workers="auto"', num_workers=num_workers)
    assert_refused_later("auto", 'make the loader with num_workers="auto"', num_workers=1, persistent_workers=True)


def assert_refused_later(word: Any, meant: str, **options: Any) -> None:
    """Set an attribute to a word, and see that nothing begins."""
    loader: Any = DataLoader(Drawing(), **options)
    state = loader.state_dict()
    loader.num_workers = word
    for use in (iter, aiter, list, lambda it: it.set_num_workers(2), lambda it: it.load_state_dict(state)):
        with pytest.raises(ConfigurationError, match=re.escape(meant)):
            use(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_was_found_is_for_the_next_epoch(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this loader. One that goes on from its state finds out by itself."""
    whims = Whims([3])
    monkeypatch.setattr("asyncloader.run.worker_iterator.Controller", lambda *args, **kwargs: whims)
    loader = DataLoader(Drawing(), 2, num_workers="auto", persistent_workers=persistent)
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert loader.num_workers == 3
    list(iterator)
    assert (loader.num_workers, inside.options(loader).num_workers) == (3, 3)
    iter(loader)
    assert loader.stats().num_workers == 3
    loader.close()
    resumed = DataLoader(Drawing(), 2, num_workers="auto")
    resumed.load_state_dict(loader.state_dict())
    assert resumed.num_workers == 2


def test_how_many_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores, shared among the ranks of the machine; more that wait; or what the user says."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cores = usable_cores()
    settings = inside.options(DataLoader(Drawing(), num_workers="auto"))
    assert (settings.most_computing, settings.most_waiting) == (cores, 4 * cores)
    settings = inside.options(DataLoader(Drawing(), num_workers="auto", max_workers=1))
    assert (settings.num_workers, settings.most_computing, settings.most_waiting) == (1, 1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(8 * cores))
    settings = inside.options(DataLoader(Drawing(), num_workers="auto"))
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
