"""Pieces of files, those that lie beside each other read in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from asyncloader.datasets.source import Version
from asyncloader.datasets.sources import Sources

Place: TypeAlias = tuple[int, int, int]
"""Number of the file, first byte, and the one behind the last."""

_GAP_BYTES = 1 << 14  # to be read for nothing rather than to ask once more
_MOST_BYTES = 1 << 26  # read in one: what is longer may as well come in parts at once, each of them retried alone


async def read_places(
    sources: Sources, urls: Sequence[str], versions: Sequence[Version], places: Sequence[Place]
) -> list[memoryview]:
    """Return the bytes of each place, which may be written to; those of neighbours are parts of one memory."""
    reads, which = merged(places)
    contents = await sources.read_ranges([(urls[file], start, stop, versions[file]) for file, start, stop in reads])
    memories = [memoryview(bytearray(content)) for content in contents]
    return [
        memories[read][start - reads[read][1] : stop - reads[read][1]]
        for read, (_, start, stop) in zip(which, places, strict=True)
    ]


def merged(places: Sequence[Place], gap: int = _GAP_BYTES, most: int = _MOST_BYTES) -> tuple[list[Place], list[int]]:
    """Return the ranges to read, and for each place which of them it is in."""
    reads: list[Place] = []
    which = [0] * len(places)
    for at in sorted(range(len(places)), key=places.__getitem__):
        file, start, stop = places[at]
        last, first, end = reads[-1] if reads else (-1, 0, 0)
        is_near = file == last and start <= end + gap
        if is_near and (stop <= end or stop - first <= most):
            reads[-1] = (file, first, max(end, stop))
        else:
            reads.append((file, start, stop))
        which[at] = len(reads) - 1
    return reads, which
