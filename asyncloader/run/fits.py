"""What a state of a loader has to fit: everything that decides which samples come, and in which order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from asyncloader import identity
from asyncloader.options import Options
from asyncloader.protocols import is_stateful, members, probe
from asyncloader.run.plan import is_elastic, order_generators, samplers_within
from asyncloader.run.state import LoaderState
from asyncloader.samplers.mixture import has_more_sources

_ADVICE = {
    "num_replicas": (
        "A state of this sampler fits as many ranks as it was taken on. asyncloader.samplers.ElasticSampler, in the "
        "place of DistributedSampler when the state is taken, is resumed on any number."
    ),
    "rank": (
        "Each rank has to load the state that it has saved itself; with asyncloader.samplers.ElasticSampler in the "
        "place of DistributedSampler a state fits every rank."
    ),
    "seeding_rank": (
        "It is part of the seeds. Give it, or leave it out, as when the state was taken; otherwise the run would go on "
        "with other random numbers."
    ),
    "division": (
        "(It is batch_size, num_replicas and rank of each sampler.) With in_order=False a state names batches that "
        "came early by their numbers, which are other samples in another division. Save between epochs, or with "
        "in_order=True."
    ),
    "generators": "Give the loader and its samplers as many generators of their own as they had.",
    "dataset_state": (
        "It says whether a state has that of the dataset: so it is if the dataset provides one, unless "
        "snapshot_every_n_steps is 0 or None."
    ),
    "num_workers": (
        "A dataset with a state of its own in each worker can only go on with as many workers, unless it has a method "
        "merge_state_dicts, as asyncloader.streams do."
    ),
}
"""By what differs: what to do about it."""

_DIVISION = ("batch_size", "num_replicas", "rank")
"""What of samplers says which samples batch n has."""


def check(state: LoaderState, options: Options) -> None:
    """See whether a state fits what is to be iterated over.

    Raises:
        StateMismatchError: if it does not; it says what differs.
    """
    saved, here = dict(state.fits), describe(options)
    if not options.is_iterable:  # of which there are more where this process reads the stream
        saved["generators"], here["generators"] = len(json.loads(state.at_iter)), len(order_generators(options))
    if (starts := state.starts) is not None and not state.is_between_runs:
        saved["num_workers"], here["num_workers"] = len(starts), options.num_at_start
    free = {"samplers", "datasets"}  # which are compared one by one
    free |= set() if state.ahead else {"division"}
    parts = {name: (json.loads(saved[name]), json.loads(here[name])) for name in ("samplers", "datasets")}
    pairs = zip(*parts["samplers"], strict=False)
    if any(
        has_more_sources(one, other.get("lengths", [])) for one, other in pairs
    ):  # of a mixture: it checks the others
        del parts["datasets"]
        free |= {"dataset_length"}
    identity.check(saved, here, free=free, advice=_ADVICE)
    for name, (ours, now) in parts.items():
        identity.check(*({name: [one["kind"] for one in each]} for each in (ours, now)))
        for one, other in zip(ours, now, strict=True):
            free = {"lengths", "by"} if has_more_sources(one, other.get("lengths", [])) else set()
            identity.check(one, other, free=free)


def describe(options: Options) -> dict[str, Any]:
    """Return what must be the same for a state to mean the same batches, as plain data.

    What others follow from comes before these: the first difference is the one that is told.
    """
    samplers = samplers_within(options.index_sampler)
    elastic = any(map(is_elastic, samplers))
    division = [[_whole(sampler, name) for name in _DIVISION] for sampler in samplers]
    ranks = [(ranks, rank) for _, ranks, rank in division if None not in (ranks, rank)]
    num_replicas, rank = (None, None) if elastic or not ranks else ranks[0]
    return {
        "kind": "iterable" if options.is_iterable else "map",
        "batch_size": None if elastic else options.batch_size,
        "drop_last": options.drop_last,
        "seeding": None if options.is_iterable else options.seeding,
        "sampler": "(".join(type(sampler).__name__ for sampler in samplers) + ")" * (len(samplers) - 1),
        "num_replicas": num_replicas,
        "rank": rank,
        "dataset_length": None if options.is_iterable else _length(options.dataset),
        "samples": None if elastic or options.is_iterable else _length(options.sampler),
        # Not which one: the states of ranks are alike, and many trainers save that of the first for all.
        "seeding_rank": None if options.seeding_rank is None else "given",
        "division": division,
        "dataset_state": not options.is_iterable and options.snapshot_every > 0 and is_stateful(options.dataset),
        "samplers": json.dumps([_identity(sampler, elastic) for sampler in samplers], default=identity.plain),
        "datasets": json.dumps([known for one in members(options.dataset) if len(known := identity.of(one)) > 1]),
    }


def _identity(sampler: Any, elastic: bool) -> dict[str, Any]:
    """Return what a state of the loader belongs to of one of its samplers."""
    found = identity.of(sampler)
    if isinstance(sampler, (list, tuple, range, np.ndarray, torch.Tensor)):
        return {**found, "keys": identity.checksum(sampler)}
    return {name: value for name, value in found.items() if not (elastic and name == "batch_size")}


def _whole(sampler: Any, name: str) -> int | None:
    value = probe(sampler, name)
    return value if isinstance(value, int) else None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # whatever it raises: torch's loader does not ask
        return None
