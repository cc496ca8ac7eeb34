"""Files behind urls: requests over HTTP, and what their answers mean: which bytes came, and which failures pass."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import errno
import re
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncloader.datasets.limits import collect, collect_range, decompress, too_large
from asyncloader.datasets.retry import FetchError, TransientError
from asyncloader.datasets.source import Known, Version, raise_changed
from asyncloader.errors import as_cause, redacted

if TYPE_CHECKING:
    import aiohttp
    import yarl

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which the same request may succeed
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10
_TOLD_TO_ALL = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})
_KEPT_OPTIONS = ("proxy", "proxy_auth", "read_bufsize", "skip_auto_headers", "timeout", "trust_env", "version")
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", re.IGNORECASE)
_LENGTH = re.compile(r"bytes \*/([0-9]{1,18})", re.IGNORECASE)


class HTTPSource:
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

    async def version(self, url: str) -> Version:
        """Return which version of a file is there. A byte is asked for: that shows whether the server gives ranges."""
        async with self._get(url, range_header(0, 1)) as answer:
            if is_at_end(answer, 0, is_same=False):
                return Version(0, tag_of(answer))
            part = check(answer, url, 0, 1)
            if part is None or part.total is None:
                raise FetchError(f"{url}: the server does not say how long it is")
            return Version(part.total, tag_of(answer))

    async def read(self, url: str, start: int, stop: int, version: Version | None = None) -> bytes:
        """Return some bytes of a file, of this version if one is given.

        Raises:
            TransientError: Fewer came.
            FetchError: More came, or it is of another version.
        """
        async with self._get(url, range_header(start, stop)) as answer:
            part = check(answer, url, start, stop)
            if version and (part is None or tag_of(answer) != version.tag or part.total not in (None, version.size)):
                raise_changed(url)
            return await collect_range(answer.content.iter_any(), stop - start, url)

    async def read_whole(self, url: str, max_bytes: int) -> bytes:
        """Return all of a file, decompressed if it comes with gzip.

        Raises:
            TransientError: The compressed data was cut off.
            FetchError: The file is damaged, compressed in another way, or larger than `max_bytes`.
        """
        async with self._get(url, {}) as answer:
            check(answer, url)
            is_packed, error = is_gzipped(answer, url), too_large(url, max_bytes)
            if (answer.content_length or 0) > max_bytes:
                raise error
            data = await collect(answer.content.iter_any(), max_bytes, error)
            return decompress(data, max_bytes, url) if is_packed else data

    async def stream(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Read from an offset on."""
        while True:
            headers = range_header(offset) if offset else {}
            if is_same := known.tag is not None and known.tag.startswith('"'):  # servers do not compare weak ones
                headers["If-Match"] = str(known.tag)
            async with self._get(url, headers) as answer:
                tag = tag_of(answer) or None
                if offset and answer.status == 416:  # nothing lies behind what has come
                    known.confirmed(Known(tag, offset), url)
                    if is_at_end(answer, offset, is_same=is_same):
                        return
                part = check(answer, url, offset or None)
                size = answer.content_length if part is None else part.total
                known = known.confirmed(Known(tag, size, is_gzipped(answer, url)), url)
                async for chunk in answer.content.iter_any():
                    offset += len(chunk)
                    yield chunk, known
            if part is None or offset == known.size:
                return
            if offset != part.stop:  # else the server gave less than it was asked for, and is asked for more
                raise TransientError(f"the answer ended at byte {offset}, not {part.stop}")

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
        for _ in range(_MOST_REDIRECTS):
            async with self._session.get(asked, headers=headers, allow_redirects=False) as answer:
                target = _target(answer, asked)
                if target is None:
                    yield answer
                    return
            if target.origin() != answer.url.origin():
                async with self._to_others().get(target, headers=headers, max_redirects=_MOST_REDIRECTS) as answer:
                    yield answer
                return
            asked = target
        raise FetchError(f"{url}: more than {_MOST_REDIRECTS} redirects")

    def _to_others(self) -> aiohttp.ClientSession:
        """Return the session, over the same connections, that has no secrets; it may follow redirects by itself."""
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


class ContentRange(NamedTuple):
    """Which bytes of an object an answer has: from `start` up to, and not including, `stop`, of `total` if known."""

    start: int
    stop: int
    total: int | None


def range_header(start: int, stop: int | None = None) -> dict[str, str]:
    """Return the header that asks for bytes from `start` up to, and not including, `stop`."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}


def check(
    answer: aiohttp.ClientResponse, url: str, start: int | None = None, stop: int | None = None
) -> ContentRange | None:
    """Raise what an answer calls for if it does not have the bytes that were asked for.

    Args:
        answer: To a request of the whole object, or of a range.
        url: Named in errors.
        start: First byte of the range that was asked for; None asked for the whole object.
        stop: The one after the last; None asked for the rest.

    Returns:
        Which bytes the answer has; None if that is the whole object.
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
    part = _part(answer)
    if part is None or part.start != start or part.stop <= start or (stop is not None and part.stop != stop):
        came, asked = answer.headers.get("Content-Range"), f"bytes {start}-{'' if stop is None else stop - 1}"
        raise FetchError(f"{url}: {came!r} came where {asked} were asked for")
    return part


def _part(answer: aiohttp.ClientResponse) -> ContentRange | None:
    found = _PART.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None:
        return None
    first, last, total = found.groups()
    return ContentRange(int(first), int(last) + 1, None if total == "*" else int(total))


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


def tag_of(answer: aiohttp.ClientResponse) -> str:
    """Return the tag of the version that an answer has bytes of."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


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
