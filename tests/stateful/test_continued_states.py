"""After a resume, later states and what iterators draw in later epochs are as they would have been without it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.messages import snapshot
from asyncloader.stateful import StatefulDataLoader
from tests.stateful.programs import Reader, Stream, StreamOfReaders, plain


class Drawing(Stream):
    """Its iterators draw from the worker's global generator, which is in their states."""

    def __iter__(self) -> Any:
        return DrawingReader(self.part())


class DrawingReader(Reader):
    """Adds a number that it draws."""

    def __next__(self) -> int:
        return super().__next__() + 1000 * int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("every", [1, 4])
def test_generators_in_states_of_iterators_go_on_in_later_epochs(loader_class: Any, every: int) -> None:
    """Persistent workers go on with them, so workers that are started after an epoch do as well."""

    def make() -> Any:
        return loader_class(
            Drawing(),
            4,
            num_workers=2,
            persistent_workers=True,
            snapshot_every_n_steps=every,
            generator=torch.Generator().manual_seed(4),
        )

    whole = make()
    first = plain(whole)
    state, second = whole.state_dict(), plain(whole)
    assert first != second
    resumed = make()
    resumed.load_state_dict(state)
    assert plain(resumed) == second


class Counted(Stream):
    """Counts its iterators, in its state, and each has a state that it takes back before its end alone."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Any:
        self.count += 1
        return CountedReader(self.part(), self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class CountedReader(Reader):
    """Adds the number of the epoch."""

    def __init__(self, numbers: range, epoch: int) -> None:
        super().__init__(numbers)
        self.epoch = epoch

    def __next__(self) -> int:
        return super().__next__() + 1000 * self.epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["at"] >= len(self.numbers):
            raise ValueError("nothing is left")
        super().load_state_dict(state)


def test_an_iterator_that_is_at_its_end_is_no_epoch() -> None:
    """Datasets that count go on where they were, also where the iterator does not take the state of its end back."""

    def make() -> Any:
        return DataLoader(Counted(), 4, num_workers=2, persistent_workers=True)

    whole = make()
    for epoch in (1, 2, 3):
        assert {number // 1000 for batch in plain(whole) for number in batch} == {epoch}
        resumed = make()
        resumed.load_state_dict(whole.state_dict())
        assert {number // 1000 for batch in plain(resumed) for number in batch} == {epoch + 1}


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 3, 5])
def test_snapshots_are_counted_on_after_a_resume(
    num_workers: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later states are those of the run without an interruption: batches since a snapshot go on to be counted."""
    for name in ("_CHEAP_S", "_CHEAP_FIRST_S"):  # otherwise a busy machine may take states less often
        monkeypatch.setattr(snapshot, name, math.inf)

    def make() -> Any:
        return DataLoader(
            StreamOfReaders(),
            2,
            num_workers=num_workers,
            snapshot_every_n_steps=4,
            generator=torch.Generator().manual_seed(4),
        )

    states = []
    whole = make()
    for _ in whole:
        states.append(whole.state_dict())
    resumed = make()
    resumed.load_state_dict(states[batches - 1])
    for place, _ in enumerate(resumed, batches):
        assert resumed.state_dict()["workers"] == states[place]["workers"], place


def fail(worker_id: int) -> None:
    """A `worker_init_fn`."""
    raise LookupError(f"worker {worker_id} has no shard")


class Unreadable(Stream):
    """Its first sample cannot be read."""

    def __iter__(self) -> Any:
        raise LookupError("no sample")
        yield


@pytest.mark.parametrize("worker_backend", ["process", "thread"])
def test_iter_raises_what_worker_init_fn_raises(worker_backend: Any) -> None:
    """As torchdata's: not the first `next`, which raises what the first batch has raised."""
    loader = StatefulDataLoader(
        range(8),  # type: ignore[arg-type]
        num_workers=2,
        worker_init_fn=fail,
        worker_backend=worker_backend,
    )
    with pytest.raises(LookupError, match="has no shard"):
        iter(loader)
    loader = StatefulDataLoader(
        Unreadable(),
        num_workers=2,
        worker_init_fn=str,  # type: ignore[arg-type]
        worker_backend=worker_backend,
    )
    iterator = iter(loader)
    with pytest.raises(LookupError, match="no sample"):
        next(iterator)


def test_iter_waits_for_no_batch_that_may_not_come() -> None:
    """An epoch without a batch, and a first batch that is late, are for `next`."""
    empty: Any = range(0)
    assert not list(StatefulDataLoader(empty, num_workers=1, worker_init_fn=str))  # type: ignore[arg-type]
    late = StatefulDataLoader(Late(), 1, num_workers=1, worker_init_fn=str, timeout=0.2)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError), iter(late) as batches:
        next(batches)


class Late(Stream):
    """Its first sample comes after five seconds."""

    def __iter__(self) -> Any:
        time.sleep(5)
        yield 1
