"""Files behind urls: requests with aiohttp over connections that are kept, and what their answers mean.

Which bytes came, and which failures pass; and the dataset of such files.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import errno
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.limits import MAX_BYTES
from asyncloader.datasets.remote import Key, RemoteDataset
from asyncloader.datasets.retry import FetchError, Retries, TransientError
from asyncloader.datasets.source import NOTHING, Known, Source
from asyncloader.errors import as_cause, redacted

if TYPE_CHECKING:
    import aiohttp
    import yarl

T_co = TypeVar("T_co", covariant=True)

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which the same request may succeed
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10
_TOLD_TO_ALL = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})
_KEPT_OPTIONS = ("proxy", "proxy_auth", "read_bufsize", "skip_auto_headers", "timeout", "trust_env", "version")
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", re.IGNORECASE)
_LENGTH = re.compile(r"bytes \*/([0-9]{1,18})", re.IGNORECASE)


class HTTPSource(Source):
    """Sends requests, over connections that are kept. Belongs to one loop.

    The headers, cookies and logins that it was given are for the origins that are asked: where one of them redirects to
    another, that learns nothing but what formats and languages are wanted. aiohttp by itself takes back no more than
    ``Authorization`` and ``Cookie``, and keys of services are sent under any name.

    Args:
        headers: Sent with every request.
        connect_timeout_s: Seconds for one try to connect.
        read_timeout_s: Seconds for which a try waits for the next piece of the answer.
        max_connections: At most so many at once.
        options: Further arguments of :class:`aiohttp.ClientSession`.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 30.0,
        max_connections: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        import aiohttp

        given: dict[str, Any] = {
            "connector": aiohttp.TCPConnector(limit=max_connections or 0),
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
            "cookie_jar": aiohttp.DummyCookieJar(),
            # Bodies as they are stored: ranges count in those bytes, and a length that is wrong is noticed.
            "headers": {"Accept-Encoding": "identity", **(headers or {})},
        }
        # aiohttp takes what it could decompress of a body that was cut off for the whole.
        self._options = {**given, **(options or {}), "auto_decompress": False}
        self._session = aiohttp.ClientSession(**self._options)
        self._stranger: aiohttp.ClientSession | None = None

    async def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Yield chunks from one byte up to another, or the end."""
        while True:
            is_part = start > 0 or stop is not None
            headers = range_header(start, stop) if is_part else {}
            if is_same := stop is None and (known.tag or "").startswith('"'):  # servers do not compare weak ones
                headers["If-Match"] = str(known.tag)
            async with self._get(url, headers) as answer:
                tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
                if is_part and answer.status == 416:  # nothing lies behind what has come
                    known = known.confirmed(Known(tag, start), url)
                    if is_at_end(answer, start, is_same=is_same):
                        yield b"", known
                        return
                part = check(answer, url, start if is_part else None, stop)
                size = answer.content_length if part is None else part[1]
                known = known.confirmed(Known(tag, size, is_gzipped(answer, url)), url)
                yield b"", known
                async for chunk in answer.content.iter_any():
                    start += len(chunk)
                    yield chunk, known
            if part is None or stop is not None or start == known.size:
                return
            if start != part[0]:  # otherwise the server gave less than it was asked for, and is asked for more
                raise TransientError(f"the answer ended at byte {start}, not {part[0]}")

    @contextlib.asynccontextmanager
    async def _get(self, url: str, headers: Mapping[str, str]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Ask for a url, and follow redirects.

        Raises:
            TransientError: For what the client raises, if that may pass.
            FetchError: If it does not: urls that are none, redirects in a circle, answers that are not HTTP.
        """
        import aiohttp

        try:
            async with self._answered(url, headers) as answer:
                yield answer
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, ConnectionError) as error:
            raise TransientError(f"{type(error).__name__}: {error}".rstrip(": ")) from as_cause(error)
        except aiohttp.ClientError as error:
            raise FetchError(f"{type(error).__name__}: {error}") from as_cause(error)

    @contextlib.asynccontextmanager
    async def _answered(self, url: str, headers: Mapping[str, str]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        asked: str | yarl.URL = url
        session = self._session
        for _ in range(_MOST_REDIRECTS + 1):
            async with session.get(asked, headers=headers, allow_redirects=False) as answer:
                target = _target(answer, asked)
                if target is None:
                    yield answer
                    return
            if target.origin() != answer.url.origin():
                session = self._to_others()
            asked = target
        raise FetchError(f"{url}: more than {_MOST_REDIRECTS} redirects")

    def _to_others(self) -> aiohttp.ClientSession:
        """Return the session, over the same connections, that has no secrets."""
        if self._stranger is None:
            import aiohttp
            from multidict import CIMultiDict

            told = {k: v for k, v in CIMultiDict(self._options["headers"]).items() if k.lower() in _TOLD_TO_ALL}
            self._stranger = aiohttp.ClientSession(
                connector=self._session.connector,
                connector_owner=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=told,
                **{name: self._options[name] for name in _KEPT_OPTIONS if name in self._options},
            )
        return self._stranger

    async def aclose(self) -> None:
        """Close the connections."""
        if self._stranger is not None:
            await self._stranger.close()
        await self._session.close()


class HTTPDataset(RemoteDataset[T_co]):
    """Serve what lies behind urls, or byte ranges of it.

    Each worker has one session, whose connections are kept and used again. How many there are follows from how many
    samples the loader has in flight (``concurrency``).

    Tried again are connections that fail or break off, time-outs, bodies that are too short, and the statuses 408, 425,
    429, 500, 502, 503 and 504, the latter after as long as ``Retry-After`` says. Servers are asked not to compress; a
    whole object that comes with ``Content-Encoding: gzip`` is decompressed, a range of one is an error.

    Args:
        urls: The urls, or :class:`ByteRange` of urls, in the order of their indices.
        decode: Makes a sample of a body and its url (or ByteRange); without it the bytes are the sample.
        headers: Sent with every request; not to another origin to which a server redirects.
        connect_timeout_s: Seconds for one try to connect.
        read_timeout_s: Seconds for which a try waits for the next piece of the answer.
        max_connections: Connections of each worker at most; None sets no limit beside ``concurrency``.
        session_options: Further arguments of :class:`aiohttp.ClientSession`, ``trust_env`` for example.
        retries: How transient failures are retried.
        max_bytes: How large an object may be, decompressed; a larger one is an error. Ranges are as long as you say.
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
        max_bytes: int = MAX_BYTES,
        decode_threads: int | None = None,
    ) -> None:
        require("aiohttp", "http", "HTTPDataset")
        super().__init__(urls, decode, retries or Retries(), decode_threads, max_bytes)
        self.headers = dict(headers or {})
        self.connect_timeout_s = connect_timeout_s
        self.read_timeout_s = read_timeout_s
        self.max_connections = max_connections
        self.session_options = dict(session_options or {})

    def _source(self) -> HTTPSource:
        return HTTPSource(
            self.headers, self.connect_timeout_s, self.read_timeout_s, self.max_connections, self.session_options
        )


def _target(answer: aiohttp.ClientResponse, asked: str | yarl.URL) -> yarl.URL | None:
    """Return where an answer redirects to, if it does; in the same origin with the login that the url had."""
    from yarl import URL

    location = answer.headers.get("Location")
    if answer.status not in _REDIRECTS or location is None:
        return None
    try:
        target = answer.url.join(URL(location))
        is_same = target.origin() == answer.url.origin()
    except ValueError as error:
        raise FetchError(f"{asked}: redirects to {location!r}, which is no url: {error}") from as_cause(error)
    if target.scheme not in ("http", "https"):
        raise FetchError(f"{asked}: redirects to {location!r}, which is not HTTP")
    login = URL(asked)
    if is_same and login.user is not None and target.user is None:
        return target.with_user(login.user).with_password(login.password)
    return target


def range_header(start: int, stop: int | None = None) -> dict[str, str]:
    """Return the header that asks for bytes from `start` up to, and not including, `stop`."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}


def check(
    answer: aiohttp.ClientResponse, url: str, start: int | None = None, stop: int | None = None
) -> tuple[int, int | None] | None:
    """Raise what an answer calls for if it does not have the bytes that were asked for.

    Args:
        answer: To a request of the whole object, or of a range.
        url: Named in errors.
        start: First byte of the range that was asked for; None asked for the whole object.
        stop: The one after the last; None asked for the rest.

    Returns:
        Where the bytes of the answer stop, and how many the object has, if the server knows; None if the answer has the
        whole object.
    """
    status, said = answer.status, f"{answer.status} {answer.reason}"
    if status in PASSING:
        raise TransientError(said, _wait_s(answer.headers.get("Retry-After")))
    if status in (404, 410):
        raise FileNotFoundError(errno.ENOENT, said, redacted(url))
    if status in (401, 403):
        raise PermissionError(errno.EACCES, said, redacted(url))
    if start is None:
        if status not in (200, 203):  # the other ones from 200 on have a part, or nothing
            raise FetchError(f"{url}: {said}")
        return None
    if status in (200, 203):
        raise FetchError(f"{url}: the server does not give byte ranges: {said} where 206 was expected")
    if status != 206:
        raise FetchError(f"{url}: {said}")
    if stop is not None and is_gzipped(answer, url):
        raise FetchError(f"{url}: the server gives ranges of compressed bytes only (Content-Encoding: gzip)")
    came, asked = answer.headers.get("Content-Range"), range_header(start, stop)["Range"].replace("=", " ")
    if found := _PART.fullmatch(came or ""):
        first, end = int(found[1]), int(found[2]) + 1
        if first == start < end and stop in (None, end):
            return end, None if found[3] == "*" else int(found[3])
    raise FetchError(f"{url}: {came!r} came where {asked} were asked for")


def is_gzipped(answer: aiohttp.ClientResponse, url: str) -> bool:
    """Tell whether the server gives an object compressed with gzip, though it was asked not to.

    Raises:
        FetchError: The object is compressed in another way.
    """
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise FetchError(f"{url}: comes compressed (Content-Encoding: {encoding}), of which only gzip is supported")
    return encoding.endswith("gzip")


def is_at_end(answer: aiohttp.ClientResponse, start: int, *, is_same: bool) -> bool:
    """Tell from the answer to the request for the rest from `start` on whether there is none.

    Args:
        answer: The answer.
        start: Where the rest would have begun.
        is_same: The server was asked to answer only if the object has not changed. The object then ends where the
            bytes end that have come.
    """
    if answer.status != 416:
        return False
    found = _LENGTH.fullmatch(answer.headers.get("Content-Range", ""))
    return is_same if found is None else int(found[1]) == start


def _wait_s(retry_after: str | None) -> float | None:
    """Read Retry-After: a number of seconds, or a date."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(retry_after)
        return max(0.0, seconds) if seconds < float("inf") else None
    with contextlib.suppress(ValueError, OverflowError):
        until = email.utils.parsedate_to_datetime(retry_after)
        if until.tzinfo is None:
            until = until.replace(tzinfo=datetime.UTC)
        return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
    return None
