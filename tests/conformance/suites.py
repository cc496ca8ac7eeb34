"""What of others' test suites, run with our class in the place of theirs, fails: for the page in the docs."""

from __future__ import annotations

HEAD = """The suites themselves are not part of this project. They were run with our class in the place of theirs, in
processes that they start too, with torch 2.13 without a GPU, on a busy machine of two cores. Both were taken from
torchdata (`test/stateful_dataloader/` at e640e6f), which has a copy of torch's."""

TORCH = """### torch: `test_dataloader.py`

With ours 161 tests pass, 5 fail and 16 are skipped: no GPU, or slow. `test_segfault`, `test_shuffler_iterdatapipe` and
those of `in_order=False` pass.

The slow test, `test_proper_exit`, passes without persistent workers: 24 cases, each of which has to end within 60 s.
With persistent workers the machine was too busy to come to its end in 20 minutes. The cases of streams with workers, in
which a worker or the consumer raises, were run again by themselves and passed, also with persistent workers where the
iterator is held."""

DATA = """### torchdata: `test_state_dict.py`, `test_sampler.py`, `test_incremental_state.py`

94 tests pass, 16 fail. All else passes with states of ours."""

FRAMEWORKS = """### Frameworks

The suites of Accelerate and Lightning were not run. Our own tests train with both (`tests/frameworks`); what to
know about each is on the page about [frameworks](frameworks.md)."""

TORCH_FAILURES = {
    "`test_get_worker_info` (twice)": "It sets what torch 2.13 has frozen; it fails with torch's class too.",
    "`test_worker_init_fn` (twice)": "It reads a seed that `worker_init_fn` has set with each sample; each batch is "
    'seeded anew, `seeding="worker"` leaves it.',
    "`test_large_sampler_indices`, with persistent workers": "The test allows 60 s, and on that machine importing "
    "torch and the suite took longer in the process that it starts. What it runs took 7 s after that, and raised what "
    "it should.",
}

DATA_FAILURES = {
    "`TestInitialState.test_initial_state`, `.test_load_state_after_initial_state_dict`, `TestSingleIterCalled` (4), "
    "`TestDynamicStateIterableDataset.test`, `TestDatasetIteratorStateDuplication.test`, "
    "`TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker`, "
    "`.test_out_of_order_iterable_ds_no_completed_workers`": "They read torchdata's own layout of a state "
    "(`_snapshot`, `fetcher_state`).",
    "`TestFastStateDictRequestRoundRobin.test_fast_state_dict_request`, "
    "`.test_fast_state_dict_request_skip_steps`": "The data are the same. At its end "
    "it compares a state after a resume with one before, and these say the same place in two ways: a state of the "
    "dataset and the batches since, counted from another batch.",
    "`TestDataLoader.test_sampler_next_yielded`": "It reads an attribute of torchdata's sampler that torchdata 0.11, "
    "which was installed, has not got.",
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
    parts = [HEAD, TORCH, table(TORCH_FAILURES), DATA, table(DATA_FAILURES), FRAMEWORKS]
    return "\n\n".join(parts)
