"""The place of a worker in its stream, when its batches are done with in any order."""

from __future__ import annotations

import copy
import random
from collections import deque

from asyncloader.engine.tracks import History, Track
from asyncloader.messages.snapshot import Frozen, Made, Untold, WorkerStart, as_plain, from_plain


def test_the_place_is_before_the_first_that_is_missing() -> None:
    """It advances when that one comes, over all that came ahead of it, to the last snapshot among these."""
    track = Track(WorkerStart())
    for batch in (0, 2, 4, 6):
        track.given(batch)
    assert track.answered(4, "after 2") == 2
    assert track.answered(2, "after 1") == 1
    assert track.start == WorkerStart(0, None, (1, 2))
    assert repr(track) == "<Track first=0 ahead=[1, 2] given={0: 0, 6: 3}>"
    assert track.answered(0, None) == 0
    assert track.start == WorkerStart(0, "after 2")
    assert track.answered(6, None) == 3
    assert track.start == WorkerStart(1, "after 2")


def test_what_is_given_again_takes_what_is_missing() -> None:
    """And never what is done with, whether that was ahead, or has been passed since."""
    track = Track(WorkerStart(2, "s", (1, 4)))
    for batch in range(4):
        track.given(batch)
    assert [track.answered(batch, None) for batch in (3, 1)] == [5, 2]
    assert track.start == WorkerStart(2, "s", (1, 2, 4, 5))
    track.forget_given()
    track.given(0)
    assert track.answered(0, None) == 0
    track.given(2)
    track.given(4)
    assert [track.answered(batch, None) for batch in (4, 2)] == [6, 3]
    assert track.start == WorkerStart(9, "s")


def test_batches_that_were_not_given_are_done_with_as_they_come() -> None:
    """Map-style datasets have no next batch."""
    track = Track(WorkerStart())
    assert track.answered(7, None) == -1
    assert track.answered(3, "s") == -1
    track.done(-1, None)
    assert track.start == WorkerStart(1, "s")


def test_gaps_are_what_lies_before_each_batch_that_is_made() -> None:
    """Held against a plain list, for random places."""
    assert WorkerStart(3).gaps() == [3]
    assert WorkerStart(3, None, (2, 3, 6)).gaps() == [3, 0, 2, 0, 1]
    chance = random.Random(1)
    for _ in range(200):
        ahead = sorted(chance.sample(range(1, 30), chance.randrange(20)))
        start = WorkerStart(chance.randrange(3), None, ahead)
        gaps, at, made = deque(start.gaps()), 0, []
        for _ in range(40):
            at += gaps.popleft() if gaps else 0
            made.append(at)
            at += 1
        missing = [number for number in range(80) if number not in ahead]
        assert made == [start.batches + number for number in missing[:40]]


def test_places_are_written_as_json_if_that_says_all() -> None:
    """And as they are otherwise."""
    starts = {0: WorkerStart(1, {"at": 3}, (1, 5)), 1: WorkerStart(made=(Made((7, 0, 0), 4, [2, 9]),))}
    written = as_plain({**starts, 0: WorkerStart(1, Frozen({"at": 3}), (1, 5))})
    assert written == '[[1, {"at": 3}, [1, 5], [], []], [0, null, [], [[[7, 0, 0], 4, [2, 9]]], []]]'
    assert from_plain(written) == starts
    unusual = {0: WorkerStart(1, {"iterator": {0: 3}}, (1, 5)), 1: WorkerStart()}
    assert as_plain(unusual) == [[1, {"iterator": {0: 3}}, [1, 5], [], []], [0, None, [], [], []]]
    assert from_plain(as_plain(unusual)) == unusual
    strange_keys = {0: WorkerStart(0, {"at": 3}, (), (Made((7, 0, 0), 4, ("a", 2)),))}
    assert from_plain(as_plain(strange_keys)) == strange_keys


def test_a_long_history_is_no_burden() -> None:
    """A copy costs nothing, keeps what it had, and what was made is in order, however much there is."""
    history = History(WorkerStart(made=(Made((1, 2, 3), 0, [0]),)), (1, 2, 3), overlaps=False)
    kept = []
    for number in range(1, 50_000):
        if number % 10_000 == 0:
            kept.append(copy.copy(history))
        history.done(number, None, [number])
    assert [made.batch for made in history.start.made] == list(range(50_000))
    assert [len(each.start.made) for each in kept] == [10_000, 20_000, 30_000, 40_000]
    history.done(50_000, Frozen({"dataset": 1}))
    assert history.start.made == ()


def test_what_nobody_knows_is_not_made_again() -> None:
    """After a state that could not be taken nothing is, until the next one was taken."""
    history = History(WorkerStart(made=(Made((1, 2, 3), 0, [0]),)), (1, 2, 3), overlaps=False)
    history.done(1, None, [1])
    history.done(2, Untold("it raised"))
    history.done(3, None, [3])
    assert history.start == WorkerStart()
    state = Frozen({"dataset": 1})
    history.done(4, state)
    history.done(5, None, [5])
    assert history.start == WorkerStart(0, state, made=(Made((1, 2, 3), 5, [5]),))


def test_where_batches_overlap_the_latest_state_stands_for_itself() -> None:
    """Whichever is told last; what was made after it is not told, for some of that is in it."""
    first, second = Frozen({"dataset": 1}), Frozen({"dataset": 2})
    first.taken_at, second.taken_at = 1.0, 2.0
    for overlaps, kept in ((True, second), (False, first)):
        history = History(WorkerStart(), (1, 2, 3), overlaps=overlaps)
        history.done(1, second)
        history.done(0, first)
        history.done(2, None, [2])
        assert history.start == WorkerStart(0, kept, made=() if overlaps else (Made((1, 2, 3), 2, [2]),))
    history = History(WorkerStart(), (1, 2, 3), overlaps=True)
    history.done(0, first)
    history.done(1, second)
    assert history.start == WorkerStart(0, second)
