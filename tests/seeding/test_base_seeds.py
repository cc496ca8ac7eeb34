"""The base seed tells epochs apart: ``torch.manual_seed`` before an epoch fixes it, whatever ran before."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, sample_rng
from tests.support import effort

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(()).item(), sample_rng().random()


def make(**options: Any) -> Any:
    return DataLoader(Augmented(), 4, shuffle=True, collate_fn=list, **{"num_workers": 2, **options})


def seeded(loader: Any, seed: int = 5) -> list[Any]:
    torch.manual_seed(seed)
    return list(loader)


def look(loader: Any) -> None:
    next(iter(loader))


def whole(loader: Any) -> None:
    list(loader)


WAYS: list[dict[str, Any]] = [
    {},
    {"seeding": "sample", "num_workers": 1},
    {"seeding": "sample", "num_workers": 0},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_seed_before_an_epoch_fixes_it_whatever_ran_before(options: Any) -> None:
    """A look at one batch, other epochs, an epoch with this seed; and a loader that is new."""
    loader = make(**options)
    expected = seeded(loader)
    look(loader)
    whole(loader)
    for each in (loader, loader, make(**options)):
        assert seeded(each) == expected
    other = seeded(loader, 6)
    assert other != expected
    assert other != list(loader)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_generator_that_is_seeded_before_an_epoch_fixes_it(options: Any) -> None:
    generator = torch.Generator()
    loader = make(generator=generator, **options)
    epochs = []
    for _ in range(3):
        generator.manual_seed(5)
        epochs.append(list(loader))
    assert epochs[0] == epochs[1] == epochs[2]


def test_workers_that_stay_count_the_epochs_of_their_base_seed() -> None:
    """So epochs differ; and how many there were before these workers were started does not matter."""
    loader = make(persistent_workers=True)
    epochs = [seeded(loader), list(loader), list(loader)]
    assert len({str(sorted(sample for batch in epoch for sample in batch)) for epoch in epochs}) == 3
    loader.close()
    assert [seeded(loader), list(loader), list(loader)] == epochs
    loader.close()


@pytest.mark.parametrize("options", [{"persistent_workers": True}, *WAYS], ids=str)
def test_a_run_is_resumed_and_made_again_whatever_ran_before(options: Any) -> None:
    """In the middle of an epoch that was seeded, after it, and its batches by their numbers."""
    for done in effort.share((1, 3), len(options)) if effort.is_quick else range(4):
        loader = make(**options)
        look(loader)
        whole(loader)
        torch.manual_seed(5)
        iterator = iter(loader)
        for _ in range(done):
            next(iterator)
        state, rng = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
        expected = [list(iterator), list(loader), list(loader)]
        assert [loader.batch(4, batch) for batch in range(3)] == expected[2]
        loader.close()
        resumed = make(**{"num_workers": 1, **options})
        torch.set_rng_state(rng)
        resumed.load_state_dict(state)
        assert [list(resumed), list(resumed), list(resumed)] == expected
        resumed.close()


def test_each_way_to_have_workers_draws_the_same_in_a_seeded_epoch() -> None:
    expected = seeded(make())
    for options in ({"num_workers": 1}, {"num_workers": 3}, {"persistent_workers": True}, {"scheduling": "dynamic"}):
        loader = make(**options)  # type: ignore[arg-type]
        if not options.get("persistent_workers"):
            look(loader)
        assert seeded(loader) == expected
        loader.close()
