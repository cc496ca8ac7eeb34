"""`make` runs each case on torch's DataLoader and on ours; what is not built yet is skipped here, and only here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.conformance.comparison import RECORDING, SUBJECTS, Subject
from tests.support import effort

# Name of a file or of a test to the reason: what ours does not do yet, which then runs on torch's class only.
NOT_BUILT_YET: dict[str, str] = {}

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a case on the subjects that it is made for."""
    if "make" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--subject") or [subject.name for subject in SUBJECTS]
    wanted = [name for name in getattr(metafunc.function, "subjects", chosen) if name in chosen]
    subjects = [_placed(metafunc, subject) for subject in SUBJECTS if subject.name in wanted]
    metafunc.parametrize(
        "make",
        [pytest.param(subject, marks=_marks(metafunc, subject)) for subject in subjects],
        ids=[f"{subject.name} on threads" if subject.on_threads else subject.name for subject in subjects],
        indirect=True,
    )


def _placed(metafunc: pytest.Metafunc, subject: Subject) -> Subject:
    """Return the subject with its workers where this run has them: before a commit threads, unless marked `processes`.

    What is compared is the order, what is drawn, what is collated; forks would be most of what the cases cost.
    """
    marker = metafunc.definition.get_closest_marker("processes")
    on_processes = marker is not None and subject.name in (marker.args or (subject.name,))
    return dataclasses.replace(subject, on_threads=effort.is_quick and not subject.is_torch and not on_processes)


def _marks(metafunc: pytest.Metafunc, subject: Subject) -> list[pytest.MarkDecorator]:
    pending = NOT_BUILT_YET.get(metafunc.definition.path.name) or NOT_BUILT_YET.get(metafunc.function.__name__)
    excuse = getattr(metafunc.function, "torch_leaves", None)
    if subject.is_torch:
        return [pytest.mark.slow, *([pytest.mark.leaks(excuse)] if excuse else [])]
    # The faces share all that is below them; they differ on threads as they do on processes.
    is_twice = subject.name == "async for" and metafunc.definition.get_closest_marker("processes") is not None
    slow = [pytest.mark.slow] if is_twice and not subject.on_threads else []
    return [*slow, *([pytest.mark.skip(pending)] if pending else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let cases ask for more workers than this machine has processors, of which torch's warning has a case of its own.

    And let torch's iterator stumble in its `__del__`, as it does when it is only half made, or when a worker has died.
    """
    stumble = (
        "ignore:Exception ignored in. <function _MultiProcessingDataLoaderIter:pytest.PytestUnraisableExceptionWarning"
    )
    if config.getoption("--record"):
        items[:] = [item for item in items if "make" in getattr(item, "fixturenames", ())]
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"))
            item.add_marker(pytest.mark.filterwarnings(stumble))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write torch's answers down, if that is what this run is for."""
    if session.config.getoption("--record"):
        RECORDING.write()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Subject:
    """Makes loaders of the class, and with the options, that the case is run on."""
    return dataclasses.replace(request.param, start_method=request.config.getoption("--start-method"))
