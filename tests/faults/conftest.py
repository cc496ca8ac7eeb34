"""Programs for the tests of faults."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import Nursery, Program


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process from which programs are forked."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program from its source; what is left of it in the end is killed."""
    programs = []

    def begin(source: str, *arguments: object, **environment: str) -> Program:
        path = tmp_path / f"program_{len(programs)}.py"
        path.write_text(textwrap.dedent(source))
        programs.append(nursery.start(path, *map(str, arguments), **environment))
        return programs[-1]

    yield begin
    for program in programs:
        program.close()


@pytest.fixture
def run(start: Callable[..., Program]) -> Callable[..., Program]:
    """Runs a program to its end, within a time limit, and sees that nothing of it is left."""

    def whole(source: str, *arguments: object, timeout_s: float = 30.0, **environment: str) -> Program:
        program = start(source, *arguments, **environment)
        program.wait(timeout_s)
        left = program.survivors(3.0)
        assert not left, program.explain(f"left behind: {left}")
        return program

    return whole
