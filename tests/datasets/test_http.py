"""Objects over HTTP: from nginx, and from a server that fails as told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncloader.datasets import ByteRange, FetchError, HTTPDataset, Retries
from tests.services.fault_server import FaultServer

BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)


def dataset_of(*urls: Any, **options: Any) -> HTTPDataset[Any]:
    return HTTPDataset(urls, **{"retries": BRISK, "read_timeout_s": 0.5, **options})


async def test_objects_and_ranges_come_from_nginx(web_server: str, objects: dict[str, bytes]) -> None:
    """Whole objects and ranges of them, all at once, decoded with their keys; over connections that are kept."""
    names = list(objects)
    ranges = [ByteRange(f"{web_server}/{name}", 3, 8) for name in names]
    dataset = HTTPDataset([*(f"{web_server}/{name}" for name in names), *ranges], lambda data, key: (key, data))
    assert len(dataset) == 2 * len(names)
    async with dataset:
        found = await asyncio.gather(*(dataset[index] for index in range(len(dataset))))
    assert found[: len(names)] == [(f"{web_server}/{name}", objects[name]) for name in names]
    assert found[len(names) :] == [(part, objects[name][3:8]) for part, name in zip(ranges, names, strict=True)]


async def test_what_is_not_there_or_not_allowed_is_named_at_once(web_server: str) -> None:
    """404 and 403 are the errors that a file would give, with the url; a range beyond the end says so."""
    urls = (f"{web_server}/gone", f"{web_server}/private/key", ByteRange(f"{web_server}/number/0", 10_000, 10_001))
    async with dataset_of(*urls) as dataset:
        with pytest.raises(FileNotFoundError, match=r"404 Not Found: 'http.*/gone'"):
            await dataset[0]
        with pytest.raises(PermissionError, match=r"403 Forbidden: 'http.*/private/key'"):
            await dataset[1]
        with pytest.raises(FetchError, match="416"):
            await dataset[2]


FAULTS = ["500", "502", "503", "504", "429", "408", "reset", "cut", "short", "stall"]


async def test_failures_that_pass_are_not_seen(fault_server: FaultServer, objects: dict[str, bytes]) -> None:
    """Each fault twice, then the object: all objects come, whole. A slow body is no failure at all."""
    urls = [fault_server.url("number/7", fault=fault, times=2) for fault in FAULTS]
    async with dataset_of(*urls, fault_server.url("number/7", fault="drip")) as dataset:
        found = await asyncio.gather(*(dataset[index] for index in range(len(dataset))))
    assert found == [objects["number/7"]] * (len(FAULTS) + 1)


async def test_failures_that_stay_are_told(fault_server: FaultServer) -> None:
    """After the last try the error has the url, what happened, and how often."""
    said = {
        "500": "500 Internal Server Error",
        "reset": "Disconnected|reset",
        "short": "PayloadError",
        "stall": "imeout",
    }
    urls = [fault_server.url("number/7", fault=fault) for fault in said]
    async with dataset_of(*urls, read_timeout_s=0.1) as dataset:
        for index, words in enumerate(said.values()):
            with pytest.raises(FetchError, match=rf"^http://127.*fault=.*({words}).*\(4 tries\)$"):
                await dataset[index]


async def test_retry_after_is_obeyed(fault_server: FaultServer, objects: dict[str, bytes]) -> None:
    """The wait is the server's, not ours: as long as it says, but no longer than there is time in all."""
    async with dataset_of(fault_server.url("number/1", fault="429", after=1, times=1)) as dataset:
        began = time.monotonic()
        assert await dataset[0] == objects["number/1"]
        assert 1.0 <= time.monotonic() - began < 5
    hour = fault_server.url("number/1", fault="503", after="3600")
    async with dataset_of(hour, retries=Retries(total_s=0.1)) as dataset:
        with pytest.raises(FetchError, match=r"did not come within 0\.1 s; before that: 503"):
            await dataset[0]


async def test_a_server_without_ranges_is_found_out(fault_server: FaultServer) -> None:
    """The whole object in the place of a part is an error, not a sample."""
    url = fault_server.url("number/9", fault="whole")
    async with dataset_of(ByteRange(url, 0, 3)) as dataset:
        with pytest.raises(FetchError, match="does not give byte ranges"):
            await dataset[0]


async def test_connections_are_bounded_and_kept(objects: dict[str, bytes]) -> None:
    """A hundred requests over four connections."""
    with FaultServer(objects, latency_s=0.005) as server:
        async with dataset_of(*[server.url("number/3")] * 100, max_connections=4) as dataset:
            await asyncio.gather(*(dataset[index] for index in range(100)))
        seen = server.seen()
    assert seen["requests"] == 100
    assert seen["most at once"] <= 5  # with the one that asks for this
    assert seen["connections"] <= 5


async def test_a_server_that_was_killed_and_came_back_costs_nothing(objects: dict[str, bytes]) -> None:
    """Killed while requests are in flight, started again at the same port: every object comes."""
    patient = Retries(tries=100, first_wait_s=0.02, longest_wait_s=0.1)
    with FaultServer(objects, latency_s=0.05) as server:
        async with dataset_of(*map(server.url, objects), retries=patient) as dataset:
            tasks = [asyncio.create_task(dataset[index]) for index in range(len(dataset))]
            await tasks[0]
            extra = [asyncio.create_task(dataset[index]) for index in range(len(dataset))]
            await asyncio.sleep(0.02)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            found = await asyncio.gather(*tasks, *extra)
    assert found == [*objects.values()] * 2


async def test_a_server_that_stays_away_is_an_error_in_bounded_time(objects: dict[str, bytes]) -> None:
    """Nobody listens any more: the error says so after the last try."""
    with FaultServer(objects) as server:
        url = server.url("number/1")
    async with dataset_of(url) as dataset:
        with pytest.raises(FetchError, match=r"Cannot connect.*\(4 tries\)"):
            await dataset[0]


async def test_cancelling_and_leaving_in_the_middle_leaves_nothing(fault_server: FaultServer) -> None:
    """A request that hangs is cancelled; the connection goes with it (the check after each test counts descriptors)."""
    async with dataset_of(fault_server.url("number/7", fault="stall"), read_timeout_s=60) as dataset:
        hanging = asyncio.create_task(dataset[0])
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging


async def test_what_is_no_url_is_told_at_once() -> None:
    """No retries for what cannot become right."""
    async with dataset_of("not a url", "http://", "gopher://127.0.0.1/") as dataset:
        for index in range(3):
            with pytest.raises(FetchError):
                await dataset[index]
