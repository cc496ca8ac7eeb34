"""Subclasses of our DataLoader as people write them, and pickled loaders: options of ours survive."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from asyncloader import DataLoader
from asyncloader.loader import OPTIONS as OURS

pytestmark = pytest.mark.on_threads

OPTIONS: dict[str, Any] = {"scheduling": "dynamic", "seeding": "worker", "max_buffered_bytes": 0, "max_retries": 5}
NUMBERS = list(range(12))


class WithKeywords(DataLoader[Any]):
    """Adds an argument; hands on whatever else it is given."""

    def __init__(self, dataset: Any, tag: str = "none", *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.tag = tag


class WithDefault(DataLoader[Any]):
    """Names one of our options, with a default of its own."""

    def __init__(self, dataset: Any, *, max_retries: int = 7, **rest: Any) -> None:
        super().__init__(dataset, max_retries=max_retries, **rest)


class Stream(IterableDataset[int]):
    """Yields some numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class RandomNumbers(Dataset[Tensor]):
    """Samples that depend on the seeds of their batches."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


class CountsForItself(DataLoader[Any]):
    """Goes on in mid-epoch as speechbrain's SaveableDataLoader does: by what torch's iterator counts, and advances."""

    skip_to = 0


@pytest.fixture
def _constructor_that_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    init: Any = base.__init__
    reset: Any = base._reset

    def skipping_init(self: Any, loader: Any) -> None:
        init(self, loader)
        skip_to, loader.skip_to = loader.skip_to, 0
        for _ in range(skip_to):
            next(self._sampler_iter)
            self._num_yielded += 1

    def reset_later(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            reset(self, loader, first_iter)

    monkeypatch.setattr(base, "__init__", skipping_init)
    monkeypatch.setattr(base, "_reset", reset_later)


def named(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters)


def make_anew(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Make a loader again as Lightning does: from the attributes that its signature names, or torch's does."""
    parameters = dict(inspect.signature(loader.__init__).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters |= inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    given = {
        name: attributes[name]
        for name, parameter in parameters.items()
        if name in attributes and parameter.default is not attributes[name]
    }
    return type(loader)(**{**given, "sampler": loader.sampler, "shuffle": False, "batch_sampler": None})


def test_signature_of_a_subclass_with_keywords_names_our_options() -> None:
    """They come between its own arguments and its keywords; one that it names itself stays as it is."""
    ours = set(OURS)
    assert list(inspect.signature(WithKeywords.__init__).parameters)[:4] == ["self", "dataset", "tag", "args"]
    assert list(inspect.signature(WithKeywords.__init__).parameters)[-1] == "kwargs"
    assert named(WithKeywords) == {"self", "dataset", "tag", "args", "kwargs"} | ours
    assert inspect.signature(WithDefault.__init__).parameters["max_retries"].default == 7
    assert named(WithDefault) == {"self", "dataset", "rest"} | ours


def test_signature_of_a_subclass_without_keywords_stays() -> None:
    """What takes no other keywords cannot take our options, and does not claim to; without an __init__ it has ours."""

    class Closed(DataLoader[Any]):
        def __init__(self, dataset: Any, batch_size: int = 2) -> None:
            super().__init__(dataset, batch_size)

    class Plain(DataLoader[Any]):
        pass

    assert named(Closed) == {"self", "dataset", "batch_size"}
    assert named(Plain) == named(DataLoader)


def test_signature_of_a_decorated_init_names_our_options() -> None:
    """A decorator that uses functools.wraps, and a subclass of a subclass."""

    def logged(init: Any) -> Any:
        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)

        return wrapper

    class Decorated(WithKeywords):
        @logged
        def __init__(self, dataset: Any, **kwargs: Any) -> None:
            super().__init__(dataset, **kwargs)

    assert named(Decorated) == {"self", "dataset", "kwargs"} | set(OURS)
    assert make_anew(Decorated(NUMBERS, **OPTIONS)).scheduling == "dynamic"


@pytest.mark.parametrize("cls", [DataLoader, WithKeywords, WithDefault])
def test_options_survive_being_made_anew(cls: type[DataLoader[Any]]) -> None:
    """A loader made from another one's attributes has its options, whether its class names them or not."""
    given = cls(NUMBERS, batch_size=4, num_workers=1, **OPTIONS)
    anew = make_anew(given)
    assert type(anew) is cls
    assert {name: getattr(anew, name) for name in OPTIONS} == OPTIONS
    assert (anew.batch_size, anew.num_workers) == (4, 1)


def test_own_arguments_are_kept_beside_ours() -> None:
    """A subclass's own argument, a positional one of torch's and an option of ours go where they belong."""
    loader = WithKeywords(NUMBERS, "mine", 4, num_workers=1, **OPTIONS)
    assert (loader.tag, loader.batch_size, loader.max_retries) == ("mine", 4, 5)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert make_anew(loader).tag == "mine"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
