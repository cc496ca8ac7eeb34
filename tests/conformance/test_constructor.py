"""Signature, attributes, properties, guards, errors and warnings of construction."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import re
import typing
import warnings

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

from tests.conformance.comparison import Subject, failure, same_as_torch
from tests.conformance.datasets import Count, Forever, Growing, Squares, Unsized, as_list, draw_some, total

ATTRIBUTES = (
    "dataset", "batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn", "num_workers", "prefetch_factor",
    "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "generator", "in_order", "persistent_workers",
    "_dataset_kind", "_iterator", "_IterableDataset_len_called", "_DataLoader__initialized",
    "_DataLoader__multiprocessing_context",
)  # fmt: skip
TORCHS = tuple(inspect.signature(torch.utils.data.DataLoader).parameters)

SETTINGS = {
    "nothing": {},
    "batches": {"batch_size": 4},
    "shuffled batches": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "no batching": {"batch_size": None},
    "own sampler": {"sampler": [3, 1, 2], "batch_size": 2},
    "own batch sampler": {"batch_sampler": [[1, 2], [3]]},
    "workers": {"num_workers": 2},
    "all for workers": {
        "num_workers": 1, "prefetch_factor": 5, "timeout": 3, "worker_init_fn": draw_some, "in_order": False,
        "collate_fn": total, "multiprocessing_context": "spawn",
    },
}  # fmt: skip


def plain(value: object) -> object:
    """A value of an attribute in a form that can be compared."""
    if isinstance(value, (int, float, str, list, type(None))):
        return value
    return getattr(value, "__qualname__", None) or type(value).__qualname__


@same_as_torch("signature")
def test_signature_begins_with_torchs_parameters(make: Subject) -> object:
    """torch's parameters have their names, order, kinds and defaults."""
    parameters = inspect.signature(make.cls).parameters.values()
    return [(p.name, p.kind.name, p.default) for p in parameters if p.name in TORCHS]


@same_as_torch("signature", defaults=False)
def test_first_thirteen_arguments_may_be_positional(make: Subject) -> object:
    """Thirteen arguments can be given by position, the fourteenth cannot."""
    given = (Squares(4), 2, None, None, None, 1, as_list, False, True, 1.5, draw_some, "fork", torch.Generator())
    loader = make(*given)
    refused = failure(lambda: make.cls(*given, 2))
    return [plain(getattr(loader, name)) for name in ATTRIBUTES], refused[0] if refused else None


def test_our_own_parameters_are_keyword_only_and_have_defaults() -> None:
    """Whoever builds a loader from its signature, as Lightning does, can leave ours out."""
    loader_class = pytest.importorskip("asyncloader").DataLoader
    own = [p for p in inspect.signature(loader_class).parameters.values() if p.name not in TORCHS]
    assert own
    for parameter in own:
        assert parameter.kind is parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not parameter.empty, parameter
        assert getattr(loader_class(Squares(2)), parameter.name) == parameter.default


@pytest.mark.parametrize("settings", SETTINGS)
@same_as_torch("attributes")
def test_attributes_have_torchs_names_and_values(make: Subject, settings: str) -> object:
    """vars() has all of torch's attributes, with the same values, and no `shuffle`."""
    loader = make(Squares(10), **SETTINGS[settings])
    if make.is_torch:
        assert set(vars(loader)) == set(ATTRIBUTES)
    assert "shuffle" not in vars(loader)
    return {name: plain(vars(loader)[name]) for name in ATTRIBUTES}


@pytest.mark.parametrize("settings", SETTINGS)
@same_as_torch("properties")
def test_properties_say_what_torchs_say(make: Subject, settings: str) -> object:
    """multiprocessing_context, _auto_collation and _index_sampler."""
    loader = make(Squares(10), **SETTINGS[settings])
    context = loader.multiprocessing_context
    return (
        context.get_start_method() if context is not None and settings == "all for workers" else None,
        loader._auto_collation,
        plain(loader._index_sampler),
        loader._index_sampler is (loader.batch_sampler if loader._auto_collation else loader.sampler),
    )


