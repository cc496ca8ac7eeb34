"""Pieces of files: which are read in one."""

from __future__ import annotations

from asyncloader.datasets.sources import merged


def test_neighbours_are_read_in_one() -> None:
    """Ranges that touch, overlap or nearly touch, of one file; each place knows its own."""
    places = [(0, 8, 12), (1, 0, 4), (0, 0, 4), (0, 4, 8), (0, 30, 34), (0, 2, 6), (0, 15, 16)]
    reads, which = merged(places, gap=3)
    assert reads == [(0, 0, 16), (0, 30, 34), (1, 0, 4)]
    assert [reads[at][0] == file and reads[at][1] <= begin <= end <= reads[at][2]
            for at, (file, begin, end) in zip(which, places, strict=True)] == [True] * 7  # fmt: skip


def test_what_is_read_in_one_is_bounded() -> None:
    """Neighbours beyond the bound are read by themselves; what is within another range is not read twice."""
    places = [(0, 0, 6), (0, 6, 10), (0, 10, 30), (0, 12, 14), (0, 10, 30), (0, 30, 31)]
    assert merged(places, gap=0, most=10) == ([(0, 0, 10), (0, 10, 30), (0, 30, 31)], [0, 0, 1, 1, 1, 2])
