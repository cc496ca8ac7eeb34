"""Objects over HTTP: from nginx, and from a server that fails as told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from asyncloader.datasets import ByteRange, FetchError, HTTPDataset, Retries
from tests.patience import until
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


async def test_other_bytes_than_were_asked_for_are_no_sample(
    fault_server: FaultServer, objects: dict[str, bytes]
) -> None:
    """Whatever an answer to a range has in it: the bytes of that range, and it says so; else it is an error."""
    length = len(objects["number/9"])
    urls = [fault_server.url("number/9", fault=fault) for fault in ("elsewhere", "unsaid", "less")]
    beyond = ByteRange(fault_server.url("number/9"), 1, length + 1)
    async with dataset_of(*(ByteRange(url, 4, 9) for url in urls), beyond) as dataset:
        for index, came in enumerate(["'bytes 0-4/.*'", "None", "'bytes 4-6/.*'"]):
            with pytest.raises(FetchError, match=rf"{came} came where bytes 4-8 were asked for"):
                await dataset[index]
        with pytest.raises(FetchError, match=f"came where bytes 1-{length} were asked for"):
            await dataset[3]


async def test_ranges_that_are_empty_or_none(fault_server: FaultServer) -> None:
    """No bytes need no request; what no request can ask for is told as what it is."""
    url = fault_server.url("number/9")
    async with dataset_of(ByteRange(url, 3, 3), ByteRange(url, 3, 2), ByteRange(url, -3, 2)) as dataset:
        assert await dataset[0] == b""
        for index in (1, 2):
            with pytest.raises(ValueError, match="is no range of bytes"):
                await dataset[index]


async def test_a_part_that_was_not_asked_for_is_no_object(fault_server: FaultServer) -> None:
    """Nor is an answer without a body."""
    for status in ("204", "206"):
        async with dataset_of(fault_server.url("number/9", fault=status)) as dataset:
            with pytest.raises(FetchError, match=status):
                await dataset[0]


SECRETS = {"Authorization": "Bearer s", "X-Api-Key": "k", "Cookie": "c=1", "PRIVATE-TOKEN": "t"}


async def test_secrets_stay_with_the_origin_that_they_are_for(objects: dict[str, bytes]) -> None:
    """Redirects within an origin take all headers along; another origin learns what formats and bytes are wanted."""
    options: dict[str, Any] = {
        "headers": {**SECRETS, "User-Agent": "me"},
        "session_options": {"auth": None, "cookies": {"a": "b"}},
    }
    with FaultServer(objects) as other, FaultServer(objects) as server:
        near = server.url("number/3", fault="redirect", to="/number/4")
        back = other.url("number/3", fault="redirect", to=server.url("number/5"))
        far = server.url("number/3", fault="redirect", to=other.url("number/4"))
        there_and_back = server.url("number/3", fault="redirect", to=back)
        async with dataset_of(near, ByteRange(far, 2, 5), there_and_back, **options) as dataset:
            assert await dataset[0] == objects["number/4"]
            seen = server.headers()
            assert {name: seen[name.lower()] for name in SECRETS} == SECRETS
            assert await dataset[1] == objects["number/4"][2:5]
            seen = other.headers()
            assert {"range", "user-agent", "accept-encoding"} < set(seen)
            assert not {name.lower() for name in SECRETS} & set(seen)
            assert await dataset[2] == objects["number/5"]
            assert not {name.lower() for name in SECRETS} & set(server.headers())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:aiohttp", "ignore:(BasicAuth|The .auth)")
async def test_a_login_stays_with_its_origin(objects: dict[str, bytes]) -> None:
    """One in the url, and one of the session."""
    login = aiohttp.BasicAuth("me", "secret")
    with FaultServer(objects) as other, FaultServer(objects) as server:
        near = server.url("number/3", fault="redirect", to="/number/4")
        far = server.url("number/3", fault="redirect", to=other.url("number/4"))
        for prefix, options in (("me:secret@", {}), ("", {"session_options": {"auth": login}})):
            urls = (url.replace("http://", f"http://{prefix}") for url in (near, far))
            async with dataset_of(*urls, **options) as dataset:
                assert await dataset[0] == objects["number/4"]
                assert server.headers()["authorization"] == login.encode()
                assert await dataset[1] == objects["number/4"]
                assert "authorization" not in other.headers()


async def test_redirects_that_lead_nowhere_are_told(fault_server: FaultServer) -> None:
    """In a circle, to what is no url, to what is not HTTP."""
    targets = ("http://[", "ftp://127.0.0.1/")
    urls = [fault_server.url("number/3", fault="redirect", to=target) for target in targets]
    async with dataset_of(*urls, fault_server.url("number/3") + "?fault=circle") as dataset:
        for index in range(2):
            with pytest.raises(FetchError, match="redirects to"):
                await dataset[index]
        with pytest.raises(FetchError, match="more than 10 redirects"):
            await dataset[2]


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
            await asyncio.sleep(0.02)  # less than an answer takes
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
    before = fault_server.seen().get("requests", 0)
    async with dataset_of(fault_server.url("number/7", fault="stall"), read_timeout_s=60) as dataset:
        hanging = asyncio.create_task(dataset[0])
        await until(lambda: fault_server.seen().get("requests", 0) > before)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging


async def test_what_is_no_url_is_told_at_once() -> None:
    """No retries for what cannot become right."""
    async with dataset_of("not a url", "http://", "gopher://127.0.0.1/") as dataset:
        for index in range(3):
            with pytest.raises(FetchError):
                await dataset[index]
