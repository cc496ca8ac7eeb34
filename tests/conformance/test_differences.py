"""What differs from torch on purpose: both sides are shown, so that neither can change unseen."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from tests.conformance.comparison import caught, seed_everything, told
from tests.conformance.datasets import (
    Augmented,
    Counted,
    DyingOnce,
    Echo,
    Failing,
    Gate,
    HasChild,
    Informed,
    KeepsSocket,
    Mailbox,
    Squares,
    TwoArguments,
    Watched,
    as_list,
    fail_to_start,
)
from tests.conformance.differences import differs
from tests.conformance.test_exceptions import first_error

Torch = torch.utils.data.DataLoader


@pytest.fixture
def ours() -> Any:
    """Our class."""
    return pytest.importorskip("asyncloader").DataLoader


def epoch(loader: Any) -> list[Any]:
    """One epoch from the same seed, as plain values."""
    seed_everything(3)
    return [[part.tolist() if hasattr(part, "tolist") else part for part in batch] for batch in loader]


@differs(
    "StopIteration raised by a dataset or `collate_fn`",
    torch="ends the `for` loop: the epoch is short, without an error",
    ours="RuntimeError in the place of the batch, with the StopIteration as the cause",
    why="generators do the same (PEP 479)",
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_is_no_end(ours: Any, num_workers: int) -> None:
    """torch's epoch has five of nine batches; ours tells, and goes on behind it."""
    assert len(list(Torch(Failing(9, "StopIteration", at=[5]), num_workers=num_workers))) == 5
    batches = iter(ours(Failing(9, "StopIteration", at=[5]), num_workers=num_workers))
    assert [next(batches).item() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert isinstance(caught(lambda: next(batches)), RuntimeError)
    assert [batch.item() for batch in batches] == [6, 7, 8]


@differs(
    "random numbers in workers",
    torch="one stream for each worker: another num_workers gives other augmentations",
    ours="each batch is seeded from the base seed of the epoch, the rank of the data and the batch's number",
    why="num_workers, timing, a crash and a resume change nothing",
    instead='`seeding="worker"`',
)
def test_augmentations_do_not_depend_on_the_number_of_workers(ours: Any) -> None:
    """Ours gives the same augmentations with one, two and three workers, torch does not."""
    ours_by_workers = [epoch(ours(Augmented(8), 2, num_workers=n)) for n in (1, 2, 3)]
    torchs_by_workers = [epoch(Torch(Augmented(8), 2, num_workers=n)) for n in (1, 2)]
    assert ours_by_workers[0] == ours_by_workers[1] == ours_by_workers[2]
    assert torchs_by_workers[0] != torchs_by_workers[1]
    assert ours_by_workers[0] not in torchs_by_workers


@differs(
    "`get_worker_info().seed`",
    torch="always `torch.initial_seed()`",
    ours="the seed of the worker's start; each batch has its own",
    why="each batch is seeded for itself",
    instead='`seeding="worker"`',
)
def test_seed_of_a_worker_is_that_of_its_start(ours: Any) -> None:
    """base seed + id on both sides, and equal; what batches are seeded with differs."""
    told_by = []
    for loader in (
        Torch(Informed(2), collate_fn=as_list, num_workers=1),
        ours(Informed(2), collate_fn=as_list, num_workers=1),
    ):
        seed_everything(3)
        told_by.append([sample for (sample,) in loader])
    assert [info["seed"] for info in told_by[0]] == [info["seed"] for info in told_by[1]]
    assert all(info["seed is torch's"] for info in told_by[0])
    assert not any(info["seed is torch's"] for info in told_by[1])


@differs(
    "errors in workers",
    torch="a new exception of that type whose only argument is a long text",
    ours="the exception itself, with its arguments and attributes, and torch's text in its notes",
    why="`except OSError as e: e.errno` works with workers as it does without",
)
def test_exception_keeps_its_arguments(ours: Any) -> None:
    """errno and file name arrive; in torch they are lost in a text."""
    mine, torchs = (first_error(cls(Failing(2, "OSError"), num_workers=1)) for cls in (ours, Torch))
    assert isinstance(mine, FileNotFoundError)
    assert (mine.errno, mine.filename) == (2, "cat.png")
    assert "Caught FileNotFoundError in DataLoader worker process 0." in told(mine)
    assert isinstance(torchs, FileNotFoundError)
    assert torchs.errno is None


@pytest.mark.parametrize(
    ("error", "kind"), [("UnicodeDecodeError", UnicodeDecodeError), ("TwoArguments", TwoArguments)]
)
@differs(
    "exceptions that cannot be made of one text",
    torch="RuntimeError",
    ours="their own type",
    why="`except` clauses work with workers as they do without",
)
def test_exception_of_several_arguments_keeps_its_type(ours: Any, error: str, kind: type[Exception]) -> None:
    """torch cannot build it anew; ours was never taken apart."""
    mine, torchs = (first_error(cls(Failing(2, error), num_workers=1)) for cls in (ours, Torch))
    assert type(mine) is kind
    assert type(torchs) is RuntimeError
    assert f"Caught {kind.__name__} in DataLoader worker process 0." in told(mine)
    assert f"Caught {kind.__name__} in DataLoader worker process 0." in told(torchs)


@differs(
    "exceptions that cannot be pickled",
    torch="their type, made anew from a text",
    ours="RuntimeError with torch's text",
    why="an object that has lost its attributes is not the one that was raised",
)
def test_exception_that_cannot_be_pickled_becomes_a_runtime_error(ours: Any) -> None:
    """The text is torch's on both sides."""
    mine, torchs = (first_error(cls(Failing(2, "KeepsSocket"), num_workers=1)) for cls in (ours, Torch))
    assert type(mine) is RuntimeError
    assert type(torchs) is KeepsSocket
    assert "Caught KeepsSocket in DataLoader worker process 0." in told(mine)


@differs(
    "`worker_init_fn` that raises",
    torch="its error once for each worker, then UnboundLocalError for every batch",
    ours="its error for every batch",
    why="every message says what is wrong",
)
def test_error_of_worker_init_fn_is_told_for_every_batch(ours: Any) -> None:
    """torch's worker goes on without a fetcher."""
    kinds = []
    for cls in (ours, Torch):
        it = iter(cls(Squares(3), num_workers=1, worker_init_fn=fail_to_start))
        kinds.append([type(caught(lambda it=it: next(it))) for _ in range(3)])
    assert kinds == [[ValueError] * 3, [ValueError, UnboundLocalError, UnboundLocalError]]


@differs(
    "timeouts",
    torch="RuntimeError",
    ours="an error that is TimeoutError and RuntimeError, with the indices, the worker's pid and its stack",
    why="the error says which batch was late",
)
@pytest.mark.usefixtures("patient_stacks")
def test_timeout_says_what_was_waited_for(ours: Any) -> None:
    """torch's words are in both."""
    errors = []
    for cls in (ours, Torch):
        with Mailbox() as mailbox, Gate() as gate:
            it = iter(cls(Watched(2, mailbox, gate, at=[0]), num_workers=1, timeout=0.3))
            assert mailbox.letter() == 0
            errors.append((caught(lambda it=it: next(it)), it._workers[0].pid))
            gate.open()
            caught(lambda it=it: list(it))  # a busy machine may be late again
    (mine, pid), (torchs, _) = errors
    assert isinstance(mine, TimeoutError)
    assert isinstance(mine, RuntimeError)
    assert "DataLoader timed out after 0.3 seconds" in str(mine)
    assert "DataLoader timed out after 0.3 seconds" in str(torchs)
    assert mine.pid == pid
    assert mine.keys == [0]
    assert "pass_gate" in mine.stack
    assert not isinstance(torchs, TimeoutError)


@differs(
    "a worker that dies",
    torch="RuntimeError, and the epoch ends",
    ours="the worker is replaced and its batches are made again; the error comes after `max_retries`",
    why="one crash in a thousand hours does not end a training",
    instead='`on_crash="raise"`',
)
def test_worker_that_dies_is_replaced(ours: Any, tmp_path: Path) -> None:
    """Killed once: ours delivers every batch in order, torch an error."""
    options: dict[str, Any] = {"batch_size": None, "collate_fn": as_list, "num_workers": 2}
    for name in ("ours", "torch"):
        (tmp_path / name).mkdir()
    assert list(ours(DyingOnce(8, 3, str(tmp_path / "ours")), **options)) == list(range(8))
    error = caught(lambda: list(Torch(DyingOnce(8, 1, str(tmp_path / "torch")), **options)))
    assert isinstance(error, RuntimeError)


@differs(
    "children of workers",
    torch="none: workers are daemonic",
    ours="allowed",
    why="datasets may use subprocess pools",
)
def test_workers_may_have_children(ours: Any) -> None:
    """A dataset that starts a process of multiprocessing."""
    assert list(ours(HasChild(2), batch_size=None, num_workers=1)) == [0, 1]
    assert "daemonic processes are not allowed to have children" in told(first_error(Torch(HasChild(2), num_workers=1)))


@differs(
    "lambdas and local classes with spawn and forkserver",
    torch="refused by pickle",
    ours="sent with cloudpickle",
    why="notebooks have both",
)
def test_lambdas_reach_workers_that_were_not_forked(ours: Any) -> None:
    """collate_fn, worker_init_fn and a dataset of a local class."""

    class Local(Squares):
        pass

    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    loader = ours(Local(3), collate_fn=lambda samples: samples, worker_init_fn=lambda worker_id: None, **options)
    assert list(loader) == [[0], [1], [4]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own word on it, which 2.6 does not say
        error = caught(lambda: iter(Torch(Local(3), **options)))
    assert isinstance(error, (AttributeError, TypeError, multiprocessing.ProcessError)) or "pickle" in str(error)


@differs(
    "dropping an iterator",
    torch="waits for the workers, five seconds for one that hangs",
    ours="tells them to end and returns; `close()` waits",
    why="`break` does not stop training",
)
def test_dropping_an_iterator_does_not_wait_for_a_busy_worker(ours: Any) -> None:
    """The worker is still in its sample when `del it` has returned."""
    with Mailbox() as mailbox, Gate() as gate:
        it = iter(ours(Watched(4, mailbox, gate, at=[0]), num_workers=1))
        worker = it._workers[0]
        assert mailbox.letter() == 0
        del it
        alive = worker.is_alive()
        gate.open()
        worker.join(timeout=10)
    assert alive
    assert worker.exitcode == 0


@differs(
    "how far the sampler is read",
    torch="`prefetch_factor * num_workers` batches ahead",
    ours="further, while workers would be idle behind a slow batch",
    why="one slow sample does not stop all workers",
    instead="`max_buffered_bytes=0`",
)
def test_workers_run_ahead_of_a_slow_batch(ours: Any) -> None:
    """While batch 2 is stuck and the consumer waits for it, more than the window is made."""
    for cls, options in ((ours, {"max_buffered_bytes": 0}), (Torch, {}), (ours, {})):
        sampler = Counted(24)
        with Mailbox() as mailbox, Gate() as gate:
            it = iter(cls(Watched(24, mailbox, gate, at=[2]), sampler=sampler, num_workers=2, **options))
            runs_ahead = cls is ours and not options
            assert sorted(mailbox.letter() for _ in range(4)) == [0, 1, 2, 3]
            assert sampler.read == 4
            for taken in (1, 2):
                next(it)
                assert runs_ahead or sampler.read == 4 + taken
            if runs_ahead:
                import threading

                def open_late(mailbox: Mailbox = mailbox, gate: Gate = gate) -> None:
                    for _ in range(5):  # more than the window could give
                        mailbox.letter()
                    gate.open()

                helper = threading.Thread(target=open_late)
                helper.start()
                next(it)
                helper.join()
                assert sampler.read > 4 + 3
            else:
                gate.open()
                next(it)
                assert sampler.read == 4 + 3
            del it


@differs(
    "one iterator in several threads",
    torch="undefined",
    ours="each batch goes to exactly one of them",
    why="trainers may have several consumers",
)
def test_threads_may_share_an_iterator(ours: Any) -> None:
    """Four threads take all batches, none twice."""
    import threading

    it = iter(ours(Echo(200), num_workers=2, batch_size=None))
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.extend(it)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(200))


@differs(
    "`async for`",
    torch="none",
    ours="`async for batch in loader` never blocks the loop",
    why="trainers may be asynchronous",
)
async def test_async_for_gives_what_for_gives(ours: Any) -> None:
    """The same order, as torch's."""
    seed_everything(3)
    mine = [batch.tolist() async for batch in ours(Squares(9), 2, shuffle=True, num_workers=2)]
    assert mine == epoch(Torch(Squares(9), 2, shuffle=True, num_workers=2))


def test_this_process_has_no_torch_workers_left() -> None:
    """The instrument of this file: torch's class is torch's own."""
    assert Torch.__module__ == "torch.utils.data.dataloader"
    assert os.getpid() == multiprocessing.current_process().pid
