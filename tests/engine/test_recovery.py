"""What becomes of workers that are lost, decided without any: events in, actions out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from asyncloader import DataLoader
from asyncloader.engine.actions import Ticket, Vacate
from asyncloader.engine.recovery import Overdue, Recovery
from asyncloader.errors import BatchTimeoutError, WorkerDiedError, WorkerStartError
from asyncloader.messages.snapshot import Frozen, WorkerStart
from asyncloader.options import Options
from tests.support import deciders, inside


class Stream(IterableDataset[int]):
    """A stream that tells nothing of itself; its workers may tell their places in it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Repeatable(Stream):
    """Can be read again from the beginning."""

    deterministic = True


class Stateful(Stream):
    """Tells its state, also before anything is read."""

    def state_dict(self) -> dict[str, int]:
        """Say nothing."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin anew."""


def of(dataset: Any = range(100), **chosen: Any) -> Options:
    """Return the options of a loader."""
    return inside.options(DataLoader(dataset, **{"num_workers": 2, "timeout": 60, **chosen}))


MAP = of()
STREAM = of(Stream())
STATEFUL = of(Stateful())
LEAVES_OUT = of(Stream(), on_crash="skip")
TOLD = WorkerStart(2, Frozen({"at": 2}))
KEYS = [1, 2]


@dataclass
class Gone:
    """What is known of a worker."""

    worker_id: int = 0
    pid: int = 99
    exitcode: int | None = -9
    output: bytearray = field(default_factory=bytearray)
    is_ready: bool = True
    is_telling: bool = True
    why_no_other: Exception | None = None
    is_alive: bool = False
    started_at: float = 0.0

    def ask_stack(self, batch: int, tell: Any) -> None:
        """Nobody asks here."""


def lose(recovery: Recovery, process: Gone | None = None, start: WorkerStart | None = None) -> Vacate:
    """A worker dies, which is no reason to give up."""
    (action,) = recovery.died(process or Gone(), start, is_active=True)
    assert isinstance(action, Vacate)
    return action


def overdue(options: Options, process: Gone | None = None, start: WorkerStart | None = None, **found: Any) -> Any:
    """The awaited batch has not come in time; return what is decided."""
    facts = {"timeout_s": 1.0, "stack": "at line 3", "age_s": 5.0, "is_held": True, "may_replace": True, **found}
    ticket = Ticket(7, KEYS, worker=0, tries=1)
    return Recovery(options).overdue(Overdue(ticket=ticket, process=process or Gone(), **facts), start)


def test_a_worker_that_died_is_replaced_at_once_and_named() -> None:
    """The error is made where tickets are given up, and says which."""
    action = lose(Recovery(MAP))
    assert action == Vacate(0, action.cause)
    error = action.cause([Ticket(0, KEYS, tries=2)])
    assert isinstance(error, WorkerDiedError)
    assert "SIGKILL" in str(error)
    assert "1, 2" in str(error)


def test_each_death_is_logged_though_no_batch_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """With what the worker said last."""
    lose(Recovery(MAP), Gone(output=bytearray(b"free(): invalid pointer")))
    (record,) = caplog.records
    assert "SIGKILL" in record.message
    assert "invalid pointer" in record.message


def test_one_that_was_not_ready_had_begun_with_nothing() -> None:
    """The scheduler blames no ticket for it."""
    assert not lose(Recovery(MAP), Gone(is_ready=False)).was_ready


@pytest.mark.parametrize("start", [None, WorkerStart()])
def test_one_that_was_not_ready_is_replaced_in_any_stream(start: WorkerStart | None) -> None:
    """It had read nothing: another one that begins there is exact."""
    recovery = Recovery(LEAVES_OUT)
    assert lose(recovery, Gone(is_ready=False), start).replaceable
    assert not recovery.has_lost_for_good


@given(num_workers=st.integers(1, 8), losses=st.integers(1, 40))
def test_a_storm_backs_off_and_an_outcome_ends_it(num_workers: int, losses: int) -> None:
    """One loss for each worker and two more are calm; then each rest is twice the last, a second at most."""
    recovery = Recovery(deciders.options(num_at_start=num_workers))
    rests = [lose(recovery).rest_s for _ in range(losses)]
    calm = num_workers + 2
    assert rests[:calm] == [0.0] * min(calm, losses)
    assert rests[calm:] == [min(0.02 * 2.0**k, 1.0) for k in range(losses - calm)]
    recovery.reset()
    assert [lose(recovery).rest_s for _ in range(calm + 1)] == [0.0] * calm + [0.02]


