"""Workers as processes: where batches are made, starting, ending, dying."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import tempfile
import threading
import warnings
from typing import Any

import pytest
import torch

from tests.conformance.comparison import Subject, caught, same_as_torch, told
from tests.conformance.datasets import (
    Augmented,
    Dying,
    Echo,
    Gate,
    Informed,
    Mailbox,
    Meeting,
    Remembering,
    Samples,
    Shared,
    Squares,
    Unpicklable,
    Watched,
    Whereabouts,
    as_list,
    draw_some,
)
from tests.support.leftovers import Holdings

pytestmark = pytest.mark.processes

GONE_S = 10
FORKED = {"multiprocessing_context": "fork"}  # how a worker ended, torch learns only from its own children
INTERRUPTED = "torch's SIGCHLD handler raises while torch counts its descriptors with temporary files"


def wait_until_gone(pids: list[int]) -> bool:
    """Whether these processes end in good time; leaves it to the loader to reap them."""
    return all(_ends(pid) for pid in pids)


def _ends(pid: int) -> bool:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], GONE_S)[0])
    finally:
        os.close(watch)


# --- which worker does what ---


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@same_as_torch("static order", defaults=True)
def test_batch_i_is_made_by_worker_i_modulo_num_workers(make: Subject, num_workers: int) -> object:
    """In every epoch, beginning with worker 0."""
    loader = make(Whereabouts(10), batch_size=None, collate_fn=as_list, num_workers=num_workers)
    return [[place[1] for place in make.batches(loader)] for _ in range(2)]


@pytest.mark.parametrize("num_workers", [2, 6])
@same_as_torch("all workers are live")
def test_all_workers_can_meet(make: Subject, num_workers: int) -> object:
    """Each blocks until all have come: the first batches go to distinct workers, which work at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        return make.batches(make(Meeting(folder, num_workers), num_workers=num_workers))


@same_as_torch("`_workers`", async_for=False)
def test_workers_are_listed_as_processes(make: Subject) -> object:
    """`_workers[i]` is the process in which worker i runs."""
    it = iter(make(Whereabouts(6), batch_size=None, collate_fn=as_list, num_workers=2))
    pids = [worker.pid for worker in it._workers]
    alive = [worker.is_alive() for worker in it._workers]
    codes = [worker.exitcode for worker in it._workers]
    places = list(it)
    assert os.getpid() not in pids
    assert len(set(pids)) == 2
    return alive, codes, [pids[worker] == pid for _, worker, pid in places]


@same_as_torch("`_workers`", async_for=False)
def test_workers_of_a_consumed_iterator_exit_with_code_zero(make: Subject) -> object:
    """The workers can be joined, and are no longer alive."""
    it = iter(make(Squares(6), num_workers=2))
    workers = list(it._workers)
    list(it)
    for worker in workers:
        worker.join(timeout=GONE_S)
    return [(worker.exitcode, worker.is_alive()) for worker in workers]


@same_as_torch("`_workers`", async_for=False)
def test_workers_of_an_abandoned_iterator_exit_with_code_zero(make: Subject) -> object:
    """One batch is taken, then the iterator is dropped."""
    it = iter(make(Squares(100), num_workers=2))
    workers = list(it._workers)
    next(it)
    del it
    for worker in workers:
        worker.join(timeout=GONE_S)
    return [(worker.exitcode, worker.is_alive()) for worker in workers]


@same_as_torch("`_workers`", async_for=False)
def test_workers_go_by_reference_count_alone(make: Subject) -> object:
    """`del iterator` ends the workers without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        it = iter(make(Squares(100), num_workers=2))
        pids = [worker.pid for worker in it._workers]
        next(it)
        del it
        return wait_until_gone(pids)
    finally:
        gc.enable()


@same_as_torch("`_workers`", async_for=False)
def test_nothing_of_an_epoch_waits_for_the_garbage_collector(make: Subject) -> object:
    """Processes, threads and descriptors go even in trainers that switch the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        before = Holdings.now()
        list(make(Squares(6), num_workers=2))
        next(iter(make(Squares(6), num_workers=2)))
        return before.more_than_before(collect=False)
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["break", "return", "raise", "next only", "never begun"])
@same_as_torch("breaking off", async_for=False)
def test_workers_end_when_the_loop_is_left(make: Subject, way: str) -> object:
    """By `break`, by `return`, by an exception, or before the first batch."""
    pids: list[int] = []

    def leave() -> None:
        it = iter(make(Squares(60), num_workers=2))
        pids.extend(worker.pid for worker in it._workers)
        if way == "never begun":
            return
        for _ in it:
            if way == "break":
                break
            if way == "raise":
                raise LookupError("in the body")
            return

    error = caught(leave)
    return wait_until_gone(pids), type(error)


