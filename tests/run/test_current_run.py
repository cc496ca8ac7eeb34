"""Which of a loader's iterators its methods speak of, where there are several."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.samplers import ElasticSampler

pytestmark = pytest.mark.on_threads

OPTIONS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 1},
    "threads": {"num_workers": 2, "worker_backend": "thread"},
}
KINDS = pytest.mark.parametrize("kind", OPTIONS)


def numbers(kind: str, **options: Any) -> DataLoader[Any]:
    """A loader of ten batches."""
    return DataLoader(range(40), batch_size=4, **{**OPTIONS[kind], **options})  # type: ignore[arg-type]


def rest_after(state: dict[str, Any]) -> list[int]:
    """Return the numbers of the batches that a state leaves."""
    loader = numbers("no workers")
    loader.load_state_dict(state)
    return [int(batch[0]) // 4 for batch in loader]


@KINDS
def test_a_look_in_the_middle_of_a_loop(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """It does not matter to states, nor to figures, from the loop's next batch on, and after it."""
    loader = numbers(kind)
    for number, _ in enumerate(loader):
        if number == 5:
            next(iter(loader))
        if number >= 6:
            assert loader.stats().batches == number + 1
            assert rest_after(loader.state_dict()) == [*range(number + 1, 10)]
        if number == 7:
            break
    assert rest_after(loader.state_dict()) == [8, 9]
    assert not caplog.records


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_look_at_a_sampler_with_a_state(num_workers: int) -> None:
    """The states of the loop are of its own epoch, and of its own place in that."""

    def made() -> DataLoader[Any]:
        return DataLoader(range(40), 4, sampler=ElasticSampler(40, 1, 0), num_workers=num_workers)  # type: ignore[arg-type]

    loader = made()
    batches, states = [], []
    for number, batch in enumerate(loader):
        if number == 5:
            next(iter(loader))
        batches.append(batch.tolist())
        states.append(loader.state_dict() if number != 5 else None)
    states.append(loader.state_dict())
    following = [batch.tolist() for batch in loader]
    for number, state in enumerate(states):
        if state is not None:
            other = made()
            other.load_state_dict(state)
            rest = [batch.tolist() for batch in other]
            assert rest == (following if number == 10 else batches[number + 1 :]), number
            if number == 8:
                assert [batch.tolist() for batch in other] == following


@KINDS
def test_a_look_and_a_state_at_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The state is that of the loop. Nobody can know, so that is said, once."""
    loader = numbers(kind)
    for number, _ in enumerate(loader):
        if number >= 5:
            next(iter(loader))
            assert rest_after(loader.state_dict()) == [*range(number + 1, 10)]
        if number == 7:
            break
    assert [record.message.split(".")[0] for record in caplog.records] == [
        "The loader's state was asked for while two of its iterators were in use"
    ]


@KINDS
def test_an_iterator_that_was_left_lying(kind: str) -> None:
    """A loop that is left, or over, is spoken of, and not the first look at a batch, whose iterator is still there."""
    loader = numbers(kind)
    first = iter(loader)
    next(first)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert rest_after(loader.state_dict()) == [4, 5, 6, 7, 8, 9]
    for _ in loader:
        pass
    assert rest_after(loader.state_dict()) == [*range(10)]
    next(first)
    first.close()


@KINDS
def test_an_iterator_in_place_of_another(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The new one begins before the old one goes, in the same variable."""
    loader = numbers(kind)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    iterator = iter(loader)
    next(iterator)
    assert rest_after(loader.state_dict()) == [*range(1, 10)]
    del iterator
    assert rest_after(loader.state_dict()) == [*range(1, 10)]
    assert not caplog.records


@KINDS
async def test_a_look_in_an_asynchronous_loop(kind: str) -> None:
    """As in any other."""
    loader, number = numbers(kind), 0
    async for _ in loader:
        number += 1
        if number == 4:
            async with aiter(loader) as look:
                await anext(look)
            del look
        if number == 6:
            break
    assert rest_after(loader.state_dict()) == [6, 7, 8, 9]


@pytest.mark.parametrize("persistent", [False, True])
@KINDS
def test_iterators_from_before_a_load_are_closed(kind: str, persistent: bool) -> None:
    """All of them. What comes next is where the state says."""
    loader = numbers(kind, persistent_workers=persistent and "num_workers" in OPTIONS[kind])
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    others = [iterator] if persistent else [iterator, iter(loader)]
    loader.load_state_dict(state)
    for each in others:
        with pytest.raises(LoaderClosedError, match="this iterator was closed"):
            next(each)
    assert [int(batch[0]) // 4 for batch in loader] == [*range(3, 10)]
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
@KINDS
def test_a_look_between_a_load_and_the_loop(kind: str, persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It uses the state up; that is said, once."""
    loader = numbers(kind, persistent_workers=persistent and "num_workers" in OPTIONS[kind])
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert int(next(iter(loader))[0]) == 4
    assert not caplog.records
    for _ in range(2):
        assert len(list(loader)) == 10
    assert [record.message.split(":")[0] for record in caplog.records] == ["The state that was loaded is used up"]
    loader.close()


@pytest.mark.parametrize("kind", ["workers", "threads"])
def test_a_look_that_restarts_a_loop(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Persistent workers have one iterator, as torch's: a warning says so. Loops that are left, or over, and begun anew
    are not meant by it."""
    loader = numbers(kind, persistent_workers=True)
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 2:
                break
    for _ in range(2):
        iterator = iter(loader)  # and kept to its end
        list(iterator)
    assert not caplog.records
    for number, _ in enumerate(loader):
        if number == 2:
            next(iter(loader))
            break
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "iter(loader) was called while another iterator was in use"
    ]
    loader.close()
