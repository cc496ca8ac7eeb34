from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncloader.transport.slab import SlabPool
from tests.transport.wire import make_pool


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    """A pool of its own, of 1 GiB; after the test no region may be in use."""
    made = make_pool()
    yield made
    made.close()
