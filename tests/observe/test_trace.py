"""Timelines: what is in the file, and that it is whole whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.engine.finisher import Finisher
from asyncloader.loops import GuardedLoop
from asyncloader.observe.trace import shared_trace
from asyncloader.run.worker_iterator import WorkerIterator
from tests.support import inside
from tests.support.forks import forked
from tests.support.loads import Load
from tests.support.nursery import Program
from tests.support.pins import pins


def read(path: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the slices of each track by its name, and all events."""
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    return tracks, events


def ends(slice_: dict[str, Any]) -> float:
    return slice_["ts"] + slice_["dur"]


@pytest.mark.parametrize("face", ["for", "async for"])
def test_timeline_of_a_run(tmp_path: Path, face: str) -> None:
    """Each batch is sent, made by its worker, received and taken, in this order; slices nest or follow."""
    path = tmp_path / "run.json"
    loader = DataLoader(Load(8 * 200, 0.0002), 8, num_workers=2, trace=str(path))

    async def run() -> None:
        async for _ in loader:
            await asyncio.sleep(0.0005)

    if face == "for":
        for _ in loader:
            time.sleep(0.0005)
    else:
        asyncio.run(run())
    tracks, _ = read(path)
    assert set(tracks) == {"consumer", "channel", "worker 0", "worker 1"}
    place = {(slice_["name"], slice_["args"].get("batch")): slice_ for track in tracks.values() for slice_ in track}
    for number in range(200):
        sent, received, taken = (place[name, number] for name in ("send", "receive", "take"))
        made = place[f"batch {number}", number]
        assert made in tracks[f"worker {number % 2}"]
        assert sent["ts"] <= made["ts"] < ends(made) <= ends(received) <= taken["ts"]
        parts = [place[name, number] for name in ("fetch", "collate", "encode")]
        assert sum(part["dur"] for part in parts) == pytest.approx(made["dur"], abs=4)
    for name in ("consumer", "worker 0", "worker 1"):
        outer = [slice_ for slice_ in tracks[name] if slice_["name"] not in ("fetch", "collate", "encode")]
        outer.sort(key=lambda slice_: slice_["ts"])
        assert all(ends(one) <= other["ts"] + 0.3 for one, other in itertools.pairwise(outer))
    training = sum(slice_["dur"] for slice_ in tracks["consumer"] if slice_["name"] == "train")
    assert training * 1e-6 == pytest.approx(loader.stats().training_s, rel=0.02)


def test_all_runs_of_a_loader_are_in_one_file(tmp_path: Path) -> None:
    """Epochs follow one another, and a run that is broken off is there as far as it went."""
    path = tmp_path / "run.json"
    loader = DataLoader(Load(80), 8, num_workers=1, trace=path)
    for _ in range(2):
        for _ in loader:
            pass
    with iter(loader) as batches:
        next(batches)
    tracks, events = read(path)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["epoch 0", "epoch 1", "epoch 2"]
    assert sum(slice_["name"] == "take" for slice_ in tracks["consumer"]) == 21


def test_loaders_that_name_one_file_share_it(tmp_path: Path) -> None:
    """As those for training and validation do; whoever names it after they have gone writes it anew."""
    path = tmp_path / "run.json"

    def takes() -> int:
        return sum(event["name"] == "take" for event in json.loads(path.read_text()))

    train, validation = (DataLoader(range(count), 2, num_workers=1, trace=str(path)) for count in (2000, 20))
    for _ in range(2):
        for loader in (train, validation):
            for _ in loader:
                pass
    assert takes() == 2 * (1000 + 10)
    del train, validation, loader
    for _ in DataLoader(range(20), 2, trace=path):
        pass
    assert takes() == 10


def test_loaders_with_workers_and_without_share_a_file(tmp_path: Path) -> None:
    """Each has tracks of its own for what makes its batches."""
    path = tmp_path / "part.json"
    here, there = DataLoader(Load(80), 8, trace=path), DataLoader(Load(40), 8, num_workers=1, trace=path)
    assert len(list(here)) == 10
    assert len(list(there)) == 5
    tracks, _ = read(path)
    assert set(tracks) == {"consumer", "channel", "this process", "worker 0"}
    assert sum(slice_["name"] == "take" for slice_ in tracks["consumer"]) == 15


