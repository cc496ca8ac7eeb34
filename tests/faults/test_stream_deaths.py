"""Workers of streams that have several batches in work at once die or hang: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import BatchTimeoutError, DataLoader, WorkerDiedError
from asyncloader.testing import assert_resumable
from tests.faults.test_deaths import DEATHS
from tests.support import effort, inside
from tests.support.patience import wait_until

LENGTH = 60
PATIENCE_S = 20.0

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Samples:
    """What befalls samples, once for each file that says so, and a list of those that were begun with.

    ``read 7`` kills the worker when sample 7 is read, ``await 7`` when it is awaited; ``hang 7`` and ``hang at 7``
    have it hang there for ever.
    """

    def __init__(self, folder: Path, length: int = LENGTH) -> None:
        self.folder = folder
        self.length = length

    def numbers(self) -> list[int]:
        """Return the share of the worker: every n-th, and some workers have fewer."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return [number for number in range(self.length - 5 * worker) if number % workers == worker]

    def befalls(self, what: str) -> bool:
        """Whether this is to happen; it happens once."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / what).unlink()
            return True
        return False

    def note(self, number: int) -> None:
        """Write down that a sample is begun with."""
        with open(self.folder.parent / "begun", "a") as begun:
            begun.write(f"{number}\n")

    def read(self, number: int) -> Any:
        """Read a sample."""
        if self.befalls(f"read {number}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.later(number)

    async def later(self, number: int) -> int:
        """Get a sample that was read; later ones often come first."""
        self.note(number)
        if self.befalls(f"hang at {number}"):
            await asyncio.Event().wait()
        await asyncio.sleep(0.001 * (number * 7 % 5))
        if self.befalls(f"await {number}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return number


class Declared(Samples):
    """Yields the same each time."""

    deterministic = True

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            await asyncio.sleep(0)
            if self.befalls(f"hang {number}"):
                await asyncio.Event().wait()
            yield self.read(number)


class Telling(Samples):
    """Tells how many samples it has yielded."""

    at = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        numbers = self.numbers()
        while self.at < len(numbers):
            await asyncio.sleep(0)
            if self.befalls(f"hang {numbers[self.at]}"):
                await asyncio.Event().wait()
            self.at += 1
            yield self.read(numbers[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Reader:
    """An async iterator that tells where it is."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.numbers = samples.numbers()
        self.at = 0

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopAsyncIteration
        await asyncio.sleep(0)
        self.at += 1
        return self.samples.read(self.numbers[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OfIterator(Samples):
    """Its iterators tell where they are."""

    def __aiter__(self) -> Reader:
        return Reader(self)


class Threaded(Samples, IterableDataset[Any]):
    """A plain stream of awaitable samples: with `concurrency` they overlap as well."""

    deterministic = True

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, self.numbers())


class Silent(Samples):
    """Neither tells where it is nor says that it is the same each time."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            yield self.read(number)


KINDS: list[Any] = [Declared, Telling, OfIterator, Threaded]
kinds = pytest.mark.parametrize("kind", KINDS)


def half_of_kinds(turn: int) -> pytest.MarkDecorator:
    """Have a test for every second kind before a commit, and for the others each night."""
    few = effort.share(KINDS, turn)
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in few)) for kind in KINDS]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where it is said what is to happen."""
    (tmp_path / "events").mkdir()
    return tmp_path / "events"


def make_loader(kind: Callable[[Path], Any], folder: Path, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(folder), **{"batch_size": 3, "num_workers": 2, "concurrency": 12, **options})


def plan(folder: Path, *events: str) -> None:
    """Say what is to happen."""
    for event in events:
        (folder / event).touch()


def plain(batch: Any) -> Any:
    return batch.tolist() if hasattr(batch, "tolist") else batch


def undisturbed(kind: Callable[[Path], Any], folder: Path, **options: Any) -> list[Any]:
    """Return the batches of an epoch in which nothing happens, in order; workers are threads, if there are any."""
    assert not list(folder.iterdir())
    backend = "process" if options.get("num_workers") == 0 else "thread"
    loader = make_loader(kind, folder, **{**options, "in_order": True, "worker_backend": backend})
    batches = [plain(batch) for batch in loader]
    (folder.parent / "begun").unlink()
    return batches


def times_begun(folder: Path) -> Counter[int]:
    """Return how often each sample was begun with."""
    return Counter(map(int, (folder.parent / "begun").read_text().split()))


def wait_for_parked(iterator: Any, count: int) -> None:
    """Wait until so many batches are here, and wait for an earlier one."""
    wait_until(lambda: len(inside.parked(iterator)) == count)


def kill(iterator: Any, worker: int = 0) -> None:
    os.kill(inside.engine(iterator).pool.processes[worker].pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.covering(1)
@kinds
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1, "concurrency": 18},
        {"num_workers": 3, "batch_size": 1},
        {"batch_size": None, "prefetch_factor": 8},
        {"drop_last": True, "batch_size": 4, "snapshot_every_n_steps": 3},
    ],
    ids=str,
)
def test_an_epoch_with_deaths_is_the_undisturbed_one(kind: Any, options: dict[str, Any], folder: Path) -> None:
    """Killed while samples are read, and while later ones are here before earlier ones: all the same, in order."""
    expected = undisturbed(kind, folder, **options)
    first, last = 25, LENGTH - options.get("num_workers", 2)
    if kind is OfIterator:  # until it has told where it is, it cannot be replaced
        first, options = 36, {**options, "concurrency": 4, "snapshot_every_n_steps": 1}
    plans = ([f"await {first}"], [f"read {first}", f"await {first + 1}", "await 43", "read 48"], [f"read {last}"])
    for events in plans[1:2] if effort.is_quick else plans:
        plan(folder, *events)
        loader = make_loader(kind, folder, **options, max_retries=5)
        assert [plain(batch) for batch in loader] == expected
        assert not list(folder.iterdir()), "it did not happen"


