"""Names of keyword arguments that are spelt wrong."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import DataLoader


class Mine(DataLoader[Any]):
    """A subclass hands on what it is given."""

    def __init__(self, numbers: list[int], **kwargs: Any) -> None:
        super().__init__(numbers, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num_worker", "num_workers"),
        ("batchsize", "batch_size"),
        ("on_errors", "on_error"),
        ("max_buffer_bytes", "max_buffered_bytes"),
    ],
)
def test_a_wrong_name_is_told_what_was_meant(wrong: str, meant: str) -> None:
    """In Python's own words, so the error is the one that was expected; of subclasses too."""
    for cls in (DataLoader, Mine):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'. Did you mean '{meant}'?"):
            cls([1], **{wrong: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        ("seed", "generator=torch.Generator"),
        ("rank", "ElasticSampler"),
        ("transform", r"to_device\(loader, device, transform=...\)"),
    ],
)
def test_a_name_of_other_loaders_is_told_what_there_is_instead(foreign: str, words: str) -> None:
    """`seed` is near `seeding` in its letters, and not in its meaning."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{foreign}': .*{words}"):
        DataLoader([1], **{foreign: 3})  # type: ignore[arg-type]


def test_a_name_that_is_like_none_is_told_alone() -> None:
    """Rather nothing than nonsense."""
    with pytest.raises(TypeError, match=r"argument 'colour'$"):
        DataLoader([1], colour=1)  # type: ignore[call-arg]
