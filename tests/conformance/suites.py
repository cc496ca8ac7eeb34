"""What of others' test suites, run with our class in the place of theirs, fails: for the page in the docs."""

from __future__ import annotations

HEAD = """The suites themselves are not part of this project. They were run with our class in the place of theirs, in
processes that they start too, with torch 2.13 without a GPU, on a busy machine of two cores."""

TORCH = """### torch: `test/test_dataloader.py`

With torch's class 153 tests pass, 6 fail and 23 are skipped; with ours 151 pass, 6 fail, 23 are skipped, and 2 fail
that torch expects to fail (`test_segfault`, which pass here with torch's class, against its expectation). Four of the
six fail with torch's class too, there: `test_get_worker_info` (twice; it sets what torch 2.13 has frozen),
`test_shuffler_iterdatapipe` and
`TestOutOfOrderDataLoader.test_out_of_order_index_ds`."""

DATA = """### torchdata: `test/stateful_dataloader/`

`test_state_dict.py`, `test_sampler.py` and `test_incremental_state.py`: 96 tests pass, 14 fail. All else passes with
states of ours."""

TORCH_FAILURES = {
    "`test_worker_init_fn` (twice)": "It reads a seed that `worker_init_fn` has set with each sample; each batch is "
    'seeded anew, `seeding="worker"` leaves it.',
}

DATA_FAILURES = {
    "`TestInitialState.test_initial_state`, `.test_load_state_after_initial_state_dict`, `TestSingleIterCalled` (4), "
    "`TestDynamicStateIterableDataset.test`, `TestDatasetIteratorStateDuplication.test`, "
    "`TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker`, "
    "`.test_out_of_order_iterable_ds_no_completed_workers`": "They read torchdata's own layout of a state "
    "(`_snapshot`, `fetcher_state`).",
    "`TestFastStateDictRequestRoundRobin.test_fast_state_dict_request_skip_steps`": "The data are the same. At its end "
    "it compares a state after a resume with one before, and these say the same place in two ways: a state of the "
    "dataset and the batches since, counted from another batch.",
    "`TestNumWorkersMismatch.test_num_workers_mismatch`": "It is refused with `StateMismatchError`, not with "
    "AssertionError.",
    "`TestInitialState.test_init_error`": "`iter` does not wait for `worker_init_fn`: its error is raised by the "
    "first `next`, as with torch's DataLoader.",
    "`TestSnapshotEnd.test_iterable`": "With persistent workers, a stream that draws from a worker's global generator "
    "draws other numbers in the epoch after a state that was taken between two epochs. The iterator's state has that "
    "generator, and ends with its epoch here. A state of the dataset's own goes on.",
}


def table(failures: dict[str, str]) -> str:
    """Write the tests and why they fail as a Markdown table."""
    return "\n".join(["| test | why |", "|---|---|", *(f"| {test} | {why} |" for test, why in failures.items())])


def section() -> str:
    """Write what is known of all suites."""
    parts = [HEAD, TORCH, table(TORCH_FAILURES), DATA, table(DATA_FAILURES)]
    return "\n\n".join(parts)
