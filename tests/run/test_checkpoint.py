"""What is in a state of a loader, and what it has to fit: settings, progress and generators, without a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from asyncloader import DataLoader, StateMismatchError
from asyncloader.engine.progress import Progress, SamplerState
from asyncloader.engine.tracks import make_tracks
from asyncloader.epochs import EpochNotice
from asyncloader.messages.snapshot import Frozen, Untold, WorkerStart
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer, initial_state
from asyncloader.run.fits import check, describe
from asyncloader.run.plan import order_generators
from asyncloader.run.rng_snapshot import OrderDraw
from asyncloader.run.state import LoaderState
from asyncloader.samplers import ElasticSampler, PackingBatchSampler
from tests.run.giving import give
from tests.support import inside

WITH_WORKERS: dict[str, Any] = {"num_workers": 2, "worker_backend": "thread"}


class Counts:
    """Twelve samples and a state: how many were asked for."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[int]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def settings_of(dataset: Any = None, **options: Any) -> Options:
    """Options of a loader of twelve samples in batches of two."""
    data = range(12) if dataset is None else dataset
    return inside.options(DataLoader(data, **{"batch_size": 2, **options}))


def progress_from(starts: dict[int, WorkerStart]) -> Progress:
    """How far a run is whose workers begin there."""
    return Progress(tracks=make_tracks(starts, (77, 3, 0), overlaps=False), next_worker=0)


def checkpointer_of(settings: Options, progress: Progress) -> Checkpointer:
    """What a run of these settings makes its states with, begun now."""
    rng = order_generators(settings)
    order = OrderDraw(rng, rng.capture(), warn=bool)
    common = LoaderState(epoch=3, base_seed=77)
    return Checkpointer(settings, progress, order, (77, 0, 0), common, EpochNotice((None,)), set())


