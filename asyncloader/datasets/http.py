"""Objects behind urls, fetched with aiohttp over connections that are kept."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.remote import ByteRange, Key, RemoteDataset
from asyncloader.datasets.retry import FetchError, Retries, TransientError

if TYPE_CHECKING:
    import aiohttp

T_co = TypeVar("T_co", covariant=True)

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which the same request may succeed


class HTTPDataset(RemoteDataset["aiohttp.ClientSession", T_co]):
    """Serve what lies behind urls, or byte ranges of it.

    Each worker has one session, whose connections are kept and used again. How many there are follows from how many
    samples the loader has in flight (``concurrency``).

    Tried again are connections that fail or break off, time-outs, bodies that are too short, and the statuses 408, 425,
    429, 500, 502, 503 and 504, the latter after as long as ``Retry-After`` says.

    Args:
        urls: The urls, or :class:`ByteRange` of urls, in the order of their indices.
        decode: Makes a sample of a body and its url (or ByteRange); without it the bytes are the sample.
        headers: Sent with every request.
        connect_timeout_s: Seconds for one try to connect.
        read_timeout_s: Seconds for which a try waits for the next piece of the answer.
        max_connections: Connections of each worker at most; None sets no limit beside ``concurrency``.
        session_options: Further arguments of :class:`aiohttp.ClientSession`, ``auth`` or ``trust_env`` for example.
        retries: How transient failures are retried.
        decode_threads: Threads that decode, in each worker, while the loop goes on: by default one in a worker process
            and up to four without one; 0 decodes on the loop, which pays if it takes less than some 100 us.

    Raises:
        ImportError: aiohttp is not installed (``asyncloader[http]``).

    A sample raises FileNotFoundError for 404 and 410, PermissionError for 401 and 403, and :class:`FetchError` for what
    else does not succeed.

    Example:
        ::

            dataset = HTTPDataset([f"https://data.example/{n}.jpg" for n in range(10_000)], decode)
            loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, concurrency=64)
    """

    def __init__(
        self,
        urls: Iterable[Key],
        decode: Callable[[bytes, Any], T_co] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 30.0,
        max_connections: int | None = None,
        session_options: Mapping[str, Any] | None = None,
        retries: Retries | None = None,
        decode_threads: int | None = None,
    ) -> None:
        require("aiohttp", "http", "HTTPDataset")
        super().__init__(urls, decode, retries or Retries(), decode_threads)
        self.headers = dict(headers or {})
        self.connect_timeout_s = connect_timeout_s
        self.read_timeout_s = read_timeout_s
        self.max_connections = max_connections
        self.session_options = dict(session_options or {})

    async def _fetch(self, client: aiohttp.ClientSession, key: Key) -> bytes:
        url, wanted = (key, {}) if isinstance(key, str) else (key.key, range_header(key.start, key.stop))
        with failures_told_apart():
            async with client.get(url, headers=wanted) as answer:
                check(answer, url, partial=isinstance(key, ByteRange))
                return await answer.read()

    async def _connect(self) -> aiohttp.ClientSession:
        return make_session(
            self.headers, self.connect_timeout_s, self.read_timeout_s, self.max_connections, self.session_options
        )

    async def _disconnect(self, client: aiohttp.ClientSession) -> None:
        await client.close()


def make_session(
    headers: Mapping[str, str] | None = None,
    connect_timeout_s: float = 10.0,
    read_timeout_s: float = 30.0,
    max_connections: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> aiohttp.ClientSession:
    """Make a session that belongs to the running loop."""
    import aiohttp

    given: dict[str, Any] = {
        "connector": aiohttp.TCPConnector(limit=max_connections or 0),
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
        "cookie_jar": aiohttp.DummyCookieJar(),
        # Bodies as they are stored: ranges count in those bytes, and a length that is wrong is noticed.
        "headers": {"Accept-Encoding": "identity", **(headers or {})},
    }
    return aiohttp.ClientSession(**{**given, **(options or {})})


def range_header(start: int, stop: int | None = None) -> dict[str, str]:
    """Return the header that asks for bytes from `start` up to, and not including, `stop`."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}


def check(answer: aiohttp.ClientResponse, url: str, *, partial: bool) -> None:
    """Raise what the status of an answer calls for."""
    status, said = answer.status, f"{answer.status} {answer.reason}"
    if status in PASSING:
        raise TransientError(said, _wait_s(answer.headers.get("Retry-After")))
    if status in (404, 410):
        raise FileNotFoundError(errno.ENOENT, said, url)
    if status in (401, 403):
        raise PermissionError(errno.EACCES, said, url)
    if status >= 300:
        raise FetchError(f"{url}: {said}")
    if partial and status != 206:
        raise FetchError(f"{url}: the server does not give byte ranges: {said} where 206 was expected")


@contextlib.contextmanager
def failures_told_apart() -> Iterator[None]:
    """Turn the client's errors into TransientError where they may pass, and into FetchError where they do not."""
    import aiohttp

    try:
        yield
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, ConnectionError) as error:
        raise TransientError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except aiohttp.ClientError as error:  # urls that are none, redirects in a circle, answers that are not HTTP
        raise FetchError(f"{type(error).__name__}: {error}") from error


def _wait_s(retry_after: str | None) -> float | None:
    """Read Retry-After: a number of seconds, or a date."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    with contextlib.suppress(ValueError):
        until = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, (until - datetime.datetime.now(until.tzinfo)).total_seconds())
    return None
