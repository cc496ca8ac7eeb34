"""The results of others' test suites with our class in the place of theirs, for the page in the docs."""

from __future__ import annotations

HEAD = """The suites themselves are not part of this project. They were run with our class in the place of theirs, also
in the processes that they start, with torch 2.13, without a GPU, on a busy machine of two cores. Both suites were taken
from torchdata (`test/stateful_dataloader/`; torch's, of which it has a copy, at e640e6f, its own at 088e4347)."""

TORCH = """### torch: `test_dataloader.py`

With our class 161 tests pass, 5 fail, and 16 are skipped because they are slow or need a GPU. `test_segfault`,
`test_shuffler_iterdatapipe` and the tests of `in_order=False` pass.

The slow test, `test_proper_exit`, passes without persistent workers: 24 cases, each of which has to end within 60 s.
With persistent workers it did not finish within 20 minutes on the busy machine. The cases of streams with workers, in
which a worker or the consumer raises, were run again by themselves and passed, also with persistent workers where the
iterator is held."""

DATA = """### torchdata: `test_state_dict.py`, `test_sampler.py`, `test_incremental_state.py`

With our class and our states 96 of 110 tests pass, and 14 fail (28 November 2026)."""

MONAI = """### MONAI

Sixteen test files that use its loaders, at d388d1c: `tests/data/` `meta_tensor/test_meta_tensor`, `test_arraydataset`,
`test_cachedataset`, `test_cachedataset_persistent_workers`, `test_csv_iterable_dataset`, `test_dataloader`,
`test_dataset_summary`, `test_grid_dataset`, `test_iterable_dataset`, `test_patch_dataset`, `test_sampler_dist`,
`test_shuffle_buffer`, `test_smartcachedataset`, `test_thread_buffer`, `utils/test_decollate`, and
`tests/integration/test_pad_collation`. `torch.utils.data.DataLoader` was ours before MONAI was imported, so
`monai.data.DataLoader` was built on ours. With torch's class 213 tests pass, and 4 of `test_sampler_dist` fail or run
out of time on the busy machine. With our class 214 pass: of these four the first fails, and the two below fail. (A
function that is named `test_collate`, and is none, is an error with both.)"""

MONAI_FAILURES = {
    "`TestLoaderRandom.test_randomize_0`, `.test_zipdataset`": "The tests expect the numbers of a worker's own stream, "
    "which MONAI's `worker_init_fn` has seeded. Each batch is seeded anew, from the same base seed. With "
    '`seeding="worker"` both pass.',
}

FRAMEWORKS = """### Frameworks

The suites of Accelerate and Lightning were not run. Our own tests (`tests/frameworks`) train with both: see
[Frameworks](frameworks.md)."""

TORCH_FAILURES = {
    "`test_get_worker_info` (twice)": "The test sets an attribute that torch 2.13 has frozen, and fails with torch's "
    "class too.",
    "`test_worker_init_fn` (twice)": "With each sample, the test reads a seed that `worker_init_fn` has set. Each "
    'batch is seeded anew; `seeding="worker"` leaves the seed alone.',
    "`test_large_sampler_indices`, with persistent workers": "The test allows 60 s for a process that it starts. On "
    "that machine the process took longer to import torch and the suite. After the import it took 7 s, and raised the "
    "expected error.",
}

DATA_FAILURES = {
    "`TestInitialState.test_initial_state`, `.test_load_state_after_initial_state_dict`, `TestSingleIterCalled` (4), "
    "`TestDynamicStateIterableDataset.test`, `TestDatasetIteratorStateDuplication.test`, "
    "`TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker`, "
    "`.test_out_of_order_iterable_ds_no_completed_workers`": "The tests read torchdata's own layout of a state "
    "(`_snapshot`, `fetcher_state`).",
    "`TestFastStateDictRequestRoundRobin.test_fast_state_dict_request_skip_steps`": "The data are the same. At the end "
    "the test compares a state after a resume with one before. Both name the same place: a state of the dataset and "
    "the number of batches since, but counted from different batches.",
    "`TestNumWorkersMismatch.test_num_workers_mismatch`": "The state is refused with `StateMismatchError`, not with "
    "AssertionError.",
    "`TestInitialState.test_init_error`": "`iter` does not wait for `worker_init_fn`, so the first `next` raises the "
    "error of that function, as with torch's DataLoader.",
    "`TestSnapshotEnd.test_iterable`": "With persistent workers, a stream that draws from a worker's global generator "
    "draws other numbers in the epoch after a state that was taken between two epochs. That generator belongs to the "
    "state of the iterator, which ends with its epoch here. A state of the dataset itself is carried over.",
}


def table(failures: dict[str, str]) -> str:
    """Write the tests and why they fail as a Markdown table."""
    return "\n".join(["| test | why |", "|---|---|", *(f"| {test} | {why} |" for test, why in failures.items())])


def section() -> str:
    """Write what is known of all suites."""
    parts = [HEAD, TORCH, table(TORCH_FAILURES), DATA, table(DATA_FAILURES), MONAI, table(MONAI_FAILURES), FRAMEWORKS]
    return "\n\n".join(parts)
