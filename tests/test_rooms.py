"""What rooms say of each other, beyond the imports that import-linter looks at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS

PACKAGE = Path(__file__).parents[1] / "asyncloader"
CORE = ("options.py", "run", "engine", "backends", "worker", "messages", "transport")

GUEST = re.compile(r"\b(elsewhere|remote|actors?|raylet|nodes?|RayWorkers)\b|asyncloader\.ray\b|[^_\w]Ray\b")
"""What only `asyncloader.ray` knows: that workers are on other machines, in whatever way."""


def lines(*names: str) -> Iterator[tuple[str, str]]:
    """Yield each line of these modules and rooms, with the name of its file."""
    for name in names:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for line in file.read_text().splitlines():
                yield str(file.relative_to(PACKAGE)), line


def test_the_core_has_no_word_of_workers_on_other_machines() -> None:
    """It asks a `WorkerProvider`, and a backend: that of Ray is a guest, as anybody's could be."""
    assert [(file, line) for file, line in lines(*CORE) if GUEST.search(line)] == []


def test_nothing_imports_the_guest() -> None:
    """A user does."""
    imports = [line for _, line in lines(*CORE, "loader.py", "__init__.py") if "asyncloader.ray import" in line]
    assert imports == []


@pytest.mark.slow
def test_each_defect_can_be_put_into_the_library() -> None:
    """A line that has changed since takes its defect along."""
    missing = [each.what for each in MUTATIONS if (PACKAGE / each.path).read_text().count(each.old) != 1]
    assert missing == []