@same_as_torch("attributes")
def test_samplers_made_by_default_are_exactly_torchs(make: Subject) -> object:
    """Frameworks test `type(...) is BatchSampler` and the like."""
    plainly, shuffled = make(Squares(4), 2), make(Squares(4), 2, True, generator=torch.Generator())
    stream = make(Count(3)) if make.is_torch else None
    assert type(plainly.batch_sampler) is type(shuffled.batch_sampler) is BatchSampler
    assert type(plainly.sampler) is SequentialSampler
    assert type(shuffled.sampler) is RandomSampler
    assert plainly.batch_sampler.sampler is plainly.sampler
    assert shuffled.sampler.generator is shuffled.generator
    assert stream is None or type(stream.sampler).__name__ == "_InfiniteConstantSampler"
    return plainly.batch_sampler.batch_size, shuffled.batch_sampler.drop_last


@same_as_torch("attributes")
def test_objects_are_kept_as_they_were_given(make: Subject) -> object:
    """Dataset, samplers, functions, generator and context are the objects that were passed."""
    dataset, generator, context = Squares(4), torch.Generator(), multiprocessing.get_context("fork")
    sampler, batch_sampler = SubsetRandomSampler([1, 2]), BatchSampler(range(4), 2, False)
    a = make(dataset, sampler=sampler, generator=generator, collate_fn=as_list, worker_init_fn=draw_some,
             num_workers=1, multiprocessing_context=context)  # fmt: skip
    b = make(dataset, batch_sampler=batch_sampler)
    return [
        a.dataset is dataset, a.sampler is sampler, a.generator is generator, a.collate_fn is as_list,
        a.worker_init_fn is draw_some, a.multiprocessing_context is context, b.batch_sampler is batch_sampler,
    ]  # fmt: skip


@same_as_torch("attributes")
def test_dataset_may_be_none(make: Subject) -> object:
    """A loader over nothing can be made, as some frameworks do for a moment."""
    loader = make(None)
    return loader.dataset, plain(loader.sampler)


@same_as_torch("attributes")
def test_unknown_attributes_can_be_set_and_deleted(make: Subject) -> object:
    """Frameworks set attributes of their own on a loader, and reset `_iterator`."""
    loader = make(Squares(3))
    loader._something_of_a_framework = 5
    loader._iterator = None
    object.__setattr__(loader, "__pl_saved_args", (1,))
    seen = loader._something_of_a_framework, loader.__dict__["__pl_saved_args"], len(list(loader))
    del loader._something_of_a_framework
    del loader._iterator
    loader._iterator = None
    return seen, hasattr(loader, "_something_of_a_framework")


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
@same_as_torch("guarded attributes")
def test_guarded_attributes_cannot_be_set_afterwards(make: Subject, name: str) -> object:
    """Setting one is refused with a ValueError that names the class."""
    return failure(lambda: setattr(make(Squares(4)), name, 1))


@same_as_torch("guarded attributes")
def test_guard_names_the_subclass(make: Subject) -> object:
    """The error names a subclass by the subclass's own name."""
    subclass = type("MyLoader", (make.cls,), {})
    return failure(lambda: setattr(subclass(Squares(4)), "batch_size", 1))


@same_as_torch("attributes", async_for=False)
def test_other_attributes_take_effect_at_the_next_epoch(make: Subject) -> object:
    """collate_fn, worker_init_fn, generator and num_workers can be set between epochs."""
    loader = make(Squares(6), batch_size=3, shuffle=True)
    before = make.batches(loader)
    loader.collate_fn = total
    loader.generator = torch.Generator().manual_seed(3)
    summed = make.batches(loader)
    loader.num_workers, loader.prefetch_factor = 2, 2
    return before, summed, make.batches(loader), loader.generator.get_state()


@same_as_torch("attributes")
def test_prefetch_factor_is_two_with_workers_and_none_without(make: Subject) -> object:
    """The default depends on num_workers."""
    return [make(Squares(2), num_workers=n).prefetch_factor for n in (0, 1, 2)]