class Awaits(Load):
    """Samples that are awaited."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.001 * (1 + index % 7))
        return self.sample


def test_batches_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    """A worker that fetches several batches at once has a track for each, on which nothing overlaps."""
    for _ in DataLoader(Awaits(160), 4, num_workers=1, concurrency=16, trace=tmp_path / "run.json"):
        pass
    tracks, _ = read(tmp_path / "run.json")
    lanes = [name for name in tracks if name.startswith("worker 0")]
    assert len(lanes) >= 3
    for name in lanes:
        batches = sorted(
            (slice_ for slice_ in tracks[name] if slice_["name"].startswith("batch")), key=lambda slice_: slice_["ts"]
        )
        assert all(ends(one) <= other["ts"] + 0.3 for one, other in itertools.pairwise(batches))
    assert sum(slice_["name"] == "fetch" for name in lanes for slice_ in tracks[name]) == 40


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_closed_loader_has_written_what_was_taken(num_workers: int, tmp_path: Path) -> None:
    """Also of a run that was left by `break`, which has no iterator any more."""
    path = tmp_path / "trace.json"
    loader = DataLoader(range(8), num_workers=num_workers, trace=path)  # type: ignore[arg-type]
    for number in loader:
        if number == 2:
            break
    loader.close()
    assert sum(event["name"] == "take" for event in json.loads(path.read_text())) == 3


class Pinning(WorkerIterator[Any]):
    """Batches that are copied as pinning does."""

    def _make_finisher(self, loop: GuardedLoop) -> Finisher:
        return pins(loop, lambda batch: batch.clone())


def test_the_pin_thread_has_a_track(tmp_path: Path) -> None:
    """Copies into page-locked memory are on a track of their own."""
    loader = DataLoader(Load(80), 8, num_workers=1, trace=tmp_path / "run.json")
    with inside.iterator_of(Pinning, loader) as batches:
        assert len(list(batches)) == 10
    tracks, _ = read(tmp_path / "run.json")
    assert [slice_["args"]["batch"] for slice_ in tracks["pin thread"]] == list(range(10))


FULL = """
import json, logging, resource, signal, sys
from pathlib import Path
from asyncloader import DataLoader
from tests.support.loads import Load
logging.basicConfig()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # the kernel then refuses as a full disk does
print(sum(1 for _ in DataLoader(Load(4000), 1, num_workers=2, trace=sys.argv[1])))
print(len(json.loads(Path(sys.argv[1]).read_text())) > 500)
"""


def test_a_file_that_cannot_grow_does_not_stop_training(run: Callable[..., Program], tmp_path: Path) -> None:
    """All batches come; one warning says where the timeline ends; what was written before is whole."""
    done = run(FULL, tmp_path / "run.json")
    assert done.out == "4000\nTrue\n", done.explain("")
    assert done.err.count("ends here, the training goes on: [Errno 27]") == 1
    assert len(done.err.splitlines()) == 1


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """At the beginning it is more likely a misspelling than a full disk."""
    with pytest.raises(FileNotFoundError):
        iter(DataLoader(Load(8), 8, trace=tmp_path / "nowhere" / "run.json"))


def test_a_fork_while_another_thread_makes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child makes its own, and does not wait for a thread that it does not have."""
    began, may_go_on = threading.Event(), threading.Event()
    write_bytes, main = Path.write_bytes, os.getpid()

    def slow(path: Path, data: bytes) -> int:
        if os.getpid() == main:
            began.set()
            may_go_on.wait()
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", slow)

    def child() -> None:
        signal.alarm(10)
        shared_trace(tmp_path / "child.json", Load(1))

    thread = threading.Thread(target=shared_trace, args=(tmp_path / "run.json", Load(1)))
    thread.start()
    try:
        assert began.wait(10)
        assert forked(child).wait() == 0
    finally:
        may_go_on.set()
        thread.join()
