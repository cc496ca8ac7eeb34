"""Whether digests of batches are made: what makes them is imported only then, for it needs a package of an extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_digester(fingerprint: bool) -> Callable[[Any], int] | None:
    """Return what makes digests of batches, in one thread at a time; None if nobody wants them.

    Raises:
        ModuleNotFoundError: if xxhash is not installed, here, where the batch is made.
    """
    if not fingerprint:
        return None
    from asyncloader.worker.digest import Digester

    return Digester()
