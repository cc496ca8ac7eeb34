"""Names of keyword arguments that were changed, or are spelt wrong."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.keywords import RENAMED


class Mine(DataLoader[Any]):
    """A subclass hands on what it is given."""

    def __init__(self, numbers: list[int], **kwargs: Any) -> None:
        super().__init__(numbers, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [DataLoader, Mine])
@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_taken_with_a_warning(cls: Any, old: str) -> None:
    """At the user's line, under the new name in attributes and settings, and nothing is left of the old one."""
    with pytest.warns(DeprecationWarning, match=f"{old} is called {RENAMED[old]} now") as caught:
        loader = cls([1], **{old: 5})
    assert [warning.filename for warning in caught] == [__file__]
    assert getattr(loader, RENAMED[old]) == getattr(loader._settings(), RENAMED[old]) == 5
    assert old not in vars(loader)
    assert old not in inspect.signature(cls.__init__).parameters


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_an_attribute_with_a_warning(old: str) -> None:
    """To be read and to be set."""
    loader = DataLoader([1])
    with pytest.warns(DeprecationWarning, match=RENAMED[old]) as caught:
        setattr(loader, old, 7)
    with pytest.warns(DeprecationWarning, match=RENAMED[old]) as also:
        assert getattr(loader, old) == 7
    assert [warning.filename for warning in (*caught, *also)] == [__file__] * 2
    assert getattr(pickle.loads(pickle.dumps(loader)), RENAMED[old]) == 7


@pytest.mark.parametrize("old", RENAMED)
def test_both_names_at_once_are_refused(old: str) -> None:
    """It would have to be guessed which one counts."""
    options: dict[str, Any] = {old: 1, RENAMED[old]: 2}
    with pytest.raises(TypeError, match=f"got {RENAMED[old]!r} twice"):
        DataLoader([1], **options)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num_worker", "num_workers"),
        ("batchsize", "batch_size"),
        ("on_errors", "on_error"),
        ("max_buffer_bytes", "max_buffered_bytes"),
        ("runahead_bytes", "max_buffered_bytes"),
    ],
)
def test_a_wrong_name_is_told_what_was_meant(wrong: str, meant: str) -> None:
    """In Python's own words, so the error is the one that was expected; of subclasses too."""
    for cls in (DataLoader, Mine):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'. Did you mean '{meant}'?"):
            cls([1], **{wrong: 1})  # type: ignore[arg-type]


def test_a_name_that_is_like_none_is_told_alone() -> None:
    """Rather nothing than nonsense."""
    with pytest.raises(TypeError, match=r"argument 'colour'$"):
        DataLoader([1], colour=1)  # type: ignore[call-arg]
