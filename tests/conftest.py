"""What all tests share: the check that nothing is left behind, event loops, start methods, loader classes, programs."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import textwrap
import types
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

# torch's threads look for more work in a loop after each large operation: a third of the CPU time of some tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read as torch is imported

import hypothesis
import pytest
import torch
import torch.testing
import torch.utils.data

from tests.support import beside, covering, deadlines, effort, fork_server, small_forks
from tests.support.leftovers import Holdings
from tests.support.nursery import End, Nursery, Program

START_METHODS = ("fork", "forkserver", "spawn")
PASSED = pytest.StashKey[bool]()
NURSERY = pytest.StashKey[Nursery]()
TORCH_THREADS = pytest.StashKey[int]()

# What an example takes is a matter of what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let a run choose how workers are started where a test does not say."""
    for plugin in (beside, deadlines):
        pluginmanager.register(plugin)
    parser.addoption(
        "--start-method",
        choices=START_METHODS,
        help="start the workers of tests that do not name a start method in this way (default: the platform's way)",
    )
    parser.addoption(
        "--subject",
        action="append",
        help="run the conformance cases on this one only: torch, ours, 'async for', defaults",
    )
    parser.addoption("--record", action="store_true", help="write torch's answers in the conformance cases down")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers used here, and see that a crash of the interpreter tells where."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it has in the background so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until tests run: what is collected stays, and would be looked through again and again
    config.addinivalue_line("markers", "leaks(reason): what this test leaves behind is not counted, for this reason")
    config.addinivalue_line("markers", "forked(reason): workers are forked, whatever this platform does by default")
    # A module that computes something large while it is collected would start threads, for which forks would wait.
    config.stash[TORCH_THREADS] = torch.get_num_threads()
    torch.set_num_threads(1)
    effort.is_quick = "slow" in config.option.markexpr
    hypothesis.settings.register_profile("this run", max_examples=effort.examples(100))
    hypothesis.settings.load_profile("this run")
    if not faulthandler.is_enabled():
        faulthandler.enable()
    # Three times a test, pytest attaches its handlers to each logger that does not propagate: torch has 40 of those.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    # Where there are no such devices, torch.manual_seed asks each kind to remember the seed and where it was set: three
    # texts of the stack, which is deep here, are 3 ms of CPU time.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]
    # torch.testing.assert_close asks whether a tensor is distributed, and imports torch.distributed.tensor and sympy to
    # know: 2 s of CPU time in each process of the tests, and 75 MB whose page tables every later fork copies.
    torch.testing._comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(fork_server.PRELOAD)
    if config.option.beside and not config.option.collectonly:
        # Both import torch, on another core than this process, which collects tests meanwhile.
        fork_server.start()
        config.stash[NURSERY] = Nursery()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each asynchronous test on asyncio's own loop and on uvloop's."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    with contextlib.suppress(ImportError):
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.hookimpl(tryfirst=True)  # slow tests are left out afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose what is quick: one loop for each asynchronous test, by the test's name, and a part of the combinations."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or "_asyncio_loop_factory" not in callspec.params:
            continue
        loop, *others = callspec.id.split("-", 1)  # pytest-asyncio parametrises first
        name = item.nodeid.removesuffix(f"[{callspec.id}]") + "".join(others)
        if loop != ("asyncio", "uvloop")[zlib.crc32(name.encode()) % 2]:
            item.add_marker(pytest.mark.slow)
    covering.mark_the_rest_slow(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Have one nursery for all processes that run tests, from the first test to the last."""
    gc.freeze()  # what has been collected is there to the end, and costs no collection anything
    gc.enable()
    torch.set_num_threads(session.config.stash[TORCH_THREADS])
    wanted = any("nursery" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and NURSERY not in session.config.stash and not session.config.option.collectonly:
        session.config.stash[NURSERY] = Nursery()
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the nursery."""
    if (nursery := config.stash.get(NURSERY, None)) is not None:
        nursery.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def process_wide_singletons(pytestconfig: pytest.Config) -> None:
    """Bring to life what stays once it exists: torch's threads, our portal with its loop, our shared memory."""
    torch.ones(1 << 16).sum()
    if pytestconfig.getoption("--subject") == ["torch"]:
        return
    from asyncloader import DataLoader

    _bring_to_life(DataLoader)
    small_forks.settle()


def _bring_to_life(loader_class: type[torch.utils.data.DataLoader[Any]]) -> None:
    """Run a loader with a worker, and have the loop listen once: libuv keeps a descriptor of /dev/null from then on."""
    from asyncloader.engine.portal import get_portal

    large = torch.zeros(1 << 18)  # 1 MiB: over anything that travels inline
    for _ in loader_class([large, large], num_workers=1):  # type: ignore[arg-type]
        pass

    async def listen() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        server.close()
        await server.wait_closed()

    asyncio.run_coroutine_threadsafe(listen(), get_portal().loop).result(10)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, process_wide_singletons: None) -> Iterator[None]:
    """Fail a test after which there are more children, threads, descriptors or segments than before it."""
    small_forks.settle_if_grown()
    before = Holdings.now()
    yield
    if request.node.get_closest_marker("leaks") or not request.node.stash.get(PASSED, False):
        return  # the traceback of a failed test keeps the frames, and with them the iterators, that it failed in
    left = before.more_than_before()
    contexts = sys.modules.get("asyncloader.seeding.sample_context")  # there is none where torch is what is tested
    if contexts is not None and contexts.current.get(None) is not None:
        contexts.current.set(None)
        left.append("this thread is still at a sample")
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def workers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the workers of a test that says so: Python 3.14 and later would ask the fork server."""
    if request.node.get_closest_marker("forked") is None:
        yield
        return
    default = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(default, force=True)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def workers_are_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the workers of a test marked `on_threads` be threads before a commit, where it does not say; see effort.py.

    Forks are nearly all that an epoch with worker processes costs: ten times what it costs on threads.
    """
    marked = map(request.node.get_closest_marker, ("on_threads", "processes"))
    if not effort.is_quick or [marker is not None for marker in marked] != [True, False]:
        yield
        return
    from asyncloader import DataLoader

    defaults: Any = inspect.unwrap(DataLoader.__init__).__kwdefaults__
    default = defaults["worker_backend"]
    defaults["worker_backend"] = "thread"
    yield
    defaults["worker_backend"] = default


