"""Best-fit packing: samples, roughly the longest first, each into the block that it leaves the least room in.

The room in open blocks is kept as bits: one 128-bit number for each 128 sizes, with a bit for each size
that a block has left, and one number with a bit for each of those that are not 0. The least room that is enough is
then the lowest bit of what remains after a shift: two looks, whatever the size of a block and however many are open. A
heap or a balanced tree of blocks takes ten steps of Python in place of each.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHIFT = 7
_MASK = (1 << _SHIFT) - 1


def best_fit(sizes: Iterable[int], capacity: int) -> list[int]:
    """Return the block that each of these sizes is put into, in numbers from 0 on.

    Args:
        sizes: None of them above `capacity`. Blocks are fuller if the largest come first.
        capacity: The capacity of a block.
    """
    open_blocks: dict[int, list[int]] = {}  # by what they have left
    words = [0] * ((capacity >> _SHIFT) + 1)
    nonzero = 0
    count = 0
    blocks = []
    for size in sizes:
        word = size >> _SHIFT
        if fits := words[word] >> (size & _MASK):
            room = size + (fits & -fits).bit_length() - 1
        elif fits := nonzero >> (word + 1):
            word += (fits & -fits).bit_length()
            room = (word << _SHIFT) + (words[word] & -words[word]).bit_length() - 1
        else:
            room = 0
        if room:
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                words[word] ^= 1 << (room & _MASK)
                if not words[word]:
                    nonzero ^= 1 << word
        else:
            block, room = count, capacity
            count += 1
        if left := room - size:
            same = open_blocks.setdefault(left, [])
            if not same:
                words[left >> _SHIFT] |= 1 << (left & _MASK)
                nonzero |= 1 << (left >> _SHIFT)
            same.append(block)
        blocks.append(block)
    return blocks
