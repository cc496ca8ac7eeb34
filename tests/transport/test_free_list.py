"""Free regions: which is taken, and how many bytes are free."""

from __future__ import annotations

import random

from asyncloader.transport.free_list import FreeList, Region, fits


def test_free_bytes_are_those_of_the_regions_that_are_free() -> None:
    """Whatever is put, taken as the best fit, or taken to be given back, in any order."""
    choices, free, there = random.Random(4), FreeList(), list[Region]()
    for step in range(500):
        if choices.random() < 0.5:
            there.append(Region(step << 20, choices.choice((1, 2, 5)) << 16))
            free.put(there[-1])
        elif choices.random() < 0.5:
            wanted = choices.choice((1, 2, 4)) << 16
            region = free.take(wanted)
            fitting = [each.capacity for each in there if fits(wanted, each.capacity)]
            assert (region and region.capacity) == min(fitting, default=None)
            there = [each for each in there if each is not region]
        else:
            region = free.take_oldest()
            there = [each for each in there if each is not region]
        assert free.nbytes == sum(each.capacity for each in there)
        assert sorted(each.offset for each in free) == sorted(each.offset for each in there)
