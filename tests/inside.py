"""What tests look at inside loaders and iterators: each look at a private attribute of theirs has its name here.

Tests that can see what they are about from outside, by batches, errors, states and `stats()`, do that. A test of a
module asks the module's own objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncloader.engine.session import Session
    from asyncloader.options import Options
    from asyncloader.run.runs import Runs
    from asyncloader.run.worker_iterator import WorkerIterator


def options(loader: Any, last: Options | None = None) -> Options:
    """Return the record of a loader's options, as iterators get it; the last one, if nothing was set since then."""
    made: Options = loader._loader_options(last)
    return made


def runs(loader: Any) -> Runs:
    """Return what a loader knows of its runs: which was begun, what was loaded, and what a state is taken of."""
    known: Runs = loader._runs
    return known


def newest_iterator(loader: Any) -> Any:
    """Return the latest iterator of a loader; None if there was none, or nobody keeps it."""
    return loader._newest()


def iterator_of(kind: type[Any], loader: Any) -> Any:
    """Begin a run of a loader by an iterator of this class."""
    return kind(loader, options(loader), runs(loader), wait_for_start=True)


def session(iterator: Any) -> Session:
    """Return the session of an iterator with workers: one pool of workers, run after run."""
    found: Session = iterator._session
    return found


def run(iterator: Any) -> Any:
    """Return the run that consumers of an iterator take batches from, a `Run` or an `InlineRun`."""
    return iterator._run


def workers(iterator: Any) -> list[Any]:
    """Return the worker processes of an iterator by their numbers, as torch's iterators list them."""
    found: list[Any] = iterator._workers
    return found


def pids(iterator: Any) -> list[int]:
    """Return the process ids of the workers of an iterator, by the workers' numbers."""
    return [worker.pid for worker in workers(iterator)]


def foreseen(iterator: WorkerIterator[Any]) -> Any:
    """Return the next epoch, where an iterator has begun to make batches of it ahead; None otherwise."""
    assert iterator._foresight is not None
    return iterator._foresight._foreseen