ERRORS = {
    "num_workers negative": lambda make: make(Squares(4), num_workers=-1),
    "timeout negative": lambda make: make(Squares(4), timeout=-1),
    "prefetch_factor without workers": lambda make: make(Squares(4), prefetch_factor=2),
    "prefetch_factor negative": lambda make: make(Squares(4), num_workers=1, prefetch_factor=-1),
    "persistent_workers without workers": lambda make: make(Squares(4), persistent_workers=True),
    "sampler and shuffle": lambda make: make(Squares(4), sampler=[1], shuffle=True),
    "sampler and shuffle and batch_sampler": lambda make: make(Squares(4), sampler=[1], shuffle=True, batch_sampler=[]),
    "batch_sampler and batch_size": lambda make: make(Squares(4), batch_sampler=[[1]], batch_size=2),
    "batch_sampler and batch_size None": lambda make: make(Squares(4), batch_sampler=[[1]], batch_size=None),
    "batch_sampler and shuffle": lambda make: make(Squares(4), batch_sampler=[[1]], shuffle=True),
    "batch_sampler and sampler": lambda make: make(Squares(4), batch_sampler=[[1]], sampler=[1]),
    "batch_sampler and drop_last": lambda make: make(Squares(4), batch_sampler=[[1]], drop_last=True),
    "batch_size None and drop_last": lambda make: make(Squares(4), batch_size=None, drop_last=True),
    "context without workers": lambda make: make(Squares(4), multiprocessing_context="fork"),
    "context of a wrong name": lambda make: make(Squares(4), num_workers=1, multiprocessing_context="spoon"),
    "context of a wrong type": lambda make: make(Squares(4), num_workers=1, multiprocessing_context=5),
    "batch_size zero": lambda make: make(Squares(4), batch_size=0),
    "batch_size negative": lambda make: make(Squares(4), batch_size=-2),
    "batch_size a bool": lambda make: make(Squares(4), batch_size=True),
    "batch_size a float": lambda make: make(Squares(4), batch_size=2.0),
    "drop_last not a bool": lambda make: make(Squares(4), drop_last=1),
    "shuffle of an empty dataset": lambda make: make(Squares(0), shuffle=True),
    "shuffle of a dataset without length": lambda make: make(object(), shuffle=True),
    "iterable and shuffle": lambda make: make(Count(3), shuffle=True),
    "iterable and sampler": lambda make: make(Count(3), sampler=[1]),
    "iterable and sampler and shuffle": lambda make: make(Count(3), sampler=[1], shuffle=True),
    "iterable and batch_sampler": lambda make: make(Count(3), batch_sampler=[[1]]),
    "iterable and batch_size None and drop_last": lambda make: make(Count(3), batch_size=None, drop_last=True),
    "no dataset": lambda make: make(),
    "num_workers a text": lambda make: make(Squares(4), num_workers="2"),
}


@pytest.mark.parametrize("mistake", ERRORS)
@same_as_torch("errors of construction")
def test_mistakes_are_refused_with_torchs_words(make: Subject, mistake: str) -> object:
    """Type and text of every error that torch's constructor raises."""
    refused = failure(lambda: ERRORS[mistake](make))
    assert refused is not None
    return refused[0], re.sub(r"0x[0-9a-f]+", "0x", refused[1])


@same_as_torch("errors of construction")
def test_unknown_argument_is_a_type_error(make: Subject) -> object:
    """A misspelt argument is refused."""
    refused = failure(lambda: make(Squares(4), num_worker=2))
    return refused[0] if refused else None


@same_as_torch("errors at iter()")
def test_timeout_without_workers_is_refused_at_iter(make: Subject) -> object:
    """The constructor accepts the timeout, iter() refuses it."""
    loader = make(Squares(4), timeout=1)
    refused = failure(lambda: iter(loader))
    return refused[0] if refused else None


