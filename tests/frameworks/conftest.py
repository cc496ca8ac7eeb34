"""What tests with training frameworks share: they are left alone by `make test`, and their own habits are allowed."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the frameworks where their tests are left out: that alone takes ten seconds."""
    if "not frameworks" in config.option.markexpr and collection_path.name.startswith("test_"):
        return True
    return None


# What frameworks and torch tell their developers; the advice that Lightning gives at every turn; what torch thinks of
# our number of workers on few processors. All other warnings are errors here too.
FRAMEWORKS_OWN = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
    "ignore:::lightning",
    "ignore:This DataLoader will create",
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let frameworks warn while they are imported."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and let frameworks warn of what is theirs."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.frameworks)
            if item.get_closest_marker("timeout") is None:  # to import all of them takes a minute
                item.add_marker(pytest.mark.timeout(450))
            for allowed in FRAMEWORKS_OWN:
                item.add_marker(pytest.mark.filterwarnings(allowed))


@pytest.fixture(scope="session", autouse=True)
def no_monitor_of_progress_bars() -> None:
    """Keep tqdm, which frameworks draw with, from starting a thread at its first bar that stays for good."""
    tqdm.monitor_interval = 0


@pytest.fixture(scope="session", autouse=True)
def ray_by_itself() -> Iterator[None]:
    """Keep Ray, whose daemons a program starts, from joining others, reporting to anybody, and writing elsewhere."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as environment:
        # Not pytest's folder: Ray's sockets lie deep in it, and their names are bounded.
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(autouse=True)
def cycles_collected(nothing_left_behind: None) -> Iterator[None]:
    """Collect what frameworks leave in reference cycles (a trainer, its loops, their iterators) before the count."""
    yield
    gc.collect()