@pytest.fixture(params=["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def start_method(request: pytest.FixtureRequest) -> str:
    """Each way of starting a worker process that this platform has.

    A spawned worker imports torch, which takes 2 s of CPU time; what it is given is pickled as for the fork server.
    """
    if request.param not in multiprocessing.get_all_start_methods():
        pytest.skip(f"{sys.platform} does not have {request.param}")
    return request.param


@pytest.fixture(params=["torch", "ours"])
def loader_class(request: pytest.FixtureRequest) -> type[torch.utils.data.DataLoader]:
    """torch's DataLoader and ours."""
    if request.param == "torch":
        return torch.utils.data.DataLoader
    return pytest.importorskip("asyncloader").DataLoader


@pytest.fixture
def patient_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give worker processes that are asked where they are more time to answer: other work may keep them from it."""
    from asyncloader.backends.processes import process

    monkeypatch.setattr(process.WorkerProcess, "answers_within_s", 10.0)
    monkeypatch.setattr(process, "_STACK_QUIET_S", 0.2)


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Nursery:
    """The process from which programs are forked."""
    return pytestconfig.stash[NURSERY]


@pytest.fixture
def start(request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program from its source; what is left of it in the end is killed."""
    programs = []
    marked = [end for end in (End.DESTRUCTORS, End.INTERPRETER) if request.node.get_closest_marker(end)]
    end = marked[0] if marked else End.HOOKS

    def begin(source: str, *arguments: object, **environment: str) -> Program:
        path = tmp_path / f"program_{len(programs)}.py"
        path.write_text(textwrap.dedent(source))
        programs.append(nursery.start(path, *map(str, arguments), end=end, **environment))
        return programs[-1]

    yield begin
    for program in programs:
        program.close()


@pytest.fixture
def run(start: Callable[..., Program]) -> Callable[..., Program]:
    """Runs a program to its end, within a time limit, and sees that nothing of it is left."""

    def whole(source: str, *arguments: object, timeout_s: float = 50.0, **environment: str) -> Program:
        program = start(source, *arguments, **environment)
        program.wait(timeout_s)
        left = program.survivors(3.0)
        assert not left, program.explain(f"left behind: {left}")
        return program

    return whole


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, also in a program that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