@pytest.mark.parametrize(
    "death",
    [
        pytest.param(death, marks=() if death in ("SIGKILL", "os._exit") else pytest.mark.slow)
        for death in DEATHS
        if death not in ("sys.exit", "KeyboardInterrupt")
    ],
)
def test_every_way_to_die(death: str, folder: Path) -> None:
    """Signals, crashes and exits are the same thing to the rest."""

    class Dying(Declared):
        async def later(self, number: int) -> int:
            if self.befalls(f"die {number}"):
                DEATHS[death][0]()
            return await super().later(number)

    expected = undisturbed(Declared, folder)
    plan(folder, "die 20", "die 33")
    assert [plain(batch) for batch in make_loader(Dying, folder)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Declared, Telling])
def test_deaths_under_every_start_method(kind: Any, start_method: str, folder: Path) -> None:
    """Where to begin gets to a worker that is started in whatever way."""
    expected = undisturbed(kind, folder)
    plan(folder, "await 20", "read 33")
    assert [plain(batch) for batch in make_loader(kind, folder, multiprocessing_context=start_method)] == expected


@half_of_kinds(0)
def test_what_came_ahead_of_a_slow_batch_is_not_made_again(kind: Any, folder: Path) -> None:
    """All others of the stream are here, and it has ended, when the worker dies: only the slow one is made again."""
    options = {"num_workers": 1, "concurrency": 64}
    expected = undisturbed(kind, folder, **options)
    plan(folder, "hang at 4")
    iterator: Any = iter(make_loader(kind, folder, **options))
    found = [plain(next(iterator))]
    wait_for_parked(iterator, len(expected) - 2)
    kill(iterator)
    found += [plain(batch) for batch in iterator]
    assert found == expected
    assert times_begun(folder) == Counter({**dict.fromkeys(range(LENGTH), 1), 3: 2, 4: 2, 5: 2})