# torch's own iterator, which was not made to the end, raises where it is deleted.
@pytest.mark.filterwarnings("ignore:.*_MultiProcessingDataLoaderIter.__del__:pytest.PytestUnraisableExceptionWarning")
@same_as_torch("errors at iter()")
def test_prefetch_factor_of_zero_is_refused_at_iter(make: Subject) -> object:
    """The constructor accepts the value, iter() refuses it, and no worker is left."""
    loader = make(Squares(4), num_workers=1, prefetch_factor=0)
    refused = failure(lambda: iter(loader))
    return refused[0] if refused else None


@same_as_torch("errors of construction")
def test_context_can_be_set_and_is_checked_again(make: Subject) -> object:
    """The property's setter checks as the constructor does."""
    loader = make(Squares(4), num_workers=1)
    loader.multiprocessing_context = "spawn"
    chosen = loader.multiprocessing_context.get_start_method()
    return chosen, failure(lambda: setattr(loader, "multiprocessing_context", "spoon"))


@same_as_torch("errors of construction")
def test_empty_dataset_without_shuffle_gives_no_batches(make: Subject) -> object:
    """Zero batches, with and without workers."""
    loaders = [make(Squares(0), num_workers=n) for n in (0, 1)]
    return [(len(loader), make.batches(loader)) for loader in loaders]


@pytest.fixture
def one_processor() -> typing.Iterator[None]:
    """Lets this process use one processor only, so that two workers are too many."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def warned(caught: list[warnings.WarningMessage]) -> list[tuple[str, str]]:
    return [(w.category.__name__, str(w.message)) for w in caught]


@same_as_torch("warnings", defaults=False)
def test_more_workers_than_processors_warn_at_construction_and_at_iter(make: Subject, one_processor: None) -> object:
    """The same UserWarning both times, shown at the caller's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make.cls(Squares(2), num_workers=2)
        made = warned(caught)
        list(loader)
    mine = [w for w in caught if "worker processes in total" in str(w.message)]
    assert len(made) == 1
    return made, len(mine), {category for category, _ in warned(mine)}


@same_as_torch("warnings")
def test_a_thousand_workers_warn_and_are_not_started(make: Subject) -> object:
    """The constructor warns of the number, and starts no worker."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make(Squares(2), num_workers=1000)
    return warned(caught), loader.num_workers, loader._iterator


@same_as_torch("warnings")
def test_check_worker_number_rationality_can_be_overridden(make: Subject) -> object:
    """The constructor calls it as a method."""
    calls = []
    subclass = type("Quiet", (make.cls,), {"check_worker_number_rationality": lambda self: calls.append(1)})
    subclass(Squares(2), num_workers=1000)
    return calls


# --- lengths ---


@pytest.mark.parametrize("length", [0, 1, 7, 8])
@same_as_torch("len")
def test_length_counts_batches(make: Subject, length: int) -> object:
    """Rounded up, or down with drop_last."""
    return [
        (len(loader), len(make.batches(loader)))
        for size in (1, 2, 7, 9)
        for drop_last in (False, True)
        for loader in [make(Squares(length), batch_size=size, drop_last=drop_last)]
    ]


@same_as_torch("len")
def test_length_follows_sampler_and_batch_sampler(make: Subject) -> object:
    """len() asks the sampler or batch sampler; one without a length raises TypeError."""
    unsized = failure(lambda: len(make(Squares(9), sampler=Unsized([1, 2]), batch_size=None)))
    return (
        len(make(Squares(9), sampler=[1, 2, 3], batch_size=2)),
        len(make(Squares(9), batch_sampler=[[1], [2, 3], [4]])),
        len(make(Squares(9), batch_size=None)),
        len(make(Squares(9), sampler=RandomSampler(Squares(9), num_samples=5), batch_size=2)),
        unsized[0] if unsized else None,
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("len")
def test_length_follows_a_growing_dataset(make: Subject, num_workers: int) -> object:
    """len() counts appended samples at once; they belong to the next epoch."""
    dataset = Growing()
    loader = make(dataset, batch_size=2, num_workers=num_workers)
    seen = [len(loader), make.batches(loader)]
    dataset.items += [3, 4]
    return [*seen, len(loader), make.batches(loader)]


@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("len")
def test_iterator_has_the_length_of_the_loader(make: Subject, num_workers: int) -> object:
    """The iterator's length stays the same while batches are taken."""
    it = iter(make(Squares(10), batch_size=4, num_workers=num_workers))
    return [len(it), next(it), len(it)]


