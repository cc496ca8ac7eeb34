from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.wire import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of its own; after the test no region may be in use."""
    made = Pool()
    yield made
    made.close()
