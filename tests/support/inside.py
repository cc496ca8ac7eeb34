"""What tests look at inside loaders and iterators: each look at a private attribute of theirs has its name here.

Tests that can see what they are about from outside, by batches, errors, states and `stats()`, do that. A test of a
module asks the module's own objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncloader.seeding import turns
from tests.support.patience import wait_until

if TYPE_CHECKING:
    from asyncloader.engine.engine import Engine
    from asyncloader.options import Options
    from asyncloader.run.runs import Runs
    from asyncloader.seeding.sample_context import SampleContext
    from asyncloader.transport.heap import Heap
    from asyncloader.transport.slab import SlabPool


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
    return loader._runs.iterator


def iterator_of(kind: type[Any], loader: Any) -> Any:
    """Begin a run of a loader by an iterator of this class."""
    return kind(loader, options(loader), runs(loader), wait_for_start=True)


def engine(iterator: Any) -> Engine:
    """Return the engine of an iterator with workers: one pool of workers, run after run."""
    found: Engine = iterator._engine
    return found


def until_engines_end() -> None:
    """Wait until the engines of all iterators that were dropped or closed have ended."""
    from asyncloader.engine.portal import get_portal

    wait_until(lambda: not get_portal().sessions)


def run(iterator: Any) -> Any:
    """Return the run that consumers of an iterator with workers take batches from."""
    return iterator._run


def is_waiting(iterator: Any) -> bool:
    """Whether a consumer waits for a batch."""
    return (iterator._run.handoff if hasattr(iterator, "_run") else iterator._handoff).is_awaited  # type: ignore[no-any-return]


def workers(iterator: Any) -> list[Any]:
    """Return the worker processes of an iterator by their numbers, as torch's iterators list them."""
    found: list[Any] = iterator._workers
    return found


def pids(iterator: Any) -> list[int]:
    """Return the process ids of the workers of an iterator, by the workers' numbers."""
    return [worker.pid for worker in workers(iterator)]


def parked(iterator: Any) -> Any:
    """Return the batches that came too early, and wait for their turn."""
    return engine(iterator).run.scheduler._parked  # type: ignore[union-attr]


async def until_started(iterator: Any) -> None:
    """Wait until the workers of an async iterator were started."""
    await iterator._until_started()


def set_timeout(iterator: Any, seconds: float) -> None:
    """Have consumers of an iterator wait for so long from now on."""
    iterator._options = dataclasses.replace(iterator._options, timeout=seconds)


# ------------------------------------------------------------------------------------------------- shared memory
def arena(pool: SlabPool) -> Any:
    """Return the shared memory that the slabs of a pool lie in; None if there is none."""
    return pool.arena


def leases_ended(pool: SlabPool) -> bool:
    """Whether leases have ended that the pool has yet to take note of."""
    return bool(pool._ended)


def has_forks(pool: SlabPool) -> bool:
    """Whether copies of this process might look at memory of the pool."""
    return bool(pool._forked)


def leases(pool: SlabPool) -> tuple[Any, ...]:
    """Return the leases whose tensors are alive, as far as is known."""
    return tuple(pool._leases)


def free_bytes(recycler: Any) -> int:
    """Return the bytes of blocks that wait to be used again."""
    return sum(len(memory) for _, memory in recycler.free)


def idle_bytes(heap: Heap) -> int:
    """Return the bytes of slabs that a worker may use again."""
    return heap._idle.nbytes


def descriptor(memory: Any) -> int:
    """Return the descriptor of an arena."""
    fd: int = memory._fd
    return fd


# ------------------------------------------------------------------------------------------------- datasets
def sizes(items: Any) -> Any:
    """Return the sizes of what a thread has read of a stream, and takes for there."""
    return items._sizes


def waiting(keys: Any) -> int:
    """Return how many items of a stream wait to be taken."""
    count: int = keys._items._queue.qsize()
    return count


def spans(dataset: Any) -> Any:
    """Return where in their shards the samples of a dataset lie, as it has them."""
    return dataset._spans


def versions(dataset: Any) -> list[Any]:
    """Return the versions that the files of a dataset had when it was made."""
    found: list[Any] = dataset._versions
    return found


def contents(shared: Any) -> Any:
    """Return the memory that a shared list is read from."""
    return shared._content


# ------------------------------------------------------------------------------------------------- whose turn it is
def turn_is_free() -> bool:
    """Whether the calling thread could have its turn with the global generators now; it may be its turn already."""
    if is_free := turns.lock.acquire(blocking=False):
        turns.lock.release()
    return is_free


def turn_holder() -> SampleContext | None:
    """Return the sample whose turn it is."""
    return turns._holder


# ------------------------------------------------------------------------------------------------- renewal
_RENEWAL = 1 << 50


def renewed_after(batches: int) -> dict[str, Any]:
    """Return options with which each worker is renewed when it has made so many batches; see `renewals_by_count`."""
    return {"max_worker_memory": _RENEWAL + batches}


def renew_no_more(iterator: Any) -> None:
    """Have no other worker of a run be renewed than those that are due; see `renewals_by_count`."""
    engine(iterator).workforce._max_bytes = _RENEWAL + sys.maxsize


@contextlib.contextmanager
def renewals_by_count() -> Iterator[None]:
    """Have workers grow by what they make, and not by the memory that they tell of."""
    from asyncloader.engine.workforce import Workforce
    from asyncloader.observe.meter import Meter

    told: Counter[int] = Counter()  # batches of one read of a worker's channel, which are told together

    def made(self: Meter, worker: int, records: Any) -> None:
        told[worker] += len(records)
        made_before(self, worker, records)

    def has_grown(self: Workforce, worker: int, private_bytes: int) -> bool:
        new = told.pop(worker, 0)
        if self._max_bytes is None:
            return False
        self._bounds[worker] = count = self._bounds.get(worker, 0) + new
        if count >= self._max_bytes - _RENEWAL:
            self.grown[worker] = count
        return worker in self.grown

    made_before, Meter.made = Meter.made, made  # type: ignore[method-assign]
    before, Workforce.has_grown = Workforce.has_grown, has_grown  # type: ignore[method-assign]
    try:
        yield
    finally:
        Meter.made = made_before  # type: ignore[method-assign]
        Workforce.has_grown = before  # type: ignore[method-assign]
