"""Ranks that say the same of a sampler, or hear which of them do not."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from asyncloader.errors import ConfigurationError

T = TypeVar("T")


def gathered(own: T, same: dict[str, Any], group: dist.ProcessGroup | None) -> list[T]:
    """Return a value of each rank. All ranks call this, in the thread in which they call collectives.

    Args:
        own: The value of this rank.
        same: Values that have to be the same on all ranks, by name: small, plain data.
        group: The ranks; None for all of the process group.

    Raises:
        ConfigurationError: if a value differs, on all ranks; or if this rank is not in the group.
    """
    if (count := dist.get_world_size(group)) < 1:
        raise ConfigurationError(f"rank {dist.get_rank()} is not in the process group that is given")
    told: list[Any] = [None] * count
    dist.all_gather_object(told, (dist.get_rank(), own, same), group=group)
    first, _, expected = told[0]
    for name in expected:
        if others := {rank: said[name] for rank, _, said in told if said[name] != expected[name]}:
            raise ConfigurationError(
                f"{name} should be the same on all ranks, but rank {first} has {expected[name]}; unlike it, "
                + ", ".join(f"rank {rank} has {value}" for rank, value in others.items())
            )
    return [value for _, value, _ in told]
