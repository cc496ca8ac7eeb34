"""Workers of agents, from the loader's side: agents are processes of this machine, everything else is as with Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import BatchTimeoutError, ConfigurationError, DataLoader, WorkerDiedError
from asyncloader.errors import WorkerStartError
from asyncloader.ray import fleet as module
from asyncloader.ray.handshake import new_secret
from tests import inside
from tests.patience import wait_until
from tests.ray.local_agents import LocalAgents

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTH = 60


class Drawing(Dataset[Any]):
    """Samples with random numbers of all three generators, large and small, and who made them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        large = torch.full((100, 100), torch.rand(()).item())
        return {"i": index, "t": torch.rand(3), "n": np.random.rand(), "r": random.random(), "large": large} | {
            "text": f"sample {index}",
            "by": [info.id, os.getpid()],
        }


class Awaited(Drawing):
    """The same, awaited, and without the global generators."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return {"i": index, "t": torch.full((3,), float(index)), "by": [0, os.getpid()]}


class Told(Dataset[Any]):
    """Does something the first time that an index is asked for, as a file says that is not there then."""

    def __init__(self, folder: Path, index: int, does: Callable[[], None]) -> None:
        self.marker, self.index, self.does = folder / "done", index, does

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if index == self.index and not self.marker.exists():
            self.marker.touch()
            self.does()
        return index


def bits(batch: Any) -> Any:
    """What must be the same, whoever made the batch."""
    same = [value for name, value in batch.items() if name != "by"]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in same]


def run_of(loader: Any, epochs: int = 1) -> list[Any]:
    torch.manual_seed(3)
    batches = [batch for _ in range(epochs) for batch in loader]
    loader.close()
    return batches


def local(dataset: Any = None, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of one local worker."""
    return [bits(batch) for batch in run_of(DataLoader(dataset or Drawing(), 4, num_workers=1, **options), epochs)]


