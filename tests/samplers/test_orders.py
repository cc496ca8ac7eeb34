"""The orders and states of all samplers are those that earlier versions gave: runs that were begun then go on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)

_LENGTHS = np.random.default_rng(7).integers(1, 151, 700)
_CURRICULUM = [(0, [3.0, 1.0, 0.0]), (1500, [1.0, 1.0, 2.0])]

MAKES: dict[str, Callable[..., Any]] = {
    "elastic": lambda **place: ElasticSampler(1009, **place),
    "elastic, long": lambda **place: ElasticSampler(9001, **place),
    "elastic, drop_last": lambda **place: ElasticSampler(1009, drop_last=True, **place),
    "elastic, in order": lambda **place: ElasticSampler(1009, shuffle=False, **place),
    "weighted": lambda **place: WeightedSampler(_LENGTHS, 500, **place),
    "weighted, each once": lambda **place: WeightedSampler(_LENGTHS, 500, replacement=False, **place),
    "mixture": lambda **place: MixtureSampler([300, 70, 5000], [5, 2, 1], stop="first", **place),
    "mixture, all": lambda **place: MixtureSampler([300, 70, 500], stop="all", **place),
    "mixture, endless": lambda **place: MixtureSampler([300, 70, 5000], _CURRICULUM, **place),
    "mixture, in order": lambda **place: MixtureSampler([300, 70], [1, 3], shuffle=False, **place),
    "lengths": lambda **place: LengthBatchSampler(_LENGTHS, max_tokens=600, window=64, **place),
    "lengths in buckets": lambda **place: LengthBatchSampler(
        _LENGTHS, max_tokens=600, buckets=[40, 75, 110, 150], max_batch=9, **place
    ),
    "lengths, drop_last": lambda **place: LengthBatchSampler(_LENGTHS, max_tokens=600, drop_last=True, **place),
    "lengths, in order": lambda **place: LengthBatchSampler(_LENGTHS, max_tokens=600, shuffle=False, **place),
    "lengths of a mixture": lambda **place: LengthBatchSampler(
        _LENGTHS, max_tokens=600, window=100, sampler=MixtureSampler([300, 400], [1, 1], seed=3), **place
    ),
    "packing": lambda **place: PackingBatchSampler(_LENGTHS, block_size=150, batch_size=2, window=64, **place),
    "packing, cut": lambda **place: PackingBatchSampler(
        _LENGTHS, block_size=60, too_long="cut", drop_last=True, **place
    ),
    "packing, in order": lambda **place: PackingBatchSampler(_LENGTHS, block_size=150, shuffle=False, **place),
    "packing by cost": lambda **place: PackingBatchSampler(
        _LENGTHS, block_size=150, batch_size=3, window=200, cost=lambda n: n + n * n / 128, **place
    ),
    "balanced": lambda **place: BalancedBatchSampler(_LENGTHS, batch_size=8, window=200, **place),
    "balanced, drop_last": lambda **place: BalancedBatchSampler(_LENGTHS, batch_size=8, drop_last=True, **place),
    "balanced, of a mixture": lambda **place: BalancedBatchSampler(
        _LENGTHS, batch_size=8, sampler=MixtureSampler([300, 400], [1, 1], seed=3), shuffle=False, **place
    ),
}
EXPECTED = {
    "elastic": (3441771736, 1406625755),
    "elastic, long": (92667121, 1913330923),
    "elastic, drop_last": (2508123435, 1908108529),
    "elastic, in order": (36324264, 2035807111),
    "weighted": (4005981325, 1000382084),
    "weighted, each once": (3387111853, 612222267),
    "mixture": (4184100168, 2226543962),
    "mixture, all": (217284534, 1325909085),
    "mixture, endless": (2252528480, 423577016),
    "mixture, in order": (3620379174, 3465215116),
    "lengths": (1740020266, 908577635),
    "lengths in buckets": (3005421555, 340147354),
    "lengths, drop_last": (3255055182, 4154674008),
    "lengths, in order": (3926534156, 4215105480),
    "lengths of a mixture": (1866675934, 2708102188),
    "packing": (2295903022, 3999553399),
    "packing, cut": (1118615995, 3066804996),
    "packing, in order": (3643287691, 3807616570),
    "packing by cost": (4051558156, 312176654),
    "balanced": (3085143194, 3675567611),
    "balanced, drop_last": (714794210, 2560061104),
    "balanced, of a mixture": (1367730697, 1030325594),
}


def checksums(make: Callable[..., Any]) -> tuple[int, int]:
    """Return one checksum of orders, and one of states, over some seeds, epochs and ranks."""
    orders, states = [], []
    for seed, epoch, ranks in ((0, 1, 1), (12345678901, 2, 3)):
        for rank in range(ranks):
            sampler = make(num_replicas=ranks, rank=rank, seed=seed)
            sampler.set_epoch(epoch)
            states.append(sampler.state_dict())
            taken = list(islice(sampler, 3000))
            orders.append([list(map(repr, keys)) if isinstance(keys, list) else keys for keys in taken])
            states += [sampler.state_after(7), sampler.state_dict()]
            other = make(num_replicas=2, rank=1, seed=seed)
            other.load_state_dict(states[-2])
            orders.append(list(map(repr, islice(other, 100))))
    return tuple(zlib.crc32(json.dumps(found, sort_keys=True).encode()) for found in (orders, states))  # type: ignore[return-value]


@pytest.mark.parametrize("name", MAKES)
def test_orders_and_states_stay_as_they_were(name: str) -> None:
    """Which samples come, in which order, on which rank; and what a state says."""
    assert checksums(MAKES[name]) == EXPECTED[name]
