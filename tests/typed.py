"""What type checkers say of programs that use us: checked by `make typecheck`, and run by nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader, to_device
from asyncloader.stateful import StatefulDataLoader, convert
from asyncloader.typing import BaseIterator
from asyncloader.wrap import LoaderWrapper, equal_steps


class Plain(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Awaited:
    """No base class is needed."""

    async def __getitem__(self, key: int) -> int:
        return key


class AwaitedStream:
    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1


async def programs() -> None:
    """Iterators have their methods, and know the dataset's type."""
    assert_type(DataLoader(Plain()), DataLoader[int])
    assert_type(DataLoader(Stream()), DataLoader[int])
    assert_type(DataLoader(Awaited()), DataLoader[int])
    assert_type(DataLoader(AwaitedStream()), DataLoader[int])
    assert_type(to_device([1], "cuda"), LoaderWrapper[int])
    assert_type(equal_steps(AwaitedStream()), LoaderWrapper[int])
    stateful = StatefulDataLoader(Plain(), snapshot_every_n_steps=4)
    assert_type(stateful, StatefulDataLoader[int])
    assert_type(iter(stateful), BaseIterator[int])
    assert_type(convert(stateful.state_dict(), stateful), dict[str, Any])
    iterator = iter(DataLoader(Plain()))
    assert_type(iterator, BaseIterator[int])
    iterator.stats().verdict.text.upper()
    iterator.close()
    next(iterator).cuda()
    async with aiter(DataLoader(Awaited(), num_workers=2)) as batches:
        async for batch in batches:
            batch.cuda()
