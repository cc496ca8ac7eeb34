"""Rows of PostgreSQL by key, through asyncpg."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from asyncloader.datasets.extras import require
from asyncloader.datasets.opened import BatchDataset, Opened, all_decoded
from asyncloader.datasets.retry import Retries, TransientError

if TYPE_CHECKING:
    import asyncpg

T_co = TypeVar("T_co", covariant=True)

# Conditions of a server that pass (https://www.postgresql.org/docs/current/errcodes-appendix.html): connections lost or
# refused (class 08), too many of them, conflicts, deadlocks, a server that goes down or comes up.
_PASSING = ("08", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "57P05")
_FAREWELL_S = 2.0
_KEYS_SHOWN = 8


class SQLDataset(BatchDataset[Opened["_Pool"], T_co]):
    """Serve rows by key. The rows of a batch come in one query.

    Each worker has a pool of connections, of which each batch in flight takes one.

    Tried again are connections that are refused or lost, conflicts and deadlocks, and queries that take longer than
    ``query_timeout_s``.

    Args:
        dsn: Where the database is, ``postgresql://user@host/database``. Parts that it leaves out come from the
            environment (``PGHOST``, ``PGUSER``, ``PGPASSWORD``, ``PGPASSFILE``, ...), so the password need not be in
            it.
        query: Takes the keys as ``$1`` and gives one row for each of them, in any order, with the key in its first
            column: ``SELECT id, jpeg, label FROM images WHERE id = ANY($1)``.
        keys: The keys, in the order of their indices; or a query whose first column they are, which is run once at
            construction.
        decode: Makes a sample of an :class:`asyncpg.Record`; without it the sample is a dict.
        max_connections: Connections of each worker at most.
        query_timeout_s: Seconds for one try of a query.
        connect_options: Further arguments of :func:`asyncpg.create_pool`, ``ssl`` or ``server_settings`` for example.
        retries: How transient failures are retried.
        decode_threads: Threads that decode, in each worker, a batch as one piece of work: by default one in a worker
            process and up to four without one; 0 decodes on the event loop.

    Raises:
        ImportError: asyncpg is not installed (``asyncloader[sql]``).

    A sample raises KeyError if there is no row for its key, with all such keys of the batch, ValueError if there are
    several, and :class:`~asyncloader.datasets.FetchError` if the server is out of reach for longer than ``retries``
    allow. Errors in the query are raised as asyncpg raises them.

    Example:
        ::

            dataset = SQLDataset(
                "postgresql://train@db.example/images",
                "SELECT id, jpeg, label FROM images WHERE id = ANY($1)",
                "SELECT id FROM images WHERE split = 'train' ORDER BY id",
                decode=lambda row: (decode_jpeg(row["jpeg"]), row["label"]),
            )
    """

    def __init__(
        self,
        dsn: str,
        query: str,
        keys: Iterable[Any] | str,
        decode: Callable[[asyncpg.Record], T_co] | None = None,
        *,
        max_connections: int = 4,
        query_timeout_s: float = 30.0,
        connect_options: Mapping[str, Any] | None = None,
        retries: Retries | None = None,
        decode_threads: int | None = None,
    ) -> None:
        require("asyncpg", "sql", "SQLDataset")
        super().__init__()
        self.dsn = dsn
        self.query = query
        self.decode = decode
        self.max_connections = max_connections
        self.query_timeout_s = query_timeout_s
        self.connect_options = dict(connect_options or {})
        self.retries = retries or Retries()
        self.decode_threads = decode_threads
        self.keys: Sequence[Any] = self._select_keys(keys) if isinstance(keys, str) else list(keys)

    def __len__(self) -> int:
        return len(self.keys)

    async def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Fetch and decode the rows of a batch, in one query."""
        opened = self._client
        wanted = [self.keys[index] for index in indices]
        asked = list(dict.fromkeys(wanted))
        rows = await self.retries.run(
            partial(opened.source.fetch, self.query, asked, timeout=self.query_timeout_s),
            f"{_named(asked)} from {_place(self.dsn)}",
        )
        by_key = _by_key(rows)
        missing = [key for key in asked if key not in by_key]
        if missing:
            raise KeyError(*missing)
        return await opened.threads.run(self._decode_all, [by_key[key] for key in wanted])

    def _decode_all(self, rows: list[asyncpg.Record]) -> list[Any]:
        return list(map(dict, rows)) if self.decode is None else all_decoded(self.decode, rows)

    def _connect(self) -> Opened[_Pool]:
        options = {"min_size": 0, "max_size": self.max_connections, "timeout": 10.0, **self.connect_options}
        return Opened(_Pool(self.dsn, options), self.decode_threads if self.decode else 0)

    def _select_keys(self, query: str) -> list[Any]:
        """Run a query here and now: on a loop of its own in a thread, for there may be one running in this one."""

        async def select() -> list[Any]:
            async with self:
                return [row[0] for row in await self._client.source.fetch(query)]

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self.retries.run(select, query))).result()


class _Pool:
    """Connections, made when queries want them, within their retries. Belongs to one loop."""

    def __init__(self, dsn: str, options: Mapping[str, Any]) -> None:
        import asyncpg

        self._make = partial(asyncpg.create_pool, dsn, **options)
        self._turn = asyncio.Lock()
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def fetch(self, query: str, *arguments: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """Make one try of a query."""
        with _failures_told_apart():
            async with self._turn:
                self._pool = self._pool or await self._make()
            return await self._pool.fetch(query, *arguments, timeout=timeout)

    async def aclose(self) -> None:
        """Take leave of the server, if it is there and answers."""
        if self._pool is not None:
            try:
                async with asyncio.timeout(_FAREWELL_S):
                    await self._pool.close()
            except Exception:
                self._pool.terminate()


def _by_key(rows: Sequence[asyncpg.Record]) -> dict[Any, asyncpg.Record]:
    by_key = {row[0]: row for row in rows}
    if len(by_key) < len(rows):
        counts = Counter(row[0] for row in rows)
        twice = next(key for key in counts if counts[key] > 1)
        raise ValueError(
            f"the query gives {counts[twice]} rows for the key {twice!r}, and which of them is the sample cannot be "
            "told: its first column has to be unique"
        )
    return by_key


@contextlib.contextmanager
def _failures_told_apart() -> Iterator[None]:
    """Turn errors that may pass into TransientError; let the others through as they are."""
    import asyncpg

    try:
        yield
    except (OSError, TimeoutError) as error:
        raise TransientError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except asyncpg.PostgresError as error:
        if not (error.sqlstate or "").startswith(_PASSING):
            raise
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except asyncpg.InternalClientError as error:  # its state is mixed up when a connection goes just as it is set up
        raise TransientError(f"{type(error).__name__}: {error}") from error
    except asyncpg.InterfaceError as error:
        if "closed" not in str(error):  # a misuse
            raise
        raise TransientError(f"{type(error).__name__}: {error}") from error


def _place(dsn: str) -> str:
    """Name a database without the password that may be in its dsn."""
    parts = urlsplit(dsn)
    return f"PostgreSQL at {parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else "PostgreSQL"


def _named(keys: list[Any]) -> str:
    shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
    return f"row {shown}" if len(keys) == 1 else f"rows {shown}{', ...' if len(keys) > _KEYS_SHOWN else ''}"
