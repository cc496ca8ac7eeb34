"""A wrapper that takes batches ahead, whether they are ready or not: so whatever counts taken batches is found out."""

from __future__ import annotations

from typing import Any

from asyncloader import DataLoader
from asyncloader.wrap import IteratorWrapper, LoaderWrapper

AHEAD = 2


class Ahead(IteratorWrapper):
    """Holds so many batches beside the one that is given next, the end included."""

    async def prepare(self) -> None:
        while len(self.held) <= AHEAD:
            await self.pull()


def taken_ahead(*args: Any, **options: Any) -> LoaderWrapper[Any]:
    """Return our loader, of which batches are taken ahead."""
    return LoaderWrapper(DataLoader(*args, **options), Ahead)
