"""The results of others' test suites with our class in the place of theirs, for the page in the docs."""

from __future__ import annotations

HEAD = """\
Run on 28 November 2026 with our class in the place of theirs, also in the processes that they start, with torch 2.13
and without a GPU; tests that failed by a bound on time or memory were run again alone."""

TORCH = """### torch: `test_dataloader.py`

From torchdata (`test/stateful_dataloader/`, at e640e6f), which keeps a copy: 166 tests pass, 2 fail, 12 are skipped
because they are slow or need a GPU. (The slow `test_proper_exit` passed before without persistent workers; with them it
did not finish within 20 minutes.)"""

DATA = """### torchdata: `test_state_dict.py`, `test_sampler.py`, `test_incremental_state.py`

At 088e4347, with torchdata 0.11, and `asyncloader.stateful.StatefulDataLoader` in the place of its class: 100 of
110 tests pass. (`python -m tests.stateful.matrix` shows that torchdata's checkpoints of all kinds go on with ours.)"""

MONAI = """### MONAI

35 test files that use its loaders, at d388d1c, on 29 November, with ours as `torch.utils.data.DataLoader` before MONAI
was imported: 355 tests pass, and the four below fail. Six more fail with torch's class too."""

MONAI_FAILURES = {
    "`TestLoaderRandom.test_randomize_0`, `.test_zipdataset`, `TestCompose.test_data_loader`, "
    "`.test_data_loader_2`": "They expect the numbers of a worker's stream, which MONAI has seeded; each batch is "
    'seeded anew, images and masks alike. `seeding="worker"` passes.',
}

ACCELERATE = """### Accelerate

At 16cb6eb8, `test_data_loader`, `test_scheduler`, `test_grad_sync`, `test_accelerator` and `test_state_checkpointing`:
107 of 107 pass, as with torch's (16 are skipped: they need a GPU, or several). `test_data_loader` passes as well with
our `StatefulDataLoader` in the place of torchdata's."""

LIGHTNING = """### Lightning

At 7f0c3436, its tests of loaders, loops, connectors and data modules: 456 of 457 pass. The other one,
`test_dataloader_persistent_workers_performance_warning[2]`, ran out of time with torch's class, too. The first test
that has workers is an error when it is over: no thread may stay there, and that of our event loop does."""

TORCH_FAILURES = {
    "`test_worker_init_fn` (twice)": "With each sample, the test reads a seed that `worker_init_fn` has set. Each "
    'batch is seeded anew; `seeding="worker"` leaves the seed alone.',
}

DATA_FAILURES = {
    "`TestInitialState.test_initial_state`, `.test_load_state_after_initial_state_dict`, `TestSingleIterCalled` (4), "
    "`TestDynamicStateIterableDataset.test`, `TestDatasetIteratorStateDuplication.test`, "
    "`TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker`, "
    "`.test_out_of_order_iterable_ds_no_completed_workers`": "The tests read torchdata's own layout of a state "
    "(`_snapshot`, `fetcher_state`).",
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