# --- the class ---


@same_as_torch("generic class")
def test_class_is_generic(make: Subject) -> object:
    """`DataLoader[int]` can be written, called, and inherited from."""
    subscripted = make.cls[int]
    element = typing.TypeVar("element")
    subclass = type("Own", (typing.cast("type", make.cls),), {})
    generic = typing.cast("type", __import__("types").new_class("Generically", (make.cls[element],)))  # type: ignore[index]
    return (
        typing.get_args(subscripted),
        typing.get_origin(subscripted) is make.cls,
        list(subscripted(Squares(3))),
        list(subclass(Squares(3))),
        list(generic[str](Squares(3))),
    )


@same_as_torch("generic class")
def test_loader_is_a_torch_loader(make: Subject) -> object:
    """Frameworks ask isinstance and issubclass whether a loader is torch's; ours is."""
    return isinstance(make(Squares(2)), torch.utils.data.DataLoader), issubclass(make.cls, torch.utils.data.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("subclasses")
def test_subclass_may_add_arguments_and_override_iter(make: Subject, num_workers: int) -> object:
    """The usual ways of subclassing work."""

    class Doubling(make.cls):  # type: ignore[name-defined, misc]
        def __init__(self, *args: object, factor: int = 2, **kwargs: object):
            self.factor = factor
            super().__init__(*args, **kwargs)

        def __iter__(self) -> typing.Iterator[object]:
            for batch in super().__iter__():
                yield batch * self.factor

        def __len__(self) -> int:
            return super().__len__() + 100

    loader = Doubling(Squares(5), **make.complete({"batch_size": 2, "num_workers": num_workers}), factor=3)
    return list(loader), len(loader), loader.factor


@pytest.mark.parametrize("num_workers", [0, 2])
@same_as_torch("subclasses")
def test_subclass_may_override_get_iterator(make: Subject, num_workers: int) -> object:
    """`iter(loader)` asks `_get_iterator`."""
    calls = []

    class Noting(make.cls):  # type: ignore[name-defined, misc]
        def _get_iterator(self) -> object:
            calls.append(1)
            return super()._get_iterator()

    loader = Noting(Squares(5), **make.complete({"num_workers": num_workers}))
    return list(loader), list(loader), calls


@pytest.mark.parametrize("num_workers", [0, 2])
@same_as_torch("timm's pattern", defaults=False)
def test_multi_epochs_subclass_keeps_one_eager_iterator(make: Subject, num_workers: int) -> object:
    """timm's MultiEpochsDataLoader: an endless batch_sampler put in after construction, one iterator kept."""

    class MultiEpochs(make.cls):  # type: ignore[name-defined, misc]
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Forever(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.batches)

        def __iter__(self) -> typing.Iterator[object]:
            for _ in range(len(self)):
                yield next(self.iterator)

    loader = MultiEpochs(Squares(6), **make.complete({"batch_size": 2, "shuffle": True, "num_workers": num_workers}))
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("pickling")
def test_loader_can_be_pickled(make: Subject, num_workers: int) -> object:
    """The copy has the same settings and gives the same batches."""
    options = {"batch_size": 3, "num_workers": num_workers, "collate_fn": total, "worker_init_fn": draw_some}
    loader = make(Subset(Squares(9), [8, 1, 5, 2]), **options)
    list(loader)
    copy = pickle.loads(pickle.dumps(loader))
    refused = failure(lambda: setattr(copy, "batch_size", 1))
    return [plain(getattr(copy, name)) for name in ATTRIBUTES], make.batches(copy), len(copy), refused


@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("pickling")
def test_iterator_cannot_be_pickled(make: Subject, num_workers: int) -> object:
    """NotImplementedError, as torch says it."""
    it = iter(make(Squares(3), num_workers=num_workers))
    refused = failure(lambda: pickle.dumps(it))
    return refused[0] if refused else None