@half_of_kinds(1)
def test_what_comes_out_of_order_comes_once(kind: Any, folder: Path) -> None:
    """With in_order=False what was ahead has been handed over already; and a state knows of it."""
    expected = undisturbed(kind, folder)
    plan(folder, "hang at 10", "hang at 13")
    loader = make_loader(kind, folder, in_order=False)
    iterator: Any = iter(loader)
    found = [plain(next(iterator)) for _ in range(8)]
    wait_until(lambda: not any(folder.iterdir()))  # both hang, and the next ones will not
    if kind is OfIterator:  # which can be replaced once they have told where they were
        tracks = inside.engine(iterator).run.tracks.values()
        wait_until(lambda: all(track.start.snapshot is not None for track in tracks))
    state = loader.state_dict()
    kill(iterator, 0)
    kill(iterator, 1)
    rest = [plain(batch) for batch in iterator]
    assert sorted(found + rest) == sorted(expected)
    other = make_loader(kind, folder, in_order=False)
    other.load_state_dict(state)
    assert sorted(found + [plain(batch) for batch in other]) == sorted(expected)
    assert not list(folder.iterdir())


def test_persistent_workers(folder: Path) -> None:
    """Deaths in one epoch and in a later one, once batches have told where workers were; who was replaced serves on."""
    expected = undisturbed(Telling, folder)
    # What is read ahead of the window might be read before any batch has told.
    loader = make_loader(Telling, folder, persistent_workers=True, max_buffered_bytes=0)
    for events in (["await 31", "read 40"], [], ["read 48", "await 51"]):
        plan(folder, *events)
        assert [plain(batch) for batch in loader] == expected
        assert not list(folder.iterdir())


def test_a_storm_of_deaths(folder: Path) -> None:
    """Worker after worker dies, with nothing between: they rest, and all is read in the end."""
    expected = undisturbed(Declared, folder)

    class Stormy(Declared):
        async def later(self, number: int) -> int:
            if any(self.befalls(f"storm {i}") for i in range(10)):
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().later(number)

    plan(folder, *(f"storm {i}" for i in range(10)))
    assert [plain(batch) for batch in make_loader(Stormy, folder, max_retries=20)] == expected


@pytest.mark.parametrize("kind", [Declared, OfIterator])
def test_a_run_goes_on_in_the_middle_and_after_deaths(kind: Any, folder: Path) -> None:
    """A state taken when batches are ahead; the run that goes on from it is disturbed as well."""
    expected = undisturbed(kind, folder)
    for taken in (9,) if effort.is_quick else (1, 5, 9, 14):
        loader = make_loader(kind, folder)
        with iter(loader) as iterator:
            found = [plain(next(iterator)) for _ in range(taken)]
            state = loader.state_dict()
        plan(folder, "await 56", "read 51")
        other = make_loader(kind, folder)
        other.load_state_dict(state)
        assert found + [plain(batch) for batch in other] == expected
        assert not list(folder.iterdir())


def test_a_stream_that_kills_every_worker_is_given_up(folder: Path) -> None:
    """After max_retries the error stands in its place; what came ahead of it is handed over once."""

    class Fatal(Declared):
        async def later(self, number: int) -> int:
            if number == 7:
                plan(self.folder, "await 7")
            return await super().later(number)

    expected = undisturbed(Declared, folder, num_workers=1)
    iterator: Any = iter(make_loader(Fatal, folder, num_workers=1, max_retries=1))
    assert [plain(next(iterator)) for _ in range(2)] == expected[:2]
    found, errors = [], 0
    while errors < 3:
        try:
            found.append(plain(next(iterator)))
        except WorkerDiedError as error:
            assert "tried 2 times" in str(error)
            errors += 1
    assert found == expected[3 : 3 + len(found)]
    iterator.close()


def test_a_death_is_raised(folder: Path) -> None:
    """With on_crash="raise" once; what the worker had is read by the next one, so nothing is lost."""
    expected = undisturbed(Telling, folder)
    plan(folder, "await 31")
    iterator = iter(make_loader(Telling, folder, on_crash="raise"))
    found: list[Any] = []
    with pytest.raises(WorkerDiedError):
        found.extend(plain(batch) for batch in iterator)
    found += [plain(batch) for batch in iterator]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [(Silent, {}, "deterministic = True"), (Declared, {"on_crash": "skip"}, 'with "skip" a batch')],
)
def test_who_is_not_replaced(kind: Any, options: dict[str, Any], words: str, folder: Path) -> None:
    """An error that says why, and the other worker goes on."""
    plan(folder, "await 31")
    iterator = iter(make_loader(kind, folder, **options))
    found: list[int] = []
    with pytest.raises(WorkerDiedError) as caught:
        found.extend(number for batch in iterator for number in batch.tolist())
    assert words in str(caught.value)
    assert "It was reading an iterable dataset" in str(caught.value)
    assert "None" not in str(caught.value)
    found += [number for batch in iterator for number in batch.tolist()]
    assert set(range(0, LENGTH, 2)) <= set(found)
    assert len(set(found)) == len(found)