@same_as_torch("breaking off")
def test_epochs_after_breaking_off_are_complete(make: Subject) -> object:
    """Leaving one epoch early, many times, takes nothing from the next."""
    loader = make(Squares(20), batch_size=3, num_workers=2)
    firsts = [next(iter(loader)) for _ in range(3)]
    return firsts, make.batches(loader)


@same_as_torch("`_workers`", async_for=False, defaults=False)
def test_terminated_worker_is_noticed(make: Subject) -> object:
    """`_workers[i].terminate()` ends the process, and the loop ends with an error instead of hanging."""
    with Gate() as gate:
        it = iter(make(Watched(8, gate=gate, at=[1]), num_workers=2))
        first = next(it)
        it._workers[1].terminate()
        error = caught(lambda: list(it))
    return first, isinstance(error, RuntimeError), "DataLoader worker" in told(error or RuntimeError())


# --- each worker's own copy ---


@same_as_torch("copies of the dataset")
def test_bound_method_as_worker_init_fn_acts_on_the_copy_that_is_used(make: Subject) -> object:
    """The method changes the worker's dataset, not that of the main process."""
    dataset = Remembering(4)
    loader = make(dataset, batch_size=None, collate_fn=as_list, num_workers=2, worker_init_fn=dataset.tell)
    return make.batches(loader), dataset.told, dataset.fetched


@same_as_torch("copies of the dataset")
def test_changes_in_the_main_process_reach_the_next_epoch_only(make: Subject) -> object:
    """Workers that run have the dataset as it was at iter()."""
    dataset = Samples("int", 6)
    loader = make(dataset, num_workers=1)
    it = iter(loader)
    dataset.maker = "float"
    return list(it), make.batches(loader)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@same_as_torch("copies of the dataset", async_for=False, defaults=False)
def test_objects_of_multiprocessing_in_a_dataset_are_shared(make: Subject, method: str) -> object:
    """A dataset's counter and shared tensor are those of the main process."""
    context = multiprocessing.get_context(method)
    counter, marks = context.Value("i", 0), torch.zeros(4).share_memory_()
    loader = make(Shared(4, counter, marks), num_workers=1, multiprocessing_context=context)
    return make.batches(loader), counter.value, marks


# --- start methods ---


class InformedAugmentedFailing(Informed):
    """Everything at once: a worker costs seconds where it is spawned."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("the third")
        return super().__getitem__(index), Augmented(0)[index]


@pytest.mark.parametrize("start_method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@same_as_torch("start methods", async_for=False, defaults=False)
def test_workers_start_in_every_way(make: Subject, start_method: str) -> object:
    """Order, random streams, worker info, worker_init_fn and errors are the same with fork, forkserver and spawn."""
    loader = make(
        InformedAugmentedFailing(7),
        shuffle=True,
        collate_fn=as_list,
        worker_init_fn=draw_some,
        num_workers=1,
        multiprocessing_context=start_method,
    )
    it, batches = iter(loader), []
    errors = [caught(lambda: batches.append(next(it))) for _ in range(7)]
    return batches, [error and "Caught KeyError in DataLoader worker process 0." in told(error) for error in errors]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@same_as_torch("start methods", async_for=False)
def test_start_method_given_as_a_context(make: Subject, method: str) -> object:
    """A context object is as good as a name."""
    loader = make(Squares(3), num_workers=1, multiprocessing_context=multiprocessing.get_context(method))
    return make.batches(loader), loader.multiprocessing_context.get_start_method()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@same_as_torch("warnings", async_for=False, since=(2, 13))
def test_what_cannot_be_pickled_warns_and_raises(make: Subject, method: str) -> object:
    """torch's warning, then the pickler's error; no process stays."""
    loader = make(Unpicklable(3), num_workers=1, multiprocessing_context=method)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        error = caught(lambda: list(loader))
    texts = [str(w.message) for w in seen if "pickle error" in str(w.message)]
    return (
        isinstance(error, (TypeError, AttributeError, pickle.PicklingError)),
        "cannot pickle '_thread.lock' object" in str(error),
        ["Got pickle error when attempting to start a worker Process" in text for text in texts],
    )


@same_as_torch("fork")
def test_fork_after_torch_has_used_its_threads(make: Subject) -> object:
    """After a convolution on several threads in the main process, forked workers can compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        image, kernel = torch.ones(1, 3, 64, 64), torch.ones(8, 3, 3, 3)
        torch.nn.functional.conv2d(image, kernel)
        loader = make(Samples("large tensor"), batch_size=3, num_workers=2, multiprocessing_context="fork")
        return [batch.matmul(batch.t()).shape for batch in make.batches(loader)]
    finally:
        torch.set_num_threads(threads)


