"""What a batch is: types, dtypes, collation, fetching, and that it stays what it was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from tests.conformance.comparison import Subject, caught, failure, same_as_torch, told
from tests.conformance.datasets import (
    COLLATABLE,
    SAMPLES,
    UNCOLLATABLE,
    Echo,
    Many,
    ManyRefused,
    OfKinds,
    OneByOneSubset,
    Remembering,
    Samples,
    Squares,
    as_list,
    channels_last,
    needs_grad,
    register_record,
    sparse,
    total,
    twice_the_same,
)

pytestmark = pytest.mark.processes("ours")  # what travels is the same in all ways of taking it

FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 1])  # what is in a batch does not depend on more


def batches_by_kind(make: Subject, kinds: Sequence[str], num_workers: int, **options: Any) -> dict[str, Any]:
    """A full and a short batch of samples of each kind, from one loader."""
    plan = [[(kind, index) for index in part] for kind in kinds for part in (range(4), range(4, 6))]
    batches = make.batches(make(OfKinds(), batch_sampler=plan, num_workers=num_workers, **options))
    return {kind: batches[2 * position : 2 * position + 2] for position, kind in enumerate(kinds)}


@FEW_WORKERS
@same_as_torch("collate", async_for=True)
def test_default_collate_of_samples_of_every_type(make: Subject, num_workers: int) -> object:
    """Types, dtypes, shapes and values of full and of short batches, nested in any way."""
    return batches_by_kind(make, COLLATABLE, num_workers)


@FEW_WORKERS
@same_as_torch("collate", async_for=True)
def test_samples_without_batching(make: Subject, num_workers: int) -> object:
    """batch_size=None gives each sample, arrays made into tensors."""
    keys = [(kind, index) for kind in COLLATABLE for index in range(3)]
    loader = make(OfKinds(), batch_size=None, sampler=keys, num_workers=num_workers)
    return dict(zip(keys, make.batches(loader), strict=True))


@FEW_WORKERS
@same_as_torch("collate", async_for=True)
def test_samples_as_they_are(make: Subject, num_workers: int) -> object:
    """A collate_fn that returns its list gets everything through, of whatever type."""
    return batches_by_kind(make, list(SAMPLES), num_workers, collate_fn=as_list)


@pytest.mark.processes
@FEW_WORKERS
@same_as_torch("collate")
def test_what_cannot_be_collated_is_told_in_torchs_words(make: Subject, num_workers: int) -> object:
    """The error is that of default_collate, and names the worker."""
    plan = [[(kind, index) for index in range(3)] for kind in UNCOLLATABLE]
    it = iter(make(OfKinds(), batch_sampler=plan, num_workers=num_workers))
    seen = {}
    for kind in UNCOLLATABLE:
        error = caught(lambda: next(it))
        assert error is not None, kind
        words = f"Caught {type(error).__name__} in DataLoader worker process 0."
        seen[kind] = type(error), words in told(error), "collate.py" in told(error) or num_workers == 0
    return seen


@FEW_WORKERS
@same_as_torch("collate")
def test_own_collate_fn(make: Subject, num_workers: int) -> object:
    """A collate_fn gets the list of samples, and returns the batch."""
    return make.batches(make(Squares(7), batch_size=3, collate_fn=total, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("collate")
def test_collate_fn_of_single_samples(make: Subject, num_workers: int) -> object:
    """With batch_size=None, collate_fn is called with one sample."""
    return make.batches(make(Squares(4), batch_size=None, collate_fn=str, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("collate")
def test_types_can_be_taught_to_default_collate(make: Subject, num_workers: int) -> object:
    """An entry in torch's default_collate_fn_map, made in worker_init_fn, is used."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    before = dict(default_collate_fn_map)
    if num_workers == 0:
        register_record(0)
    try:
        return make.batches(
            make(Samples("record"), batch_size=4, num_workers=num_workers, worker_init_fn=register_record)
        )
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(before)


@FEW_WORKERS
@same_as_torch("collate")
def test_one_tensor_twice_in_a_batch_is_one_object(make: Subject, num_workers: int) -> object:
    """Identity within a batch survives the way between processes."""
    (batch,) = make.batches(make(Squares(3), batch_size=3, collate_fn=twice_the_same, num_workers=num_workers))
    return batch, batch["a"] is batch["b"] is batch["list"][0]


@FEW_WORKERS
@same_as_torch("collate")
def test_memory_format_is_kept(make: Subject, num_workers: int) -> object:
    """A batch in channels_last order arrives in that order."""
    (batch,) = make.batches(make(Squares(2), batch_size=2, collate_fn=channels_last, num_workers=num_workers))
    return batch.stride(), batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@FEW_WORKERS