def test_batches_are_counted_where_torch_counts_them(is_stream: bool, num_workers: int) -> None:
    dataset: Any = Stream() if is_stream else NUMBERS
    loader: DataLoader[Any] = DataLoader(dataset, 2, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert iterator._num_yielded == 3
    state = loader.state_dict()
    iterator.close()

    loader.load_state_dict(state)
    with iter(loader) as iterator:
        next(iterator)
        assert iterator._num_yielded == 4


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_constructor_that_skips")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "order", [{}, {"shuffle": True}, {"batch_sampler": [[n, n + 1] for n in range(0, 12, 2)]}], ids=str
)
def test_a_sampler_that_was_advanced_is_read_on(num_workers: int, order: dict[str, Any]) -> None:
    size = {} if "batch_sampler" in order else {"batch_size": 2}
    loader = CountsForItself(NUMBERS, num_workers=num_workers, **size, **order)
    torch.manual_seed(3)
    whole = [batch.tolist() for batch in loader]

    loader = CountsForItself(NUMBERS, num_workers=num_workers, **size, **order)
    loader.skip_to = 2
    torch.manual_seed(3)
    iterator = iter(loader)
    rest = [next(iterator).tolist()]
    state = loader.state_dict()
    rest += [batch.tolist() for batch in iterator]
    assert iterator._num_yielded == len(whole)
    assert rest == whole[2:]
    torch.manual_seed(4)
    assert len([*loader]) == len(whole)

    # A state of the loader counts what was left out, and is not advanced once more.
    loader.load_state_dict(state)
    loader.skip_to = 3
    assert [batch.tolist() for batch in loader] == whole[3:]


@pytest.mark.processes
@pytest.mark.usefixtures("_constructor_that_skips")
def test_a_sampler_that_was_advanced_changes_no_seeds() -> None:
    loader = CountsForItself(RandomNumbers(), batch_size=2, num_workers=2)
    torch.manual_seed(3)
    whole = [batch.tolist() for batch in loader]
    loader = CountsForItself(RandomNumbers(), batch_size=2, num_workers=2)
    loader.skip_to = 4
    torch.manual_seed(3)
    assert [batch.tolist() for batch in loader] == whole[4:]


def test_overridden_len_and_iter() -> None:
    """A subclass may change what is yielded, and call ours beneath; `async for` is overridden as `for` is."""

    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch * 2

        async def __aiter__(self) -> Any:
            async for batch in super().__aiter__():
                yield batch * 2

    async def collect() -> list[Any]:
        return [batch.tolist() async for batch in loader]

    loader = Doubled(NUMBERS, batch_size=6, num_workers=1)
    doubled = [[0, 2, 4, 6, 8, 10], [12, 14, 16, 18, 20, 22]]
    assert [batch.tolist() for batch in loader] == asyncio.run(collect()) == doubled


@pytest.mark.parametrize("cls", [DataLoader, WithKeywords])
def test_a_loader_can_be_pickled(cls: type[DataLoader[Any]]) -> None:
    """Before and after it was iterated: options, arguments and order arrive; the copy works by itself."""
    generator = torch.Generator().manual_seed(2)
    dataset = TensorDataset(torch.arange(12))
    loader = cls(dataset, batch_size=4, shuffle=True, num_workers=1, generator=generator, **OPTIONS)
    unused = pickle.loads(pickle.dumps(loader))
    first = [batch[0].tolist() for batch in loader]
    assert [batch[0].tolist() for batch in unused] == first
    used = pickle.loads(pickle.dumps(loader))
    assert {name: getattr(used, name) for name in OPTIONS} == OPTIONS
    assert [batch[0].tolist() for batch in used] == [batch[0].tolist() for batch in loader]


def test_a_loader_with_workers_that_stay_cannot_be_pickled() -> None:
    """Once it has them: torch's error about its iterator, before anything is copied."""
    loader = DataLoader(NUMBERS, num_workers=1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(NotImplementedError):
        pickle.dumps(loader)


def test_worker_init_fn_is_a_value_of_the_loader(loader_class: type[torch.utils.data.DataLoader[Any]]) -> None:
    """It can be set anew, found among a loader's own values, and missed on one that was not made yet, as with torch."""
    loader = loader_class(NUMBERS, worker_init_fn=print)
    assert loader.worker_init_fn is print
    loader.worker_init_fn = len
    assert loader.worker_init_fn is vars(loader)["worker_init_fn"] is copy.copy(loader).worker_init_fn is len
    assert not hasattr(loader_class.__new__(loader_class), "worker_init_fn")
