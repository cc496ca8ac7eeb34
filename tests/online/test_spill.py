"""What was put survives the death of the process, whenever that is, and is not made again."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import ConfigurationError, DataLoader, StateMismatchError
from asyncloader.online import Feed, FeedClosedError
from asyncloader.online.link import Request
from asyncloader.online.spill import Spill
from tests.nursery import Program

PROGRAM = """
import os, pickle, signal, sys
from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError

folder, state_at, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
feed = Feed(range(100), batch_size=2, max_samples=40, spill=folder)
loader = DataLoader(feed)
if os.path.exists(folder + "/state"):
    loader.load_state_dict(pickle.load(open(folder + "/state", "rb")))
iterator = iter(loader)
count = 0
for step in range(8):
    for _ in range(3):
        with feed.lease() as item:
            print("made", item.value, flush=True)
            if item.value % 7 == 6:
                item.drop()
            else:
                item.put(item.value)
        count += 1
        if count == kill_at:
            feed.lease().__enter__()
            os.kill(os.getpid(), signal.SIGKILL)
    feed.put_nowait(1000 + step)
    next(iterator)
    if step == state_at:
        state = loader.state_dict()
        pickle.dump(state, open(folder + "/state", "wb"))
        feed.trim(state)
"""


@pytest.mark.parametrize(("state_at", "kill_at"), [(9, 5), (2, 10), (2, 17), (0, 22), (4, 16)])
def test_a_process_that_is_killed(run: Callable[..., Program], tmp_path: Path, state_at: int, kill_at: int) -> None:
    """With a state or without: nothing that was put is made again, and all of it is trained from the state on."""
    done = run(PROGRAM, str(tmp_path), str(state_at), str(kill_at))
    assert done.returncode == -signal.SIGKILL
    made = [int(line.split()[1]) for line in done.out.splitlines()]
    assert len(made) == kill_at
    steps = (kill_at - 1) // 3  # that were finished
    has_state = state_at < steps
    trained_before = 2 * (state_at + 1) if has_state else 0

    feed = Feed(range(100), batch_size=2, max_samples=60, spill=tmp_path)
    loader = DataLoader(feed)
    if has_state:
        loader.load_state_dict(pickle.loads((tmp_path / "state").read_bytes()))
    with feed.lease() as item:
        assert item.value == max(made) + 1
    feed.close()
    left = sorted(chain(*(batch.tolist() for batch in loader)))
    put = [value for value in made if value % 7 != 6] + [1000 + step for step in range(steps)]
    assert len(left) == len(put) - trained_before
    assert set(left) <= set(put)
    assert len(set(left)) == len(left)


def test_trimming(tmp_path: Path) -> None:
    """What a saved state contains is deleted, and not what was put before a crash and is not drawn again yet."""
    feed = Feed(range(9), batch_size=1, max_samples=9, spill=tmp_path)
    state = feed.state_dict()
    for _ in range(3):
        with feed.lease() as item:
            item.put(item.value)
    feed.close()
    again = Feed(range(9), batch_size=1, max_samples=2, spill=tmp_path)
    again.load_state_dict(state)
    loader = iter(DataLoader(again))
    with pytest.raises(TimeoutError):
        _lease_within(again)  # two are recovered, and there is no room
    again.trim(again.state_dict())
    assert next(loader).tolist() == [0]
    assert next(loader).tolist() == [1]
    with pytest.raises(TimeoutError):
        _lease_within(again)  # the third one is
    assert next(loader).tolist() == [2]
    with again.lease() as item:
        assert item.value == 3
    again.trim(again.state_dict())
    assert list(tmp_path.glob("*.spill")) == []
    again.close()


def _lease_within(feed: Feed[Any]) -> None:
    request = Request()
    feed._server.call(request, "lease")
    try:
        request.result(0.3)
    finally:
        feed._server.withdraw(request)


@pytest.mark.parametrize("has_source", [False, True])
def test_samples_from_a_future_that_is_gone(tmp_path: Path, has_source: bool) -> None:
    """A run that goes on from version 1 trains what was put at version 3 as if it had been made at its own version."""

    def make() -> Feed[Any]:
        return Feed(
            range(9) if has_source else None, batch_size=1, max_samples=9, spill=tmp_path, fn=lambda s: s.version
        )

    feed = make()
    feed.version = 1
    state = feed.state_dict()
    feed.version = 3
    for number in range(2):
        if has_source:
            with feed.lease() as item:
                item.put(number)
        else:
            feed.put_nowait(number)
    feed.close()
    again = make()
    again.load_state_dict(state)
    if has_source:
        with again.lease():
            again.close()
    again.close()
    assert torch.cat(list(DataLoader(again))).tolist() == [1, 1]
    assert again.stats().ages == {0: 2}


OWNER = {"kind": "Feed", "group_size": None}


def written(folder: Path, count: int) -> Path:
    """Write so many records to a folder; return the file."""
    spill = Spill(folder, OWNER)
    for number in range(count):
        spill.write("put", number, 0, pickle.dumps(bytes(100)), 7, 1.0, 0.0)
    spill.close()
    (path,) = folder.glob("*.spill")
    return path


def test_a_record_that_is_not_whole(tmp_path: Path) -> None:
    """It was not acknowledged: those before are read."""
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    size = len(whole) // 3
    for lost in (1, size - 1, size, size + 1, size + 50):
        path.write_bytes(whole[:-lost])
        found = Spill(tmp_path, OWNER)
        assert found.numbers("put") == ([0, 1] if lost <= size else [0])
        record, samples = found.read("put", 0) or (None, None)
        assert record is not None
        assert (record.version, samples) == (7, bytes(100))
        assert found.read("put", 2) is None
        found.close()


@pytest.mark.parametrize("tail", [bytes(12), bytes(100), b"a" * 12, b"a" * 1000], ids=["0", "zeros", "a", "aaa"])
def test_what_is_no_record_at_the_end_of_a_file(tmp_path: Path, tail: bytes) -> None:
    """Zeros, or what is left of a longer record that failed: those before are read."""
    path = written(tmp_path, 1)
    path.write_bytes(path.read_bytes() + tail)
    found = Spill(tmp_path, OWNER)
    assert found.numbers("put") == [0]
    assert found.read("put", 0) is not None
    found.close()


@pytest.mark.parametrize("flipped", range(0, 8 * 205, 13))
def test_a_flipped_bit_costs_one_record(tmp_path: Path, flipped: int, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is, in the samples or before them: the other records are read, and the log says what was lost."""
    path = written(tmp_path, 3)
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    at = size + (flipped // 8) % size
    data[at] ^= 1 << flipped % 8
    path.write_bytes(data)
    found = Spill(tmp_path, OWNER)
    assert [number for number in range(3) if found.read("put", number) is not None] == [0, 2]
    assert "damaged" in caplog.text
    found.close()


@pytest.mark.parametrize("flipped", [30, 200])
def test_a_feed_goes_on_after_damage(tmp_path: Path, flipped: int) -> None:
    """It has all but the one sample, and what is put after that is not lost again."""
    feed = Feed(batch_size=1, max_samples=20, spill=tmp_path)
    for n in range(9):
        feed.put_nowait(n)
    feed.close()
    (path,) = tmp_path.glob("*.spill")
    data = bytearray(path.read_bytes())
    data[len(data) // 9 * 4 + flipped % (len(data) // 9)] ^= 255
    path.write_bytes(data)
    for added in (9, 10):
        feed = Feed(batch_size=1, max_samples=20, spill=tmp_path)
        feed.put_nowait(added)
        feed.close()
        found = [int(value) for batch in DataLoader(feed) for value in batch]
        assert found == [*(n for n in range(9) if n != 4), *range(9, added + 1)]


def test_a_folder_belongs_to_one_source(tmp_path: Path) -> None:
    """Another kind of feed is refused at once, and another source by its first item that samples were put for."""
    feed = Feed(["a", "b", "c"], batch_size=1, spill=tmp_path)
    with feed.lease() as item:
        item.put("OLD")
    feed.close()
    for other in (partial(Feed, group_size=1), partial(Feed, range(3), group_size=1), Feed):
        with pytest.raises(ConfigurationError, match="has samples of another feed: each run has a folder"):
            other(batch_size=1, spill=tmp_path)
    feed = Feed(["x", "y"], batch_size=1, spill=tmp_path)
    with pytest.raises(StateMismatchError, match=r"item 0 of the source.*Each run has a folder of its own"):
        feed.lease().wait()
    feed.close()
    again = Feed(["a", "b", "c"], batch_size=1, spill=tmp_path)
    with again.lease() as item:
        assert item.value == "b"
        item.put("NEW")
    again.close()
    assert [sample for batch in DataLoader(again) for sample in batch] == ["OLD", "NEW"]


def test_states_make_no_files(tmp_path: Path) -> None:
    """Only `trim` begins another one; and a folder is read again without its samples."""
    feed = Feed(batch_size=1, max_samples=100, spill=tmp_path)
    for n in range(50):
        feed.put_nowait(n)
        state = feed.state_dict()
    assert len(list(tmp_path.glob("*.spill"))) == 1
    for n in range(50, 53):
        feed.trim(state)
        feed.put_nowait(n)
        state = feed.state_dict()
        assert len(list(tmp_path.glob("*.spill"))) <= 2
    feed.close()
    resumed = Feed(batch_size=1, max_samples=100, spill=tmp_path)
    resumed.load_state_dict(state)
    resumed.close()
    assert [int(value) for batch in DataLoader(resumed) for value in batch] == [*range(53)]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer is told, the item is leased again, and what follows can be read."""
    feed = Feed(range(2), batch_size=1, spill=tmp_path)
    with feed.lease() as item:
        item.put("a")
    write, left = os.pwrite, [10]

    def full(file: int, data: Any, offset: int) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        count = write(file, data[: left[0]], offset)
        left[0] -= count
        return count

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"), feed.lease() as item:
        patch.setattr(os, "pwrite", full)
        item.put("b" * 100)
    with feed.lease() as item:
        assert (item.value, item.tries) == (1, 1)
        item.put("c")
    feed.close()
    again = Feed(range(2), batch_size=1, spill=tmp_path)
    with pytest.raises(Exception, match="the source has ended"), again.lease():
        pass
    assert list(DataLoader(again)) == [["a"], ["c"]]
    again.close()


def test_trimming_keeps_what_a_state_needs_that_was_taken_long_before(tmp_path: Path) -> None:
    """Saving takes time: meanwhile items that were recovered are trained, and other states taken."""
    new = partial(Feed, range(20), batch_size=2, max_samples=4, spill=tmp_path)
    feed = new()
    begun = feed.state_dict()
    batches = iter(DataLoader(feed))
    for number in range(10):
        with feed.lease() as item:
            item.put(item.value)
        if number % 2:
            next(batches)
    feed.close()
    feed = new()
    feed.load_state_dict(begun)
    loader = DataLoader(feed)
    batches = iter(loader)
    with pytest.raises(TimeoutError):
        _lease_within(feed)  # four are recovered
    trained = next(batches).tolist()
    state = loader.state_dict()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            _lease_within(feed)
        trained += next(batches).tolist()
    loader.state_dict()
    feed.trim(state)
    feed.close()
    feed.trim(state)  # which does nothing: the folder may be another one's
    feed = new()
    loader = DataLoader(feed)
    loader.load_state_dict(state)
    batches, left = iter(loader), []
    for _ in range(4):
        with pytest.raises(TimeoutError):
            _lease_within(feed)
        left += next(batches).tolist()
    assert sorted(trained[:2] + left) == list(range(10))
    with feed.lease() as item:
        assert item.value == 10
    feed.close()


def test_a_sample_that_is_put_before_the_state_is_loaded(tmp_path: Path) -> None:
    """It is in the folder, and has a number of its own, also if those of the state were deleted.

    The state of a run with another folder may have more samples: it is refused.
    """
    feed = Feed(batch_size=1, max_samples=8, spill=tmp_path / "one")
    for n in range(4):
        feed.put_nowait(n)
    loader = DataLoader(feed)
    assert next(iter(loader)).tolist() == [0]
    state = loader.state_dict()
    feed.trim(state)
    feed.close()
    for _ in range(2):  # the second one has what the first one was given before it was killed
        feed = Feed(batch_size=1, max_samples=8, spill=tmp_path / "one")
        feed.put_nowait(9)
        feed.close()
    loader = DataLoader(feed)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[1], [2], [3], [9], [9]]
    other = Feed(batch_size=1, max_samples=8, spill=tmp_path / "other")
    other.put_nowait(9)
    with pytest.raises(StateMismatchError, match="1 that wait are not in the state, and would be lost"):
        other.load_state_dict(feed.state_dict())
    other.close()


def test_files_have_new_numbers_after_all_of_them_were_deleted(tmp_path: Path) -> None:
    """An earlier state does not delete them."""
    feed = Feed(batch_size=1, spill=tmp_path)
    early = feed.state_dict()
    for number in range(3):
        feed.put_nowait(number)
        late = feed.state_dict()
    feed.trim(late)
    late = feed.state_dict()
    feed.trim(late)
    assert list(tmp_path.glob("*.spill")) == []
    feed.close()
    feed = Feed(batch_size=1, spill=tmp_path)
    feed.load_state_dict(late)
    feed.put_nowait(3)
    feed.trim(early)
    feed.trim(late)
    assert len(list(tmp_path.glob("*.spill"))) == 1
    feed.close()


def test_a_lease_that_is_dropped_after_the_end_writes_nothing(tmp_path: Path) -> None:
    """The folder may be another feed's by then."""
    feed = Feed(range(4), batch_size=1, spill=tmp_path)
    item = feed.lease().__enter__()
    feed.close()
    with Feed(range(4), batch_size=1, spill=tmp_path) as other:
        with pytest.raises(FeedClosedError):
            item.drop()
        assert list(tmp_path.glob("*.spill")) == []
        with other.lease() as again:
            again.put("x")


def test_a_folder_is_one_feeds(tmp_path: Path) -> None:
    """Another feed is refused, in this process and in another one, until it is closed; forks do not hold the folder."""
    feed = Feed(batch_size=1, spill=tmp_path)
    with pytest.raises(ConfigurationError, match="another feed spills to"):
        Feed(batch_size=1, spill=tmp_path)
    script = f"from asyncloader.online import Feed; Feed(batch_size=1, spill={str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "ConfigurationError: another feed spills to" in done.stderr
    started, ended = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(started[1], b"x")
        os.close(ended[1])
        os.read(ended[0], 1)  # it lives while the folder changes hands
        os._exit(0)
    try:
        os.read(started[0], 1)
        feed.close()
        Feed(batch_size=1, spill=tmp_path).close()
    finally:
        for end in (*started, *ended):
            os.close(end)
        os.waitpid(child, 0)
    assert issubclass(ConfigurationError, ValueError)