# ------------------------------------------------------------------------------------------------- errors in streams


class Bumpy(Samples):
    """An async iterator that raises at some samples, when they are read or awaited, and goes on."""

    deterministic = True

    def __aiter__(self) -> Any:
        return BumpyReader(self)

    async def later(self, number: int) -> int:
        await super().later(number)
        if number % 11 == 5:
            raise asyncio.CancelledError if number % 2 else ValueError(number)
        return number


class BumpyReader(Reader):
    """See `Bumpy`."""

    state_dict = None  # type: ignore[assignment]

    async def __anext__(self) -> Any:
        sample = await super().__anext__()
        if self.numbers[self.at - 1] % 9 == 4:
            sample.close()
            raise KeyError(self.numbers[self.at - 1])
        return sample


def outcomes(loader: DataLoader[Any], state: Any = None) -> list[Any]:
    """Return batches, and in the place of one what was raised."""
    if state is not None:
        loader.load_state_dict(state)
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append(repr(error).splitlines()[0][:40])
            assert len(found) < LENGTH


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_batches_that_raise_are_read_over_as_they_were_read(on_error: Any, folder: Path) -> None:
    """Where the next batch begins after one that raised does not depend on timing, nor on who reads."""
    options: dict[str, Any] = {"on_error": on_error, "num_workers": 1, "concurrency": 24}
    expected = outcomes(make_loader(Bumpy, folder, **options))
    assert len({str(outcome) for outcome in expected}) > 12
    for number in effort.share((24, 47), len(on_error)):
        plan(folder, f"hang at {number}")
        loader = make_loader(Bumpy, folder, **options, timeout=1.0, on_timeout="retry", max_retries=50)
        assert outcomes(loader) == expected
        assert not list(folder.iterdir())
    loader = make_loader(Bumpy, folder, **options)
    iterator = iter(loader)
    for done in range(1, 8):
        with contextlib.suppress(ValueError, KeyError, RuntimeError):
            next(iterator)
        if effort.is_quick and done != 4:
            continue
        assert outcomes(make_loader(Bumpy, folder, **options), loader.state_dict()) == expected[done:]


# -------------------------------------------------------------------------------------------------------------- hangs

PLACES = [
    pytest.param({}, id="processes"),
    pytest.param({"worker_backend": "thread"}, id="threads"),
    pytest.param({"num_workers": 0}, id="here"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("kind", [Declared, Telling])
def test_a_worker_that_hangs_is_replaced(kind: Any, options: dict[str, Any], folder: Path) -> None:
    """Where a sample hangs and where the reader does, in every place that workers can be in."""
    expected = undisturbed(kind, folder, **options)
    plan(folder, "hang at 31", "hang 42")
    loader = make_loader(kind, folder, timeout=0.3, on_timeout="retry", max_retries=50, **options)
    assert [plain(batch) for batch in loader] == expected
    assert not list(folder.iterdir())


def test_here_a_dataset_without_a_state_yet_is_not_begun_anew(folder: Path) -> None:
    """The one object has gone on, and nobody knows what it began with."""
    plan(folder, "hang 1")
    loader = make_loader(Telling, folder, num_workers=0, timeout=0.2, on_timeout="retry")
    iterator = iter(loader)
    with pytest.raises(BatchTimeoutError) as caught:
        next(iterator)
    assert "was not replaced" in "".join(caught.value.__notes__)
    assert "The awaited batch is of an iterable dataset" in str(caught.value)
    iterator.close()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pytest.param(Declared, marks=pytest.mark.slow), Telling, OfIterator])
def test_states_out_of_order_are_exact(kind: Any, every: int, folder: Path) -> None:
    """From the state after any batch just those come that had not come."""
    expected = undisturbed(kind, folder)
    loader = make_loader(kind, folder, in_order=False)
    found: list[Any] = []
    for batch in loader:
        found.append(plain(batch))
        if len(found) % every:
            continue
        other = make_loader(kind, folder, in_order=False)
        other.load_state_dict(loader.state_dict())
        assert sorted(found + [plain(batch) for batch in other]) == sorted(expected)