class Endless(Dataset[int]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> int:
        return index


def wait_for(iterator: Iterator[Any], is_so: Callable[[], bool]) -> None:
    """Take batches until something is so."""

    def look() -> bool:
        next(iterator)
        return is_so()

    wait_until(look)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for_workers(loader: Any, count: int) -> None:
    """Wait until so many take batches."""
    wait_until(lambda: loader.stats().num_workers == count)


@pytest.mark.parametrize(("num_workers", "scheduling"), [(0, "static"), (1, "dynamic")])
def test_the_batches_are_those_of_local_workers(num_workers: int, scheduling: Any) -> None:
    """Bit for bit: of agents alone, and beside a local worker."""
    agents = LocalAgents(1, 2)
    options: Any = {"shuffle": True, "scheduling": scheduling}
    loader = DataLoader(Drawing(), 4, num_workers=num_workers, worker_backend=agents, **options)
    batches = run_of(loader)
    assert [bits(batch) for batch in batches] == local(**options)
    makers = {batch["by"][1][0].item() for batch in batches}
    assert os.getpid() not in makers
    assert loader.stats().faults.retries == 0


def test_both_make_some() -> None:
    """Agents join a run that local workers have begun; theirs are the ids behind the room for those."""
    agents = LocalAgents(2)
    loader = DataLoader(Drawing(), 1, num_workers=1, worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    seen = [next(iterator)]
    wait_for_workers(loader, 3)
    seen += iterator
    first = agents._first_id(inside.options(loader))
    assert {batch["by"][0].item() for batch in seen} == {0, first, first + 1}
    assert [batch["i"].item() for batch in seen] == list(range(LENGTH))
    stats, node = loader.stats(), os.uname().nodename
    assert [worker.node for worker in stats.workers.each] == ["", node, node]
    assert f"node {node}: {sum(worker.batches for worker in stats.workers.each[1:])} batches by 2 workers" in str(stats)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_persistent_workers_make_all_epochs(num_workers: int) -> None:
    """Those of agents are the same processes in each, also where there are no others."""
    agents = LocalAgents(1)
    options: Any = {"shuffle": True, "persistent_workers": True, "prefetch_factor": 3}
    loader = DataLoader(Drawing(), 4, num_workers=num_workers, worker_backend=agents, **options)
    batches = run_of(loader, epochs=3)
    assert [bits(batch) for batch in batches] == local(epochs=3, **options)
    assert len(agents.launchers) == 1


def test_async_datasets_and_async_for() -> None:
    """Samples overlap in workers of agents too."""

    async def run() -> list[Any]:
        torch.manual_seed(3)
        loader = DataLoader(Awaited(), 4, shuffle=True, worker_backend=LocalAgents(2))
        return [bits(batch) async for batch in loader]

    assert asyncio.run(run()) == local(Awaited(), shuffle=True)


class Whims:
    """A controller that looks at each batch, and wants another number here and elsewhere each time."""

    def __init__(self, numbers: list[tuple[int, int]]) -> None:
        self.numbers = numbers
        self.num_workers, self.most_here = 2, 2
        self.due = 0.0
        self.reason = "a whim"

    def begin_run(self) -> None: ...

    def observe(self, load: Any) -> None:
        self.most_here, elsewhere = self.numbers[load.made % len(self.numbers)]
        self.num_workers = self.most_here + elsewhere

    def limit(self, count: int) -> None:
        self.num_workers = count


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_the_batches_do_not_depend_on_a_number_that_looks_after_itself(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the controller wants of this machine and of others, at every batch; also where another run begins."""
    whims = Whims([(2, 3), (1, 1), (3, 4), (2, 0), (1, 4)])
    monkeypatch.setattr("asyncloader.run.workplace.Controller", lambda *args, **kwargs: whims)
    options: Any = {"shuffle": True, "persistent_workers": persistent}
    loader = DataLoader(Drawing(), 1, num_workers="auto", worker_backend=LocalAgents(2, 2, grows=True), **options)
    batches = run_of(loader, epochs=2)
    reference = run_of(DataLoader(Drawing(), 1, num_workers=1, **options), epochs=2)
    assert [bits(batch) for batch in batches] == [bits(batch) for batch in reference]
    assert loader.stats().faults.retries == 0


def test_a_number_that_looks_after_itself_asks_for_others_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loader.num_workers` is that of this machine; what was found elsewhere is for the next run."""
    wanted = [(1, 3)]
    whims = Whims(wanted)
    monkeypatch.setattr("asyncloader.run.workplace.Controller", lambda *args, **kwargs: whims)
    agents = LocalAgents(2, 2, grows=True)
    loader = DataLoader(Endless(), 1, num_workers="auto", worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    wait_for(iterator, lambda: loader.stats().num_workers == 4)
    assert (int(loader.num_workers), inside.runs(loader).num_on_nodes) == (1, 3)
    wanted[0] = (2, 1)
    wait_for(iterator, lambda: loader.stats().num_workers == 3)
    wait_until(lambda: not is_there(agents.newest.pids[2]))
    assert is_there(agents.newest.pids[1])
    loader.close()
    del iterator
    iterator = iter(loader)
    whims.num_workers = 3
    wait_for(iterator, lambda: loader.stats().num_workers == 3)
    loader.close()


def test_the_number_of_this_machine_can_be_changed_beside_others() -> None:
    """In mid-epoch; those of other machines stay, and the batches are the same."""
    agents = LocalAgents(1)
    loader = DataLoader(Drawing(), 1, num_workers=1, worker_backend=agents, max_buffered_bytes=0, shuffle=True)
    torch.manual_seed(3)
    iterator = iter(loader)
    seen = [next(iterator)]
    wait_for_workers(loader, 2)
    loader.set_num_workers(3)
    wait_for_workers(loader, 4)
    seen += [next(iterator) for _ in range(10)]
    loader.set_num_workers(1)
    wait_for_workers(loader, 2)
    seen += iterator
    reference = run_of(DataLoader(Drawing(), 1, num_workers=1, shuffle=True))
    assert [bits(batch) for batch in seen] == [bits(batch) for batch in reference]
    loader.close()


# -------------------------------------------------------------------------------------------------------- what fails


class Missing(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise FileNotFoundError("/data/5")
        return index


def test_an_error_names_its_node_and_what_to_do() -> None:
    """And the next batch follows."""
    loader = DataLoader(Missing(), 4, worker_backend=LocalAgents(1))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError) as caught:
        next(iterator)
    notes = "\n".join(caught.value.__notes__)
    assert f"on node {os.uname().nodename}" in notes
    assert "runtime_env" in notes
    assert "indices [4, 5, 6, 7]" in notes
    assert next(iterator).tolist() == [8, 9, 10, 11]
    loader.close()


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_by_its_agent(tmp_path: Path) -> None:
    """Its batch is made again."""
    loader = DataLoader(Told(tmp_path, 9, kill_myself), 4, worker_backend=LocalAgents(1))
    assert [i for batch in loader for i in batch.tolist()] == list(range(LENGTH))
    assert loader.stats().faults.replacements == 1


@pytest.mark.slow
def test_a_batch_that_always_kills_is_given_up(tmp_path: Path) -> None:
    """The error says where."""
    dataset = Told(tmp_path / "never", 9, kill_myself)
    iterator = iter(DataLoader(dataset, 4, worker_backend=LocalAgents(1), max_retries=0))
    dataset.marker.parent.mkdir()
    with pytest.raises(WorkerDiedError, match="On node"):
        list(iterator)
    del iterator


def kill_my_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def test_what_a_killed_agent_had_is_made_by_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In mid-epoch: no batch is lost or doubled, and nobody is blamed."""
    agents = LocalAgents(2, 2)
    loader = DataLoader(Told(tmp_path, 31, kill_my_agent), 1, worker_backend=agents)
    assert [i for batch in loader for i in batch.tolist()] == list(range(LENGTH))
    assert loader.stats().faults.retries == 0
    assert "is lost" in caplog.text


def test_an_agent_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is gone; so is its number."""
    agents = LocalAgents(1)
    loader = DataLoader(Drawing(), 1, num_workers=1, worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    wait_for_workers(loader, 2)
    monkeypatch.setattr(module, "_BEAT_S", 0.1)
    os.kill(agents.newest.pids[1], signal.SIGSTOP)
    assert [batch["i"].item() for batch in iterator] == list(range(LENGTH))
    assert [change.num_workers for change in loader.stats().workers.changes] == [2, 1]


@pytest.mark.parametrize("how", ["SIGTERM", "drained"])
def test_an_agent_that_is_to_go_finishes_what_it_has(how: str) -> None:
    """Its machine is taken away, or its node drained: others make the rest, nothing is made twice; then it is gone."""
    agents = LocalAgents(1, 1)
    loader = DataLoader(Drawing(), 1, worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    seen = [next(iterator)]
    wait_for_workers(loader, 2)
    if how == "drained":
        agents.newest.drain_soon(1)
    else:
        os.kill(agents.newest.pids[1], signal.SIGTERM)
    seen += [next(iterator) for _ in range(20)]
    wait_for_workers(loader, 1)
    wait_until(lambda: not is_there(agents.newest.pids[1]))
    seen += iterator
    assert [batch["i"].item() for batch in seen] == list(range(LENGTH))
    assert loader.stats().faults.retries == 0


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_of_agents_are_renewed(num_workers: int) -> None:
    """As local ones, and nothing is lost or doubled."""
    options: Any = {"num_workers": num_workers, "worker_backend": LocalAgents(2), "max_tasks_per_child": 3}
    loader = DataLoader(Endless(), 1, **options)
    iterator = iter(loader)
    for expected in itertools.count():
        assert next(iterator).item() == expected
        stats = loader.stats()
        if stats.workers.renewals >= 2:
            break
    assert (stats.faults.retries, stats.faults.replacements) == (0, 0)
    loader.close()


KEPT: list[bytes] = []


class Leaking(Drawing):
    """Takes memory with each sample, as long as the process is there."""

    def __getitem__(self, index: int) -> Any:
        KEPT.append(os.urandom(8 << 20))
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_worker_of_an_agent_that_has_grown_is_renewed() -> None:
    loader = DataLoader(
        Leaking(), 1, sampler=[1] * 300, worker_backend=LocalAgents(1), max_worker_memory=200 << 20, timeout=20
    )
    for _ in loader:
        if loader.stats().workers.renewals:
            break
    assert loader.stats().workers.renewals
    loader.close()


@pytest.mark.slow
def test_an_agent_joins_in_mid_epoch() -> None:
    agents = LocalAgents(1)
    loader = DataLoader(Drawing(), 1, worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    seen = [next(iterator)]
    agents.newest.grow_soon(2)
    wait_for_workers(loader, 3)
    seen += iterator
    assert [batch["i"].item() for batch in seen] == list(range(LENGTH))
    assert {batch["by"][0].item() for batch in seen} == {0, 1, 2}


def test_a_run_waits_for_the_first_agent() -> None:
    """Without any other worker: the sampler has been read by then."""
    agents = LocalAgents()
    loader = DataLoader(Drawing(), 4, shuffle=True, worker_backend=agents)
    torch.manual_seed(3)
    iterator = iter(loader)
    torch.manual_seed(4)  # the order was drawn before
    agents.newest.grow_soon(1)
    assert [bits(batch) for batch in iterator] == local(shuffle=True)


@pytest.mark.slow
def test_a_loader_that_is_closed_before_its_agents_come() -> None:
    """Nothing of them is left."""
    for delay in (0, 1):
        loader = DataLoader(Drawing(), 4, worker_backend=LocalAgents(1, 1))
        iterator = iter(loader)
        if delay:
            next(iterator)
        loader.close()
        del iterator


def other_secret(order: Any) -> Any:
    return replace(order, secret=new_secret())


def test_agents_that_cannot_come_are_the_end_of_a_run_without_others(caplog: pytest.LogCaptureFixture) -> None:
    """Here they do not know the secret."""
    agents = LocalAgents(1, 1, 1, corrupt=other_secret)
    loader = DataLoader(Drawing(), 4, worker_backend=agents)
    with pytest.raises(WorkerStartError, match="No worker can be had"):
        next(iter(loader))
    loader.close()
    assert "wrong secret" in caplog.text


class Fatal(Drawing):
    """Kills the agent of the first workers that open it, before they are ready."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for number in range(5):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"{number}").touch(exist_ok=False)
                kill_my_agent()


@pytest.mark.parametrize("nodes_die", [True, False])
def test_a_run_waits_for_another_node_when_nodes_die_early(tmp_path: Path, nodes_die: bool) -> None:
    """Agents that end on nodes that live are the end of the run, as there is something amiss with their start."""
    agents = LocalAgents(1, grows=True, num_workers=1, nodes_die=nodes_die)
    loader = DataLoader(Fatal(tmp_path), 4, worker_backend=agents)
    if nodes_die:
        assert [bits(batch) for batch in run_of(loader)] == local()
        assert len(list(tmp_path.iterdir())) == 5
    else:
        with pytest.raises(WorkerStartError, match="ended before a worker of it was ready"):
            next(iter(loader))
        loader.close()


@pytest.mark.slow
def test_local_workers_go_on_without_agents() -> None:
    agents = LocalAgents(1, 1, 1, corrupt=other_secret)
    batches = run_of(DataLoader(Drawing(), 4, num_workers=1, worker_backend=agents))
    assert [bits(batch) for batch in batches] == local()


class Bad(Drawing):
    """Cannot be unpickled anywhere."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise ModuleNotFoundError("No module named 'mine'")


def test_a_dataset_that_does_not_come_out_there() -> None:
    """The error says on which node, and what to do."""
    with pytest.raises(ModuleNotFoundError) as caught:
        next(iter(DataLoader(Bad(), 4, worker_backend=LocalAgents(1))))
    notes = "\n".join(caught.value.__notes__)
    assert "on node" in notes
    assert "runtime_env" in notes


@pytest.mark.slow
def test_other_versions_end_the_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Or are warned of, where that is allowed."""
    facts = module.facts()
    monkeypatch.setattr(module, "facts", lambda: facts | {"torch": "1.0"})
    with pytest.raises(WorkerStartError, match=r"torch is 1\.0 here and .* there"):
        next(iter(DataLoader(Drawing(), 4, worker_backend=LocalAgents(1))))
    loader = DataLoader(Drawing(), 4, worker_backend=LocalAgents(1, on_mismatch="warn"))
    assert len(list(loader)) == LENGTH // 4
    assert "torch is 1.0 here" in caplog.text


class Slow(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            threading.Event().wait(30)
        return index


@pytest.mark.slow
def test_a_timeout_says_where_a_worker_is() -> None:
    """With its node."""
    loader = DataLoader(Slow(), 1, worker_backend=LocalAgents(1), timeout=2)
    iterator = iter(loader)
    with pytest.raises(BatchTimeoutError) as caught:
        for _ in range(5):
            next(iterator)
    if "has it" in str(caught.value):  # otherwise this machine was too busy to start a worker in time
        assert "on node" in str(caught.value)
    loader.close()


# ------------------------------------------------------------------------------------------------- what is refused


class Stateful(Drawing):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 1


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Stream(), {}, "iterable dataset"),
        (Stateful(), {}, "state of its own"),
        (Drawing(), {"seeding": "worker"}, r"RayWorkers\(num_workers=.*samples depend on which of them"),
        (Drawing(), {"num_workers": "auto", "worker_backend": LocalAgents(num_workers=2)}, "looks after itself too"),
        (Drawing(), {"worker_backend": 5}, "RayWorkers"),
        (Drawing(), {"prefetch_factor": 0}, "prefetch_factor"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(dataset: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataLoader(dataset, 4, **{"worker_backend": LocalAgents(1)} | options)


@pytest.mark.parametrize(("num_workers", "number", "words"), [(0, 1, "no workers on this"), (1, 900, "at most")])
def test_numbers_that_there_cannot_be_here(num_workers: int, number: int, words: str) -> None:
    loader = DataLoader(Drawing(), 4, num_workers=num_workers, worker_backend=LocalAgents(1))
    with pytest.raises(ConfigurationError, match=words):
        loader.set_num_workers(number)


def test_what_one_machine_shares_does_not_travel() -> None:
    """It is said when a run begins, which pickles the dataset."""
    dataset: Any = Drawing()
    dataset.shared = torch.zeros(3).share_memory_()
    with pytest.raises(ConfigurationError, match="share_memory_"):
        iter(DataLoader(dataset, 4, worker_backend=LocalAgents(1)))


@pytest.mark.slow
def test_an_agent_is_a_process_of_its_own_beside_who_launches_it() -> None:
    """As Ray's actor runs it; classes of the main module travel by value."""
    program = """
import torch
from torch.utils.data import DataLoader as Torchs, Dataset
from asyncloader import DataLoader
from tests.ray.local_agents import LocalAgents

class Key(int):
    pass

class Mine(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, key):
        return type(key).__name__, key, Mine

class Keys(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([[Key(i)] for i in range(8)])

    def __len__(self):
        return 8

if __name__ == "__main__":
    loader = DataLoader(Mine(), batch_sampler=Keys(), collate_fn=lambda samples: samples[0], num_workers=0,
                        worker_backend=LocalAgents(1, by_host=True))
    for i, (name, key, kind) in enumerate(loader):
        assert (name, key, kind) == ("Key", i, Mine), (name, key, kind)
    loader.close()
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
