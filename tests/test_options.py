"""An option is written down in the signature, in the record of settings, and where it is used; nowhere else."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from asyncloader import DataLoader
from asyncloader.loader import OPTIONS
from asyncloader.messages.messages import WorkerSpec
from asyncloader.options import _OF_WORKERS, ASKED, Options

OF_TORCH_ALONE = {"self", "shuffle", "pin_memory", "pin_memory_device"}
"""What torch's own code deals with."""


def test_the_record_has_what_the_signature_names_and_the_rest_follows_from_it() -> None:
    """Samplers, automatic batching and workers on other machines are what torch and we make of arguments."""
    asked = set(inspect.signature(DataLoader.__init__).parameters) - OF_TORCH_ALONE
    assert set(ASKED) - asked == {"index_sampler", "auto_collation", "remote"}
    assert asked <= set(ASKED)
    assert set(_OF_WORKERS) <= set(ASKED)


def test_the_record_is_made_of_the_attributes_of_the_loader() -> None:
    """Also where they were set after construction."""
    loader: Any = DataLoader([1], num_workers=1)
    for name, parameter in OPTIONS.items():
        assert getattr(loader, name) == parameter.default
    loader.max_retries, loader.timeout = 7, 3.0
    settings = loader._options()
    assert (settings.max_retries, settings.timeout) == (7, 3.0)
    assert loader._options(settings) is settings


def test_workers_see_part_of_the_record_under_its_names() -> None:
    """Beside what belongs to one iterator."""
    own = {"dataset", "worker_init_fn", "base_seed", "modes", "origin", "epochs"}
    for each in fields(WorkerSpec):
        assert each.name in own or hasattr(Options, each.name), each.name
