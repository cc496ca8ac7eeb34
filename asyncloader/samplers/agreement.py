"""Ranks that say the same of a sampler, or hear which of them do not."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from asyncloader.errors import ConfigurationError

T = TypeVar("T")


def gathered(own: T, same: dict[str, Any], group: dist.ProcessGroup | None) -> list[T]:
    """Return what each rank says. All of them call this, from the thread that they call collectives from.

    Args:
        own: What this rank says.
        same: By name, what has to be the same on all ranks: small, plain data.
        group: The ranks; None for all of the process group.

    Raises:
        ConfigurationError: if something is not, on all ranks.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (own, same), group=group)
    first = told[0][1]
    for name in first:
        if others := [rank for rank, (_, said) in enumerate(told) if said[name] != first[name]]:
            raise ConfigurationError(
                f"{name} should be the same on all ranks, but rank 0 has {first[name]}, and rank {others[0]} "
                f"{told[others[0]][1][name]}. Unlike rank 0 are: {others}"
            )
    return [each for each, _ in told]
