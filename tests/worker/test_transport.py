"""What cannot be unpickled at the other end costs its own batch, and no other."""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, WorkerDiedError
from asyncloader.engine.portal import get_portal
from asyncloader.messages.messages import Kind
from asyncloader.worker.channel import WorkerChannel
from asyncloader.worker.transport import ParentGone, ProcessTransport


def refuse(pid: int, error: type[BaseException]) -> Any:
    """Come out of the pickle in one process only."""
    if os.getpid() != pid:
        raise error("not here")
    return Refusing(error)


class Refusing:
    """Can be unpickled in the process that pickled it, and nowhere else."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return refuse, (os.getpid(), self.error)


class Numbers(Dataset[Any]):
    """Six samples, of which the trainer cannot read the third."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return Refusing(self.error) if index == 2 else index


def outcomes(loader: DataLoader[Any]) -> list[Any]:
    """Return the number in each batch, or the type of what came in its place."""
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            found.append(int(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))


@pytest.mark.parametrize(("error", "arrives"), [(ValueError, ValueError), (SystemExit, RuntimeError)])
def test_a_batch_that_the_trainer_cannot_read(error: type[BaseException], arrives: type[Exception]) -> None:
    """It is the error of its batch; the loop of all loaders lives on, and so do the other batches."""
    loader: DataLoader[Any] = DataLoader(Numbers(error), batch_size=None, num_workers=1, timeout=20)
    assert outcomes(loader) == [0, 1, arrives, 3, 4, 5]
    assert get_portal().loop.is_running()


class Squares(Dataset[Any]):
    """Six samples, by keys that need not be numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, key: Any) -> Any:
        return int(key)


class AwaitedSquares(Squares):
    """The same, awaited."""

    async def __getitem__(self, key: Any) -> Any:
        return int(key)


class Telling(Squares):
    """The same, with a state: what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, key: Any) -> Any:
        self.asked.append(int(key))
        return int(key)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": list(self.asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = list(state["asked"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Squares, AwaitedSquares, Telling])
@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ValueError, ValueError),
        (RecursionError, RecursionError),
        (SystemExit, RuntimeError),
        (KeyboardInterrupt, RuntimeError),
    ],
)
def test_keys_that_a_worker_cannot_read(
    kind: type[Squares], error: type[BaseException], arrives: type[Exception]
) -> None:
    """They cost their own batches, though all of them come in one message; no worker is replaced."""
    keys = [0, 1, Refusing(error), 3, Refusing(error), 5]
    loader: DataLoader[Any] = DataLoader(
        kind(), sampler=keys, batch_size=None, num_workers=1, prefetch_factor=6, timeout=20, on_crash="raise"
    )
    assert outcomes(loader) == [0, 1, arrives, 3, arrives, 5]


def test_a_key_that_a_worker_cannot_read_is_named() -> None:
    """The error says what was raised, and of what."""
    loader: DataLoader[Any] = DataLoader(
        Squares(), sampler=[Refusing(ValueError)], batch_size=1, num_workers=1, timeout=20
    )
    with pytest.raises(ValueError, match="not here") as caught:
        next(iter(loader))
    notes = "".join(caught.value.__notes__)
    assert "Refusing object" in notes
    assert "cannot be unpickled in a worker process" in notes


class Once:
    """A key that kills the process that unpickles it first."""

    def __init__(self, number: int, mark: Path) -> None:
        self.number, self.mark = number, mark

    def __int__(self) -> int:
        return self.number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_dies_as_it_reads_keys(tmp_path: Path) -> None:
    """Its tickets are those of its replacement, and what cannot be read is still one error."""
    keys = [0, Refusing(ValueError), 2, Once(3, tmp_path / "mark"), 4, 5]
    loader: DataLoader[Any] = DataLoader(
        Squares(), sampler=keys, batch_size=None, num_workers=1, prefetch_factor=6, timeout=20
    )
    assert outcomes(loader) == [0, ValueError, 2, 3, 4, 5]
    assert (tmp_path / "mark").exists()


def test_epochs_that_are_left_while_keys_cannot_be_read() -> None:
    """Answers for an epoch that is over are of no concern to the next one, whose tickets have the same numbers."""
    keys: list[Any] = [0, Refusing(ValueError), 2, 3, 4, Refusing(ValueError)]
    loader: DataLoader[Any] = DataLoader(
        Squares(), sampler=keys, batch_size=None, num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=20
    )
    for _ in range(10):
        iter(loader)
        assert outcomes(loader) == [0, ValueError, 2, 3, 4, ValueError]
        keys[:] = [*keys[2:], *keys[:2]]
        assert outcomes(loader) == [2, 3, 4, ValueError, 0, ValueError]
        keys[:] = [*keys[-2:], *keys[:-2]]


class Babbling(Dataset[Any]):
    """Writes into the channel of its worker what a worker never would."""

    def __init__(self, kind: Kind, body: bytes) -> None:
        self.kind, self.body = kind, body

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            (channel,) = (thing for thing in gc.get_objects() if type(thing) is WorkerChannel)
            channel.send(self.kind, self.body)
        return index


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.BATCH, b"short"),
        (Kind.END, b""),
    ],
)
def test_messages_that_make_no_sense(kind: Kind, body: bytes) -> None:
    """They are the end of the worker, which is told, and not something that is waited for."""
    loader: DataLoader[Any] = DataLoader(
        Babbling(kind, body), batch_size=None, num_workers=1, timeout=20, on_crash="raise"
    )
    assert WorkerDiedError in outcomes(loader)
    assert get_portal().loop.is_running()


def test_a_parent_that_has_closed_its_end_is_gone() -> None:
    """A worker then ends quietly: it is no error of its own."""
    parent, worker = socket.socketpair()
    with worker:
        transport = ProcessTransport(0, WorkerChannel(worker), None)
        parent.close()
        with pytest.raises(ParentGone):
            transport.receive(wait=True)


class InitialisesCuda(Dataset[Any]):
    """Its samples stand for code that initialises CUDA: there is no GPU here."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> Any:
        torch.cuda.is_initialized = lambda: True
        return key


def test_a_worker_with_a_cuda_context_says_so_once() -> None:
    """At its first batch, and not again: here the warning is an error."""
    loader = DataLoader(InitialisesCuda(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    assert outcomes(loader) == [UserWarning, 1, 2, 3]