@same_as_torch("other threads")
def test_loader_can_be_used_in_a_thread(make: Subject) -> object:
    """Iterating in a thread other than the main one."""
    seen: list[Any] = []
    loader = make(Squares(9), batch_size=2, num_workers=2)
    thread = threading.Thread(target=lambda: seen.extend(loader))
    thread.start()
    thread.join(30)
    return seen


@same_as_torch("other threads")
def test_loaders_can_be_used_in_several_threads_at_once(make: Subject) -> object:
    """Each thread has its own iterator over one loader; none disturbs the others."""
    loader = make(Squares(30), batch_size=4, num_workers=1)
    seen: list[list[Any]] = [[], [], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(loader)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return seen


# --- timeouts and deaths ---


@pytest.mark.parametrize("num_workers", [1, 2])
@same_as_torch("timeout", async_for=False)
def test_timeout_is_told_in_torchs_words_and_loses_nothing(make: Subject, num_workers: int) -> object:
    """A RuntimeError; the same batch comes at a later call, the workers live on."""
    with Gate() as gate:
        it = iter(make(Watched(5, gate=gate, at=[0]), num_workers=num_workers, timeout=0.2))
        pids = [worker.pid for worker in it._workers]
        errors = [caught(lambda: next(it)) for _ in range(2)]
        gate.open()
        rest: list[Any] = []
        while len(rest) < 5 and not isinstance(caught(lambda: rest.append(next(it))), StopIteration):
            pass
    texts = ["DataLoader timed out after 0.2 seconds" in str(error) for error in errors]
    return [isinstance(error, RuntimeError) for error in errors], texts, rest, len(pids)


@same_as_torch("timeout")
def test_timeout_that_is_not_reached_changes_nothing(make: Subject) -> object:
    """All batches come in time."""
    return make.batches(make(Squares(9), batch_size=2, num_workers=2, timeout=60))


DEATHS = {
    "SIGKILL": "is killed by signal: Killed",
    "SIGTERM": "is killed by signal: Terminated",
    "os._exit": "exited unexpectedly with exit code 3",
    "sys.exit": "exited unexpectedly with exit code 4",
}


@pytest.mark.parametrize("how", DEATHS)
@same_as_torch("dead workers", async_for=False, defaults=False, torch_leaves=INTERRUPTED)
def test_death_of_a_worker_is_told_in_torchs_words(make: Subject, how: str) -> object:
    """A RuntimeError that names the process and how it ended.

    No tensors are on their way: those of a dead process make torch raise ConnectionResetError now and then.
    """
    with Gate() as gate:
        dataset = Dying(4, at=1, how=how, gate=gate)
        it = iter(make(dataset, batch_size=None, collate_fn=as_list, num_workers=2, **FORKED))
        pid = it._workers[1].pid
    error = caught(lambda: list(it))
    text = told(error or RuntimeError())
    return (
        isinstance(error, RuntimeError),
        bool(re.search(rf"DataLoader worker \(pid\(?s?\)? {pid}\)", text)),
        DEATHS[how] in text,
    )


@same_as_torch("dead workers", async_for=False, defaults=False, torch_leaves=INTERRUPTED)
def test_worker_killed_from_outside_is_noticed(make: Subject) -> object:
    """A worker is killed while the consumer waits for the worker's batch."""
    with Mailbox() as mailbox, Gate() as gate:
        it = iter(make(Watched(4, mailbox, gate, at=[0]), num_workers=1, **FORKED))
        assert mailbox.letter() == 0
        os.kill(it._workers[0].pid, signal.SIGKILL)
        error = caught(lambda: next(it))
    return isinstance(error, RuntimeError), "is killed by signal: Killed" in told(error or RuntimeError())


@same_as_torch("dead workers", async_for=False, defaults=False, torch_leaves=INTERRUPTED)
def test_loader_can_be_used_again_after_a_death(make: Subject) -> object:
    """A new iterator has new workers."""
    dataset = Dying(6, at=0, how="SIGKILL")
    loader = make(dataset, num_workers=2)
    error = caught(lambda: list(loader))
    dataset.at = -1
    return isinstance(error, RuntimeError), make.batches(loader)


@same_as_torch("descriptors")
def test_many_kept_batches_do_not_use_up_descriptors(make: Subject) -> object:
    """Hundreds of batches kept at once, each a tensor of its own."""
    kept = make.batches(make(Echo(300), batch_size=1, num_workers=2))
    return torch.cat(kept)
