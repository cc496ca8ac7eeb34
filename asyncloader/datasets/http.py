"""Objects behind urls, fetched with aiohttp over connections that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.http_source import HTTPSource
from asyncloader.datasets.limits import MAX_BYTES
from asyncloader.datasets.remote import Key, RemoteDataset
from asyncloader.datasets.retry import Retries

T_co = TypeVar("T_co", covariant=True)


class HTTPDataset(RemoteDataset[HTTPSource, T_co]):
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

    async def _fetch(self, client: HTTPSource, key: Key) -> bytes:
        return await (client.read_whole(key, self.max_bytes) if isinstance(key, str) else client.read(*key))

    async def _connect(self) -> HTTPSource:
        return HTTPSource(
            self.headers, self.connect_timeout_s, self.read_timeout_s, self.max_connections, self.session_options
        )