@same_as_torch("collate")
def test_sparse_tensors(make: Subject, num_workers: int) -> object:
    """A sparse batch arrives as a sparse batch."""
    return make.batches(make(Squares(2), collate_fn=sparse, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("collate")
def test_requires_grad_is_kept(make: Subject, num_workers: int) -> object:
    """A leaf that requires a gradient arrives as such a leaf."""
    (batch,) = make.batches(make(Squares(2), batch_size=2, collate_fn=needs_grad, num_workers=num_workers))
    batch.sum().backward()
    return batch, batch.is_leaf, batch.grad


@pytest.mark.covering(1)
@FEW_WORKERS
@pytest.mark.parametrize("kind", ["uint8 tensor", "large tensor", "int", "bool tensor"])
@same_as_torch("batches stay what they were")
def test_batches_can_be_changed_in_place(make: Subject, kind: str, num_workers: int) -> object:
    """A batch that the training changes leaves all other batches alone."""
    batches = []
    for batch in make(Samples(kind, 8), batch_size=2, num_workers=num_workers):
        batches.append(batch.clone())
        batch.fill_(1)
        batch.resize_(0)
    return batches


@FEW_WORKERS
@same_as_torch("batches stay what they were")
def test_arrays_in_batches_can_be_changed_in_place(make: Subject, num_workers: int) -> object:
    """Arrays that a collate_fn hands on are writable."""
    (batch,) = make.batches(make(Samples("ndarray"), batch_size=6, collate_fn=as_list, num_workers=num_workers))
    for array in batch:
        array += 1
    return batch, [array.flags.writeable for array in batch]


@pytest.mark.covering(1)
@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [1, 5, None])
@same_as_torch("batches stay what they were")
def test_batches_that_are_kept_do_not_change(make: Subject, batch_size: int | None, num_workers: int) -> object:
    """All batches of two epochs are kept, of small and of large samples, and none of them changes."""
    loader = make(Samples("large tensor", 15), batch_size=batch_size, num_workers=num_workers)
    kept = [*make.batches(loader), *make.batches(loader)]
    sizes = [tuple(batch.shape) for batch in kept]
    return sizes, [batch.double().sum().item() for batch in kept], [batch.flatten()[-1].item() for batch in kept]


@FEW_WORKERS
@same_as_torch("batches stay what they were")
def test_batches_outlive_loader_and_iterator(make: Subject, num_workers: int) -> object:
    """A batch stays valid after the workers are gone, and a later epoch does not overwrite it."""
    it = iter(make(Samples("large tensor", 8), batch_size=2, num_workers=num_workers))
    kept = [next(it), next(it)]
    del it
    list(make(Samples("large tensor", 8), batch_size=4, num_workers=num_workers))
    return kept


@FEW_WORKERS
@same_as_torch("batches stay what they were")
def test_part_of_a_batch_outlives_the_batch(make: Subject, num_workers: int) -> object:
    """Views and arrays over a batch's memory keep that memory."""
    parts: list[Any] = []
    for batch in make(Samples("large tensor", 24), batch_size=2, num_workers=num_workers):
        parts += [batch[1, 5:9], batch[0].numpy()[-3:]]
        del batch
    return parts


@FEW_WORKERS
@same_as_torch("fetch")
def test_getitems_fetches_a_whole_batch(make: Subject, num_workers: int) -> object:
    """A dataset that has __getitems__ gets the list of indices."""
    return make.batches(make(Many(7), batch_size=3, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("fetch")
def test_getitems_that_is_switched_off_is_not_called(make: Subject, num_workers: int) -> object:
    """A dataset with `__getitems__ = None` is asked for samples one by one."""
    return make.batches(make(ManyRefused(7), batch_size=3, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("fetch")
def test_getitems_is_not_used_without_batching(make: Subject, num_workers: int) -> object:
    """batch_size=None asks for dataset[key]."""
    error = failure(lambda: list(make(Many(3), batch_size=None, num_workers=num_workers)))
    return error[0] if error else None


@FEW_WORKERS
@same_as_torch("fetch")
def test_subset_that_overrides_one_of_the_two_is_refused(make: Subject, num_workers: int) -> object:
    """Subset itself raises NotImplementedError, and the loop gets that error."""
    error = failure(lambda: list(make(OneByOneSubset(Squares(5), [1, 2]), batch_size=2, num_workers=num_workers)))
    return error[0] if error else "taken"  # by torch 2.6


@FEW_WORKERS
@same_as_torch("fetch")
def test_subset_of_subset(make: Subject, num_workers: int) -> object:
    """Indices are mapped twice."""
    dataset = Subset(Subset(Squares(20), range(0, 20, 2)), [9, 3, 4])
    return make.batches(make(dataset, batch_size=2, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("fetch")
def test_keys_of_mixed_types(make: Subject, num_workers: int) -> object:
    """Keys reach the dataset as the sampler yields them."""
    keys = ["a", 1, (2, "b"), None, 2.5, frozenset([1]), np.int64(4), b"c", random.Random(3).random()]
    loader = make(Echo(), batch_size=None, sampler=keys, collate_fn=as_list, num_workers=num_workers)
    return [(type(key).__name__, key) for key in make.batches(loader)]


@same_as_torch("copies of the dataset", async_for=False)
def test_dataset_of_the_main_process_is_not_changed_by_workers(make: Subject) -> object:
    """Each worker works on a copy, made anew for each epoch."""
    dataset = Remembering(6)
    loader = make(dataset, batch_size=2, collate_fn=as_list, num_workers=2)
    epochs = make.batches(loader), make.batches(loader)
    return epochs, dataset.fetched


@same_as_torch("copies of the dataset", async_for=False)
def test_dataset_of_the_main_process_is_used_without_workers(make: Subject) -> object:
    """No copy without workers."""
    dataset = Remembering(6)
    loader = make(dataset, batch_size=2, collate_fn=as_list)
    return make.batches(loader), dataset.fetched