@pytest.mark.parametrize("backend", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_such_streams_are_resumable(folder: Path, backend: str) -> None:
    """In order, and from a state by fewer at once."""
    make = partial(make_loader, Declared, folder, worker_backend=backend)
    assert_resumable(make, resume_with=partial(make, concurrency=2))


class BeginsAnew(Samples):
    """Its own iterator, which begins anew when it is asked again after its end."""

    deterministic = True
    at = 0

    def __aiter__(self) -> BeginsAnew:
        self.at = 0
        return self

    async def __anext__(self) -> Any:
        if self.at == self.length:
            self.at = 0
            raise StopAsyncIteration
        self.at += 1
        return self.read(self.at - 1)


def test_an_iterator_is_not_asked_after_its_end(folder: Path) -> None:
    """Not either where the short batch at the end is read over, because it was there before the worker died."""
    plan(folder, "hang at 4")
    options: dict[str, Any] = {"num_workers": 1, "concurrency": 64}
    iterator: Any = iter(make_loader(lambda folder: BeginsAnew(folder, 10), folder, **options))
    found = [plain(next(iterator))]
    wait_for_parked(iterator, 2)
    kill(iterator)
    found += [plain(batch) for batch in iterator]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Epochs(Samples):
    """Counts its epochs, and that is part of its state. ``hang`` holds up the first sample of a later one.

    Its state at the end of an epoch is where the next one begins.
    """

    epoch = 0
    at = 0
    told: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def numbers(self) -> list[int]:
        info = get_worker_info()
        return [100 * (0 if info is None else info.id) + number for number in range(8)]

    async def __aiter__(self) -> AsyncIterator[Any]:
        if self.epoch and self.befalls("hang at begin"):
            await asyncio.Event().wait()
        while self.at < 8:
            if self.epoch and self.befalls("hang"):
                await asyncio.Event().wait()
            self.at += 1
            yield self.epoch * 1000 + self.numbers()[self.at - 1] + (0 if self.told is None else 10_000 * self.told)
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.told = state["epoch"], state["at"], state["told"]


class PlainEpochs(Epochs, IterableDataset[Any]):
    """The same, read one after the other."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while self.at < 8:
            if self.epoch and self.befalls("hang"):
                threading.Event().wait()
            self.at += 1
            yield self.epoch * 1000 + self.numbers()[self.at - 1] + (0 if self.told is None else 10_000 * self.told)
        self.epoch, self.at = self.epoch + 1, 0

    __aiter__ = None  # type: ignore[assignment]


@pytest.mark.covering(1)
@pytest.mark.parametrize("set_epochs", [{}, {0: 5}, {0: 5, 1: 6}, {1: 6}], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", [Epochs, PlainEpochs])
def test_a_worker_that_dies_at_the_beginning_of_a_later_epoch(
    kind: Any, num_workers: int, set_epochs: dict[int, int], folder: Path
) -> None:
    """Another one begins where it was at the end of the epoch before, and is told what was told since."""
    concurrency = {"concurrency": 12} if kind is Epochs else {"concurrency": 1}
    options: dict[str, Any] = {"batch_size": 4, "persistent_workers": True, "num_workers": num_workers, **concurrency}

    def epochs(**disturbed: Any) -> list[Any]:
        loader = make_loader(kind, folder, **options)
        found = []
        for epoch in range(4):
            if epoch in set_epochs:
                loader.set_epoch(set_epochs[epoch])
            if epoch == disturbed.get("at"):
                plan(folder, "hang")
            iterator: Any = iter(loader)
            if epoch == disturbed.get("at"):
                wait_until(lambda: not any(folder.iterdir()))
                for worker in range(num_workers):
                    kill(iterator, worker)
            found.append([plain(batch) for batch in iterator])
        loader.close()
        return found

    expected = epochs()
    assert [batches[0][0] % 10_000 for batches in expected] == [0, 1000, 2000, 3000]
    for at in effort.share((1, 2), len(set_epochs)):
        assert epochs(at=at) == expected


def test_one_that_dies_between_two_epochs(folder: Path) -> None:
    """With nothing to do: the next epoch begins with another one, where it was."""
    loader = make_loader(Epochs, folder, num_workers=2, batch_size=4, persistent_workers=True)
    iterator: Any = iter(loader)
    first = [plain(batch) for batch in iterator]
    kill(iterator)
    second = [plain(batch) for batch in loader]
    assert second == [[number + 1000 for number in batch] for batch in first]
    loader.close()


@pytest.mark.parametrize("every", [1, 3])
def test_an_epoch_after_one_that_was_left_is_not_begun_anew(every: int, folder: Path) -> None:
    """No worker has told where it was then; killed before it tells, what it had counted is lost, and that is raised."""
    loader = make_loader(
        Epochs, folder, num_workers=1, batch_size=4, persistent_workers=True, snapshot_every_n_steps=every
    )
    assert [plain(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    iterator: Any
    for event in ("hang at begin", "hang"):  # the first of these epochs is left before it has told anything
        plan(folder, event)
        iterator = iter(loader)
        wait_until(lambda: not any(folder.iterdir()))
    kill(iterator)
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert "given no state of its iterable dataset in this epoch, nor at the end" in str(caught.value)
    del iterator
    assert [plain(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]  # with workers of its own
    loader.close()


class Untold(Samples):
    """Its iterators tell where they are; it counts them, and does not tell. ``hang`` as in `Epochs`."""

    epoch = -1

    def __aiter__(self) -> Reader:
        self.epoch += 1
        return UntoldReader(self)


class UntoldReader(Reader):
    """See `Untold`."""

    async def __anext__(self) -> Any:
        if self.samples.epoch and self.samples.befalls("hang"):  # type: ignore[attr-defined]
            await asyncio.Event().wait()
        return await super().__anext__()


def test_a_later_epoch_is_not_begun_from_the_first(folder: Path) -> None:
    """What a dataset keeps, and does not tell, nobody can bring back. The next run is new."""
    loader = make_loader(Untold, folder, num_workers=1, batch_size=4, persistent_workers=True)
    first = [plain(batch) for batch in loader]
    plan(folder, "hang")
    iterator: Any = iter(loader)
    wait_until(lambda: not any(folder.iterdir()))
    kill(iterator)
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert "nobody knows where it was" in str(caught.value)
    del iterator
    assert [plain(batch) for batch in loader] == first  # with workers of its own
    loader.close()


def test_a_stream_is_not_skipped_over(folder: Path) -> None:
    """With on_timeout="skip" a hang is raised: what another worker would leave out is not what hangs."""
    plan(folder, "hang at 4")
    options: dict[str, Any] = {"timeout": 0.5, "on_timeout": "skip", "multiprocessing_context": "fork"}
    iterator = iter(make_loader(Declared, folder, num_workers=1, **options))  # what is forked comes up at once
    next(iterator)
    with pytest.raises(BatchTimeoutError) as caught:
        next(iterator)
    assert 'with "skip" a batch' in "".join(caught.value.__notes__)


def test_a_death_that_is_raised_is_no_loss(folder: Path) -> None:
    """With on_crash="raise" the worker is replaced, and nothing else is said."""
    plan(folder, "await 4")
    iterator = iter(make_loader(Declared, folder, num_workers=1, on_crash="raise"))
    with pytest.raises(WorkerDiedError) as caught:
        list(iterator)
    assert "not replaced" not in str(caught.value)


class Plain(IterableDataset[int]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 12, info.num_workers))


def _die_once(folder: Path, worker: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / f"open {worker}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("on_crash", ["retry", "skip"])
def test_a_worker_that_had_not_opened_a_stream_is_replaced(on_crash: Any, tmp_path: Path) -> None:
    """Whatever is known of places in the stream: it had read nothing."""
    (tmp_path / "open 1").touch()
    loader = DataLoader(Plain(), 2, num_workers=2, on_crash=on_crash, worker_init_fn=partial(_die_once, tmp_path))
    assert [batch.tolist() for batch in loader] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert loader.stats().faults.replacements == 1
