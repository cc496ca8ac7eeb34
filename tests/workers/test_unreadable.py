"""What cannot be unpickled at the other end costs its own batch, and no other."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.engine.portal import get_portal


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
