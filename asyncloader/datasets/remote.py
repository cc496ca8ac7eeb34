"""Objects on servers and in buckets, through obstore."""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.checks import at_least
from asyncloader.datasets.apart import run_apart
from asyncloader.datasets.decoding import Decoder
from asyncloader.datasets.errors import MAX_BYTES, require
from asyncloader.datasets.numbers import ByNumber
from asyncloader.datasets.source import Part, Source, failures_told
from asyncloader.errors import ConfigurationError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)


class RemoteDataset(ByNumber[T_co]):
    """Serve objects that lie elsewhere, or ranges of them: over HTTP, or in S3, Google Cloud Storage, Azure.

    The objects are read by `obstore <https://developmentseed.org/obstore>`_, whose words the options are. A
    :class:`~asyncloader.DataLoader` has ``concurrency`` of them on their way at once in each worker; for everybody else
    ``dataset[0]`` is a sample like any other.

    Args:
        urls: What to serve, in the order of the indices: a url (``http``, ``https``, ``s3``, ``gs``, ``az``,
            ``abfss``), a path of this machine, or ``(url, start, stop)`` for the bytes from one up to, and not
            including, another. See :func:`list_urls` for all that a bucket has.
        decode: Makes a sample of the bytes, ``decode(data)``, or of them and the item of `urls`, ``decode(data, url)``;
            without it the bytes are the sample. In a worker it runs on the worker's loop, otherwise on a thread.
        store: A store of obstore's, in which the urls are names of objects. It travels to workers: those that cannot be
            pickled (a ``MemoryStore``) are for forked workers and none.
        max_bytes: How large an object may be; a larger one is an error. Ranges are as long as you say.
        store_options: What else :func:`obstore.store.from_url` takes: ``retry_config``, ``client_options`` (such as
            ``{"timeout": "2 min", "default_headers": {"authorization": "..."}}``), ``config`` (``region``,
            ``endpoint``, ``access_key_id``, ``skip_signature``, ...), ``credential_provider``. Settings that are not
            given come from the environment or the machine's role. By default obstore tries ten times within three
            minutes.

    Raises:
        ConfigurationError: There is nothing to serve, a url is of no kind that is known, a range is none.
        ImportError: obstore is not installed (``asyncloader[remote]``).

    A sample raises FileNotFoundError for what is not there, PermissionError for what may not be read, and
    :class:`FetchError` for what else does not come.

    To make the dataset asks no server. A process that has read samples (``dataset[0]``, or a loader with
    ``num_workers=0``) can no longer fork workers that do so: give such loaders
    ``multiprocessing_context="forkserver"``.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("first")
        >>> dataset = RemoteDataset([(folder / "a.txt").as_uri()], decode=bytes.decode)
        >>> dataset[0]
        'first'
    """

    is_remote = True

    def __init__(
        self,
        urls: str | Iterable[str | os.PathLike[str] | tuple[str, int, int]],
        decode: Callable[..., T_co] | None = None,
        *,
        store: ObjectStore | None = None,
        max_bytes: int = MAX_BYTES,
        **store_options: Any,
    ) -> None:
        self.urls = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
        self.decode = decode
        self.max_bytes = at_least("max_bytes", max_bytes, least=1)
        self._decoder = Decoder(decode)
        self._source = Source(store, store_options)
        self._source.check([_part(url).url for url in self.urls], type(self).__name__)

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> T_co:
        """Read one sample."""
        url = self.urls[operator.index(index)]
        data = self._source.read(_part(url, self.max_bytes))
        return self._decoder(data, url)  # type: ignore[no-any-return]

    async def getitem(self, index: int) -> T_co:
        """Read one sample, without blocking the loop."""
        url = self.urls[operator.index(index)]
        data = await self._source.read_async(_part(url, self.max_bytes))
        return await self._decoder.call_async(data, url)  # type: ignore[no-any-return]


def _part(url: Any, max_bytes: int | None = None) -> Part:
    """Return what is to be read for a sample.

    Raises:
        ConfigurationError: It is neither a url nor a range.
    """
    if isinstance(url, (str, os.PathLike)):
        return Part(os.fspath(url), max_bytes=max_bytes)
    try:
        where, start, stop = url
        where, start, stop = os.fspath(where), operator.index(start), operator.index(stop)
    except (TypeError, ValueError):
        raise ConfigurationError(f"a sample is a url or (url, start, stop), but got {url!r}") from None
    if not 0 <= start <= stop:
        raise ConfigurationError(f"{where}: there are no bytes from {start} up to {stop}")
    return Part(where, start, stop)


def list_urls(prefix: str, suffix: str | tuple[str, ...] = "", **store_options: Any) -> list[str]:
    """Return the urls of all objects that begin with a prefix, sorted, for a :class:`RemoteDataset`.

    A process of its own asks the server, which takes a second or two: so this one can still fork workers.

    Args:
        prefix: A folder of a bucket: ``s3://bucket/train``.
        suffix: Which to take: those that end so, or in one of several ways.
        store_options: As for :class:`RemoteDataset`.

    Raises:
        FileNotFoundError: There is none.
        FetchError: The listing did not succeed.
    """
    require("obstore", "remote", "list_urls")
    return run_apart(_list, prefix.rstrip("/"), suffix, store_options)


def _list(prefix: str, suffix: str | tuple[str, ...], store_options: Mapping[str, Any]) -> list[str]:
    """List objects, in a process of its own."""
    import obstore
    from obstore.store import from_url

    with failures_told(prefix):
        chunks = obstore.list(from_url(prefix, **store_options), chunk_size=1000)
        names = [entry["path"] for chunk in chunks for entry in chunk]
    urls = sorted(f"{prefix}/{name}" for name in names if name.endswith(suffix))
    if not urls:
        raise FileNotFoundError(errno.ENOENT, f"no object that ends with {suffix!r} is there", prefix)
    return urls
