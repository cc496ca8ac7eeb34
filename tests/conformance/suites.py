"""The results of others' test suites with our class in the place of theirs, for the page in the docs."""

from __future__ import annotations

HEAD = """The suites themselves are not part of this project. They were run on 28 November 2026 with our class in the
place of theirs, also in the processes that they start, with torch 2.13, without a GPU, on a machine of two cores with
ten other jobs on them. Tests that failed by a bound on time or memory were run again alone, and count as passed
if they pass then; each is named."""

TORCH = """### torch: `test_dataloader.py`

Taken from torchdata (`test/stateful_dataloader/`, at e640e6f), which keeps a copy. With our class 166 tests pass, 2
fail, and 12 are skipped because they are slow or need a GPU. `test_segfault`, `test_get_worker_info` and the tests of
`in_order=False` pass. Three failed at first by bounds on time and passed alone: `test_no_segfault` and `test_timeout`
with persistent workers, and `test_nested_tensor_multiprocessing_context_spawn_cpu`.

The slow test, `test_proper_exit`, was not run again. Before, it passed without persistent workers: 24 cases, each of
which has to end within 60 s. With persistent workers it did not finish within 20 minutes on the busy machine; the cases
of streams with workers, in which a worker or the consumer raises, passed by themselves, also with persistent workers
where the iterator is held."""

DATA = """### torchdata: `test_state_dict.py`, `test_sampler.py`, `test_incremental_state.py`

At e640e6f, with torchdata 0.11, and `asyncloader.stateful.StatefulDataLoader` in the place of its class. With our
states 95 of 110 tests pass, and 15 fail. That checkpoints of torchdata's go on is shown by tests of ours:
`python -m tests.stateful.matrix` goes through all kinds of them."""

MONAI = """### MONAI

Sixteen test files that use its loaders, at d388d1c: `tests/data/` `meta_tensor/test_meta_tensor`, `test_arraydataset`,
`test_cachedataset`, `test_cachedataset_persistent_workers`, `test_csv_iterable_dataset`, `test_dataloader`,
`test_dataset_summary`, `test_grid_dataset`, `test_iterable_dataset`, `test_patch_dataset`, `test_sampler_dist`,
`test_shuffle_buffer`, `test_smartcachedataset`, `test_thread_buffer`, `utils/test_decollate`, and
`tests/integration/test_pad_collation`. `torch.utils.data.DataLoader` was ours before MONAI was imported, so
`monai.data.DataLoader` was built on ours. With torch's class all tests pass but 4 of
`test_sampler_dist`, which fail or run out of time on the busy machine. With our class the other fifteen files were run
again: 211 pass, and the two below fail. (A function that is named `test_collate`, and is no test, is an error with
both.)"""

MONAI_FAILURES = {
    "`TestLoaderRandom.test_randomize_0`, `.test_zipdataset`": "The tests expect the numbers of a worker's own stream, "
    "which MONAI's `worker_init_fn` has seeded, over several batches. Each batch is seeded anew, from the same base "
    "seed: otherwise numbers would depend on the number of workers, and on crashes and resumes. Generators that MONAI "
    'seeds alike draw alike, as with torch. With `seeding="worker"` both pass.',
}

ACCELERATE = """### Accelerate

At 16cb6eb8: `test_data_loader`, `test_scheduler`, `test_grad_sync`, `test_accelerator` and `test_state_checkpointing`.
`torch.utils.data.DataLoader` was ours before Accelerate was imported, so its loaders were built on ours. With our class
107 of 107 tests pass, as with torch's (16 are skipped: they need a GPU, or several).
`test_free_memory_dereferences_prepared_components` compares the free memory of the machine, and passed alone.
`test_data_loader` was run again with our `StatefulDataLoader` in the place of torchdata's, which
`use_stateful_dataloader=True` asks for: 37 of 37 pass."""

LIGHTNING = """### Lightning

At 7f0c3436: of `tests_pytorch`, `utilities/` `test_combined_loader`, `test_data`, `test_auto_restart`; `loops/`
`test_fetchers`, `test_double_iter_in_iterable_dataset`, `test_training_loop`, `test_evaluation_loop`,
`test_prediction_loop`; `trainer/` `test_dataloaders`, `connectors/test_data_connector`, `flags/test_overfit_batches`;
`core/test_datamodules`. `torch.utils.data.DataLoader` was ours before Lightning was imported. With our class 456 of 457
tests pass. The other one, `test_dataloader_persistent_workers_performance_warning[2]`, starts processes that import
Lightning, and ran out of 200 s; alone it ran out of time on the busy machine with torch's class, too. The first test
that has workers is an error when it is over, as Lightning's tests allow no thread to stay: that of our event loop stays
to the end of the process."""

TORCH_FAILURES = {
    "`test_worker_init_fn` (twice)": "With each sample, the test reads a seed that `worker_init_fn` has set. Each "
    'batch is seeded anew; `seeding="worker"` leaves the seed alone.',
}

DATA_FAILURES = {
    "`TestDataLoader.test_sampler_next_yielded`": "The test is of a sampler of torchdata's, newer than 0.11, and has "
    "no loader. It fails with torchdata's class too.",
    "`TestInitialState.test_initial_state`, `.test_load_state_after_initial_state_dict`, `TestSingleIterCalled` (4), "
    "`TestDynamicStateIterableDataset.test`, `TestDatasetIteratorStateDuplication.test`, "
    "`TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker`, "
    "`.test_out_of_order_iterable_ds_no_completed_workers`": "The tests read torchdata's own layout of a state "
    "(`_snapshot`, `fetcher_state`).",
    "`TestFastStateDictRequestRoundRobin.test_fast_state_dict_request_skip_steps`": "The data are the same. At the end "
    "the test compares a state after a resume with one before. Both name the same place: a state of the dataset and "
    "the number of batches since, but counted from different batches.",
    "`TestNumWorkersMismatch.test_num_workers_mismatch`": "`load_state_dict` refuses the state, with an AssertionError "
    "of ours (`StateMismatchError`); the test expects that `iter` does.",
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
    parts = [
        HEAD,
        TORCH,
        table(TORCH_FAILURES),
        DATA,
        table(DATA_FAILURES),
        MONAI,
        table(MONAI_FAILURES),
        ACCELERATE,
        LIGHTNING,
    ]
    return "\n\n".join(parts)