@given(num_workers=st.integers(1, 8), ready_after=st.integers(0, 6))
def test_workers_that_never_come_up_end_it(num_workers: int, ready_after: int) -> None:
    """So many in a row, counted anew when one has opened the dataset."""
    recovery = Recovery(deciders.options(num_at_start=num_workers))
    for _ in range(min(ready_after, num_workers + 2)):
        lose(recovery, Gone(is_ready=False))
    recovery.ready(0)
    for _ in range(num_workers + 2):
        lose(recovery, Gone(is_ready=False))
    ((what, error),) = recovery.died(Gone(is_ready=False, output=bytearray(b"boom")), None, is_active=True)
    assert what == "give up"
    assert isinstance(error, WorkerStartError)
    assert f"({num_workers + 3} in a row)" in str(error)
    assert "boom" in str(error)


def test_one_that_could_not_be_set_up_ends_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every other would end in the same way. It is an error, and no death."""
    gone = Gone(why_no_other=WorkerStartError("no such module"), is_ready=False, exitcode=1)
    assert Recovery(MAP).died(gone, None, is_active=True) == [("give up", gone.why_no_other)]
    assert not caplog.records


def test_one_that_was_to_join_and_ends_at_its_start_is_tried_again() -> None:
    """Later each time, while others do its work. Where there are none, so many in a row end the run."""
    recovery = Recovery(deciders.options(num_at_start=2))
    asked: Any = {"is_active": False, "is_coming": True}
    rests = [
        recovery.died(Gone(is_ready=False), None, is_alone=False, **asked)  # type: ignore[arg-type]
        for _ in range(15)
    ]
    assert [action for _, action in rests] == [("start", 0, min(0.02 * 2.0**count, 60.0)) for count in range(15)]
    assert isinstance(lose(recovery), Vacate)  # the death of a worker that is at work does not count with these
    for _ in range(5):
        ((what, *_),) = recovery.died(Gone(is_ready=False), None, is_alone=True, **asked)  # type: ignore[arg-type]
    assert what == "give up"
    recovery.ready(0)
    assert recovery.died(Gone(is_ready=False), None, is_alone=True, **asked) == [("start", 0, 0.02)]  # type: ignore[arg-type]


def test_a_process_that_the_system_has_no_room_for() -> None:
    """Others go on without it. What nobody else can do waits for it, and some time later ends the run."""
    error = OSError("no room")
    recovery = Recovery(deciders.options(num_at_start=2))
    assert recovery.not_launched(1, error, is_active=True, is_alone=False) == [("leave", 1), ("start", 1, 0.02)]
    assert recovery.not_launched(1, error, is_active=True, is_alone=True) == [("start", 1, 0.04)]
    assert recovery.not_launched(1, error, is_active=False, is_alone=True) == [("start", 1, 0.08)]
    for _ in range(27):
        (later,) = recovery.not_launched(1, error, is_active=False, is_alone=True)
    assert later == ("start", 1, 1.0)
    assert recovery.not_launched(1, error, is_active=False, is_alone=True) == [("give up", error)]


@pytest.mark.parametrize(
    ("options", "start", "replaceable"),
    [
        (MAP, None, True),
        (STREAM, WorkerStart(), False),
        (STREAM, TOLD, True),
        (STATEFUL, WorkerStart(), True),
        (LEAVES_OUT, TOLD, False),
        (of(Repeatable(), on_crash="skip"), TOLD, False),
        (of(Repeatable()), WorkerStart(), True),
    ],
)
def test_who_can_be_replaced(options: Options, start: WorkerStart | None, replaceable: bool) -> None:
    """A worker of a stream only where another one can begin where it was; the loader begins no further run else."""
    recovery = Recovery(options)
    action = lose(recovery, start=start)
    assert action.replaceable is replaceable
    assert recovery.has_lost_for_good is not replaceable
    told = str(action.cause([Ticket(0, KEYS)]))
    advice = "state_dict" if options.on_crash != "skip" else '"retry" makes the batch again'
    assert (advice in told) is not replaceable
    assert action.rest_s == 0.0
    filled = Recovery(options).fill(Gone(1), start)
    assert (filled == [("replace", 1, 0.0)]) is replaceable
    assert isinstance(filled[0], Vacate) is not replaceable


@pytest.mark.parametrize(("options", "has_lost"), [(MAP, False), (STREAM, True), (STATEFUL, False)])
def test_one_that_dies_at_the_end_of_its_data_is_missed_by_later_runs_only(options: Options, has_lost: bool) -> None:
    """These are impossible where nobody knows what the dataset had kept."""
    recovery = Recovery(options)
    assert recovery.died(Gone(1), WorkerStart(), is_active=False) == []
    assert recovery.has_lost_for_good is has_lost


def test_no_worker_begins_a_later_run_in_the_place_of_another() -> None:
    """Unless that one has told a state in it: what its dataset had kept over the runs is lost."""
    recovery = Recovery(STATEFUL)
    recovery.is_first_run = False
    assert lose(recovery, start=TOLD).replaceable
    action = lose(recovery, start=WorkerStart())
    assert not action.replaceable
    assert recovery.has_lost_for_good
    assert "given no state of its iterable dataset in this epoch" in str(action.cause([Ticket(0, KEYS)]))
    assert [type(action) for action in recovery.fill(Gone(1), WorkerStart())] == [Vacate]


# ----------------------------------------------------------------------------------------------------------- hangs


def test_a_timeout_is_raised_with_the_stack() -> None:
    """Nothing is killed."""
    error = overdue(MAP)
    assert isinstance(error, BatchTimeoutError)
    assert "at line 3" in str(error)
    assert "1, 2" in str(error)


@pytest.mark.parametrize("on_timeout", ["raise", "retry", "skip"])
@pytest.mark.parametrize(
    ("what", "waits", "timeout_s", "silent_s"),
    [
        ("it has just been made", True, 0.5, 0.1),
        ("the machine is busy", True, 0.5, 59.0),
        ("it has twice the timeout", True, 100.0, 199.0),
        ("nothing comes of it", False, 0.5, 60.0),
    ],
)
def test_a_batch_that_no_worker_has(what: str, waits: bool, timeout_s: float, silent_s: float, on_timeout: Any) -> None:
    """Nobody hangs: the consumer waits on where hung workers would be replaced, but not for ever."""
    recovery = Recovery(of(on_timeout=on_timeout))
    assert recovery.waits_on(timeout_s, silent_s) is (waits and on_timeout != "raise")


@pytest.mark.parametrize("on_timeout", ["raise", "retry", "skip"])
@pytest.mark.parametrize(
    ("is_ready", "age_s", "timeout_s", "is_late"),
    [(False, 60.0, 0.5, True), (False, 59.0, 0.5, False), (False, 99.0, 100.0, False), (True, 99.0, 0.5, False)],
)
def test_a_worker_that_starts_for_too_long(
    is_ready: bool, age_s: float, timeout_s: float, is_late: bool, on_timeout: Any
) -> None:
    """It has a minute, or the timeout; only where hung workers are replaced it is killed."""
    recovery = Recovery(of(on_timeout=on_timeout))
    assert recovery.starts_too_long(Gone(is_ready=is_ready), timeout_s, age_s) is (is_late and on_timeout != "raise")


@pytest.mark.parametrize("on_timeout", ["retry", "skip"])
def test_a_hung_worker_is_killed_and_lost(on_timeout: Any) -> None:
    """In this order; the error says how often it was tried."""
    discard, lose = overdue(of(on_timeout=on_timeout))
    assert discard == ("discard", 0)
    assert (lose.worker, lose.hung, lose.replaceable, lose.rest_s) == (0, True, True, 0.0)
    assert isinstance(lose.cause([Ticket(7, KEYS, worker=0, tries=3)]), BatchTimeoutError)


def test_hangs_back_off_as_deaths_do() -> None:
    """They count together."""
    recovery = Recovery(of(num_workers=1, on_timeout="retry"))
    for _ in range(3):
        lose(recovery)
    decided = recovery.overdue(Overdue(1.0, Ticket(0, KEYS), Gone(), "", 5.0, True, True), None)
    assert not isinstance(decided, BatchTimeoutError)
    assert isinstance(decided[1], Vacate)
    assert decided[1].rest_s == 0.02


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("it has come meanwhile", {"is_held": False}),
        ("it is still opening the dataset", {"process": Gone(is_ready=False), "age_s": 59.0}),
        ("it has as long as the timeout", {"process": Gone(is_ready=False), "age_s": 99.0, "timeout_s": 100}),
    ],
)
def test_nothing_is_done_where_waiting_helps(what: str, found: dict[str, Any]) -> None:
    """The consumer waits on."""
    assert overdue(of(on_timeout="retry"), **found) == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (MAP, {"may_replace": False}),
        (of(Stream(), on_timeout="retry"), {"start": WorkerStart()}),
        (of(Stream(), on_timeout="skip"), {"start": TOLD}),
    ],
)
def test_one_that_cannot_be_replaced_is_not_killed(options: Options, found: dict[str, Any]) -> None:
    """The error is raised, and says so where it is about a stream."""
    error = overdue(options, **found)
    assert isinstance(error, BatchTimeoutError)
    assert bool(getattr(error, "__notes__", [])) is options.is_iterable
