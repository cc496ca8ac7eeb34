"""The table in docs/faults.md: what it says of our loader is what happens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import peers

TIMED = {"break": 2.0, "interrupt": 5.0}  # cells with a time, and what it may be on a busy machine


@pytest.mark.slow
def test_every_row_is_true(tmp_path: Path) -> None:
    """Each situation, in a program of its own."""
    documented = peers.documented()
    with ThreadPoolExecutor(2) as two_at_a_time:
        seen = two_at_a_time.map(lambda what: peers.cell("asyncloader", what, tmp_path), peers.SITUATIONS)
        measured = dict(zip(peers.SITUATIONS, seen, strict=True))
    for what, most_s in TIMED.items():
        assert float(measured.pop(what).removesuffix(" s")) < most_s
        assert float(documented.pop(what).removesuffix(" s")) < most_s
    assert measured == documented


def test_all_loaders_and_situations_are_in_the_table() -> None:
    """The page was written by the script as it is now."""
    header = peers.PAGE.read_text().split(peers.BEGIN)[1].splitlines()[0]
    assert [text.strip() for text in header.strip("|").split("|")] == ["what happens", *peers.LOADERS]