OTHERS: dict[str, tuple[Any, Any, Any]] = {
    "kind": ({}, {"dataset": Stream()}, ("map", "iterable")),
    "dataset_length": ({}, {"dataset": range(13)}, (12, 13)),
    "batch_size": ({}, {"batch_size": 3}, (2, 3)),
    "drop_last": ({}, {"drop_last": True}, (False, True)),
    "sampler": (
        {},
        {"shuffle": True},
        ("BatchSampler(SequentialSampler)", "BatchSampler(RandomSampler)"),
    ),
    "samples": ({"sampler": range(4)}, {"sampler": range(6)}, (4, 6)),
    "num_replicas": (
        {"sampler": DistributedSampler(range(12), 2, 0)},  # type: ignore[arg-type]
        {"sampler": DistributedSampler(range(12), 3, 0)},  # type: ignore[arg-type]
        (2, 3),
    ),
    "rank": (
        {"sampler": DistributedSampler(range(12), 2, 0)},  # type: ignore[arg-type]
        {"sampler": DistributedSampler(range(12), 2, 1)},  # type: ignore[arg-type]
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_state_has_to_fit(name: str) -> None:
    """It says what differs, and how; what it was made of it fits."""
    saved, now, values = OTHERS[name]
    state = initial_state(settings_of(**saved), 0, {})
    check(state, settings_of(**saved))
    if name == "num_replicas":  # as many samples for each rank do not make it fit
        state.fits["samples"] = describe(settings_of(**now))["samples"]
    with pytest.raises(StateMismatchError) as caught:
        check(state, settings_of(**now))
    assert (caught.value.field, caught.value.saved, caught.value.now) == (name, *values)


def test_other_ranks_are_told_of_the_sampler_that_fits_them() -> None:
    """They have other numbers of samples as well, which is not what the error is about."""
    for saved, now, field in (((2, 0), (4, 0), "num_replicas"), ((2, 0), (2, 1), "rank")):
        one, other = ({"sampler": DistributedSampler(range(12), *ranks)} for ranks in (saved, now))  # type: ignore[arg-type]
        with pytest.raises(StateMismatchError, match=f"{field} was .* asyncloader.samplers.ElasticSampler"):
            check(initial_state(settings_of(**one), 0, {}), settings_of(**other))


@pytest.mark.parametrize("state", [{}, {"version": 5}, {"version": 7}, [3], None])
def test_what_is_no_state_of_this_version(state: Any) -> None:
    """Also what is no state at all."""
    with pytest.raises(StateMismatchError, match="not a state of this version"):
        LoaderState.from_dict(state)


def test_what_is_not_all_of_a_state() -> None:
    """Whichever part is missing, the error names it."""
    state = initial_state(settings_of(), 0, {}).as_dict()
    check(LoaderState.from_dict(state), settings_of())
    for name in state.keys() - {"version"}:
        with pytest.raises(StateMismatchError, match=f"without {name}"):
            LoaderState.from_dict({key: value for key, value in state.items() if key != name})


def test_a_state_of_an_elastic_sampler_fits_any_division() -> None:
    """Batch size, samples and ranks may be others, those in seeds too: each rank goes on under the one that it has."""
    one = settings_of(sampler=ElasticSampler(range(12), num_replicas=1, rank=0))
    two = settings_of(sampler=ElasticSampler(range(12), num_replicas=2, rank=1), batch_size=3)
    assert describe(one)["dataset_length"] == 12
    check(initial_state(one, 0, {}), two)


def elastic(num_replicas: int = 1, rank: int = 0) -> ElasticSampler:
    return ElasticSampler(range(12), num_replicas=num_replicas, rank=rank)


def packing(batch_size: int) -> dict[str, Any]:
    sampler = PackingBatchSampler([4] * 12, block_size=8, batch_size=batch_size)
    return {"batch_size": 1, "batch_sampler": sampler, "collate_fn": list}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sampler": elastic()}, {"sampler": elastic(), "batch_size": 3}),
        ({"sampler": elastic()}, {"sampler": elastic(2)}),
        ({"sampler": elastic(2)}, {"sampler": elastic(2, 1)}),
        (packing(2), packing(4)),
    ],
)
def test_batches_that_came_early_are_of_one_division(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The state has their numbers: in another division these are other samples, and some would be lost."""
    progress = Progress(position=0, ahead={1, 3})
    state = checkpointer_of(settings_of(**one), progress).state()
    check(state, settings_of(**one))
    with pytest.raises(StateMismatchError, match=r"division was .* in_order=True"):
        check(state, settings_of(**other))
    check(replace(state, ahead=[]), settings_of(**other))


def test_workers_with_states_of_their_own_are_as_many_as_before() -> None:
    """In the middle of a run; between two there are none yet."""
    progress = progress_from({0: WorkerStart(), 1: WorkerStart()})
    state = checkpointer_of(settings_of(Counts(), **WITH_WORKERS), progress).state()
    check(state, settings_of(Counts(), **WITH_WORKERS))
    one = settings_of(Counts(), **{**WITH_WORKERS, "num_workers": 1})
    with pytest.raises(StateMismatchError, match=r"num_workers was 2 .* as many workers"):
        check(state, one)
    check(replace(state, base_seed=None), one)


def test_states_have_the_same_keys_whenever_they_are_made() -> None:
    """torch.distributed.checkpoint needs it. They are plain data, and belong to who asked."""
    settings = settings_of()
    progress = Progress()
    checkpointer = checkpointer_of(settings, progress)
    before = initial_state(settings, 0, {})
    within = checkpointer.state()
    give(progress, 0)
    later = checkpointer.state()
    progress.end_is_known = True
    after = checkpointer.state()
    assert [state.is_between_runs for state in (before, within, later, after)] == [True, False, False, True]
    for state in (before, within, later, after):
        written = state.as_dict()
        assert written.keys() == before.as_dict().keys()
        assert json.loads(json.dumps(written)) == written
        assert LoaderState.from_dict(written) == state
    loaded = LoaderState.from_dict(written := within.as_dict())
    written["fits"]["rank"], written["ahead"] = 5, [9]
    assert loaded.fits["rank"] is None
    assert checkpointer.state() == after
    assert initial_state(settings, 0, {}) == before


def test_a_state_in_a_run_has_how_far_it_is() -> None:
    """And of the generators: what they were when the order was drawn, and what the global ones are now by a number."""
    settings = settings_of(shuffle=True)
    progress = Progress(in_order=False, bad_count=4)
    checkpointer = checkpointer_of(settings, progress)
    torch.randperm(3)  # before the sampler is read
    generators = order_generators(settings)
    before = generators.as_text(generators.capture())
    first = checkpointer.state()
    assert (first.epoch, first.base_seed, first.is_drawn, first.at_next) == (3, 77, False, before)
    assert (first.position, first.ahead) == (0, [])
    with checkpointer.order.first():
        torch.randperm(3)
    for batch in (0, 5, 3):
        give(progress, batch)
    later = checkpointer.state()
    assert (later.position, later.ahead, later.bad_count) == (1, [3, 5], 4)
    assert (later.at_iter, later.at_next, later.is_drawn) == (first.at_iter, before, True)
    assert later.check == generators.check() != first.check
    torch.randperm(3)
    assert later.check != generators.check()


def test_a_state_after_a_run_is_of_the_next_one() -> None:
    """Which draws its own base seed, unless persistent workers keep theirs, from the generators as they are now."""
    generator = torch.Generator().manual_seed(5)
    for persistent in (False, True):
        settings = settings_of(shuffle=True, generator=generator, **WITH_WORKERS, persistent_workers=persistent)
        progress = Progress(position=6)
        checkpointer = checkpointer_of(settings, progress)
        began = checkpointer.order.as_plain()["at_iter"]
        torch.randperm(3, generator=generator)
        progress.end_is_known = True
        state = checkpointer.state()
        assert (state.epoch, state.position, state.finished) == (4, 0, True)
        assert state.base_seed == (77 if persistent else None)
        generators = order_generators(settings)
        assert state.at_iter == generators.as_text(generators.capture()) != began


def test_samplers_go_on_after_the_state_that_they_had_within_the_run() -> None:
    """It is drawn to its end, where they count on; a run without one leaves them as they are."""
    last = Frozen({"at": 4})
    progress = Progress(position=5)
    progress.sampler_states.append((4, last))
    checkpointer = checkpointer_of(settings_of(), progress)
    within = checkpointer.state()
    assert (within.samplers, within.drawn, within.passes) == ('{"at": 4}', 1, [])
    progress.end_is_known = True
    assert checkpointer.samplers_after() == SamplerState(last, 0, passes=(2,))  # a batch, and the end
    without = Progress(position=5)
    without.end_is_known = True
    assert checkpointer_of(settings_of(), without).samplers_after() == SamplerState(None)


def test_datasets_that_outlast_a_run_are_where_it_left_them() -> None:
    """Without workers the one that is here; in persistent workers theirs; others begin as the trainer has them."""
    for workers, kept in (
        ({}, {0: {"count": 9}}),
        ({**WITH_WORKERS, "persistent_workers": True}, {0: {"count": 4}, 1: {"count": 5}}),
        (WITH_WORKERS, None),
    ):
        dataset = Counts(9)
        starts = {worker: WorkerStart(0, Frozen({"dataset": {"count": 4 + worker}})) for worker in (0, 1)}
        progress = progress_from(starts)
        carried = checkpointer_of(settings_of(dataset, **workers), progress).carried()
        found = carried and {
            worker: start.snapshot.thaw()["dataset"] for worker, start in carried.items() if start.snapshot
        }
        assert found == kept
    nothing = checkpointer_of(settings_of(Counts()), Progress())
    assert nothing.carried() is None


def test_a_dataset_whose_state_cannot_be_taken_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The state is made all the same."""
    progress = progress_from({0: WorkerStart()})
    give(progress, 0, worker=0, in_stream=0, snapshot=Untold("TypeError: no pickle"), keys=[1, 2])
    checkpointer = checkpointer_of(settings_of(Counts()), progress)
    with caplog.at_level(logging.WARNING, logger="asyncloader"):
        assert checkpointer.state().epoch == 3
        checkpointer.state()
    (message,) = caplog.messages
    assert "could not be taken (TypeError: no pickle). It is not in states of the loader." in message
