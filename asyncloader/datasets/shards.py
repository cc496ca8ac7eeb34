"""Samples of tar files, split over ranks and workers.

shards ── the epoch's order, this reader's share ──> read ahead ──> samples ──> shuffle buffer ──> decode
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import torch.distributed
from torch.utils.data import get_worker_info

from asyncloader import identity
from asyncloader.checks import at_least
from asyncloader.datasets.limits import MAX_BYTES
from asyncloader.datasets.opened import Openable, Opened
from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.datasets.sources import Access, Sources
from asyncloader.datasets.tar import RawSample, read_samples
from asyncloader.errors import ConfigurationError, StateMismatchError

T_co = TypeVar("T_co", covariant=True)

_CHUNKS_AHEAD = 4
_MOST_PADDING = 1 << 22  # bytes behind the end of an archive: tar fills its last record, of 10 KiB as a rule
_STATE_VERSION = 1
_ADVICE = dict.fromkeys(
    ("rank", "world_size", "worker", "num_workers"),
    "Each worker of each rank reads a share of its own: resume with as many as there were, each from its own state.",
)


class TarShards(Openable[Opened[Sources]], Generic[T_co]):
    """Read samples from tar files, one after the other: an async iterable dataset.

    The layout is `WebDataset <https://github.com/webdataset/webdataset>`_'s: ``shard-0003.tar`` holds ``a/17.jpg``,
    ``a/17.cls``, ``a/18.jpg``, ... The files of a sample have the same name up to the first dot after the last slash,
    and follow each other.

    Each shard is read by one worker of one rank, as a stream. If there are fewer shards than workers of all ranks
    together, several read the same shard and each takes its share of the samples; so no sample comes twice, and none is
    left out. Ranks may get different numbers of samples; where each step needs all ranks, see ``equal_steps`` of
    :class:`asyncloader.DataLoader`, or take :class:`IndexedTarShards`.

    The order depends on ``seed``, the epoch, and the numbers of ranks and workers. Call :meth:`set_epoch` before each
    epoch, as with torch's DistributedSampler; otherwise all are alike. Persistent workers have copies of the dataset,
    which :meth:`asyncloader.DataLoader.set_epoch` reaches; without it they count from the epoch that they began with.

    Args:
        shards: Paths and urls: ``file``, ``http``, ``https``, and those of object stores (``s3``, ``gs``, ``az``).
            Shards that end with ``.gz`` or ``.tgz`` are decompressed.
        decode: Makes a sample of a dict with the content of each file by its extension, in lower case, the common name
            under ``"__key__"`` and the shard under ``"__url__"``; without it the dict is the sample. Runs on a thread.
        shuffle_shards: Whether to read the shards in another order in each epoch.
        shuffle_buffer: How many samples wait, not decoded, for one of them to be drawn at random; 0 keeps their order.
        seed: The seed of both shuffles.
        rank, world_size: Which part of the data this process gets; by default as torch.distributed says if it is
            initialised when an epoch starts, otherwise everything.
        headers: For HTTP.
        config, client_options, credential_provider: For object stores, as
            :class:`~asyncloader.datasets.ObjectStoreDataset` takes them.
        retries: How transient failures are retried, for each 64 KiB of a shard. A stream that broke goes on where it
            broke; if the shard was changed meanwhile, that is an error.
        max_bytes: How large a sample may be in its shard, headers and what follows it up to the next one included.
        decode_threads: 0 decodes on the event loop.

    Raises:
        ImportError: The client for shards on HTTP (``asyncloader[http]``) or in an object store
            (``asyncloader[objects]``) is not installed.

    A state is one of a worker's share: it is refused by a dataset of other shards, another order, rank or worker. A
    worker that dies is replaced, once a batch has told where it was.

    A shard raises FileNotFoundError if it is not there, and FetchError if it is damaged, was cut off, or does not come;
    if it has sparse files (their holes could be any amount of memory), or a sample two files with one extension.
    Reading takes memory for a file of the shard at a time, and writes none; do not take ``"__key__"`` for a safe path
    of your own if you have not packed the shard yourself.

    Example:
        >>> import asyncio, io, pathlib, tarfile, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "shard.tar"
        >>> with tarfile.open(path, "w") as shard:
        ...     for name, data in (("0.txt", b"zero"), ("0.cls", b"7"), ("1.txt", b"one"), ("1.cls", b"8")):
        ...         info = tarfile.TarInfo(name)
        ...         info.size = len(data)
        ...         shard.addfile(info, io.BytesIO(data))
        >>> dataset = TarShards([path], lambda sample: (sample["txt"].decode(), int(sample["cls"])))
        >>> async def main():
        ...     async with dataset:
        ...         return [sample async for sample in dataset]
        >>> asyncio.run(main())
        [('zero', 7), ('one', 8)]
    """

    def __init__(
        self,
        shards: Iterable[str | os.PathLike[str]],
        decode: Callable[[RawSample], T_co] | None = None,
        *,
        shuffle_shards: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        headers: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        credential_provider: Any = None,
        retries: Retries | None = None,
        max_bytes: int = MAX_BYTES,
        decode_threads: int = 1,
    ) -> None:
        super().__init__()
        at_least("max_bytes", max_bytes, least=1)
        self.shards = [os.fspath(shard) for shard in shards]
        if not self.shards:
            raise ConfigurationError("there are no shards")
        if (rank is None) != (world_size is None) or (
            rank is not None and world_size is not None and not 0 <= rank < world_size
        ):
            raise ConfigurationError(f"rank {rank} of world_size {world_size} is none; give both, or none of them")
        self.access = Access.to(self.shards, "TarShards", retries, headers, config, client_options, credential_provider)
        self.decode = decode
        self.shuffle_shards = shuffle_shards
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self._part = None if rank is None or world_size is None else (rank, world_size)
        self.max_bytes = max_bytes
        self.decode_threads = decode_threads
        self._next = _Progress(0)
        self._progress: _Progress | None = None  # of the newest iterator

    counts_epochs = True

    @property
    def rank(self) -> int:
        """Which part of the data this process gets."""
        return (self._part or _rank_and_world_size())[0]

    @property
    def world_size(self) -> int:
        """How many parts there are."""
        return (self._part or _rank_and_world_size())[1]

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self._next = _Progress(epoch)

    def __aiter__(self) -> AsyncGenerator[T_co, None]:
        # Set the state eagerly: a finished epoch yields no sample, so a lazy body would never run.
        progress, worker = self._next, _worker()
        if progress.is_within:
            identity.check(progress.worker, worker, advice=_ADVICE)
        self._progress = progress = dataclasses.replace(progress, worker=worker)
        self._next = _Progress(
            progress.epoch + (progress.ended or bool(get_worker_info()))
        )  # a worker has a copy of its own
        return self._read(self._reader(), progress)

    async def _read(self, reader: tuple[int, int], progress: _Progress) -> AsyncGenerator[T_co, None]:
        if progress.ended:  # an epoch that is over is not read: this is the one after it
            progress.epoch, progress.samples, progress.ended = self._next.epoch, 0, False
            self._next = _Progress(progress.epoch + bool(get_worker_info()))
        opened = self._client
        number = 0
        async with contextlib.aclosing(self._shuffled(opened.source, reader, progress.epoch)) as samples:
            async for sample in samples:
                number += 1
                if number <= progress.samples:
                    continue
                progress.samples = number
                yield sample if self.decode is None else await opened.threads.run(self.decode, sample)  # type: ignore[misc]
        progress.ended = True
        if self._progress is progress and not get_worker_info():
            self._progress = None  # without workers the next state is one between two epochs

    def state_dict(self) -> dict[str, Any]:
        """Tell how far this worker's share of the epoch has been read, and what the share depends on."""
        progress = self._progress or self._next
        count = {"epoch": progress.epoch, "samples": progress.samples, "ended": progress.ended}
        return {"version": _STATE_VERSION, **count, **(progress.worker or _worker()), **identity.of(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch of this worker be the one that was saved, without the samples that had been taken.

        They are read again, and not decoded. A state between two epochs fits any number of ranks and workers.

        Raises:
            StateMismatchError: if the state is of other shards, another order, rank or number of ranks, or if an
                earlier version took it in the middle of an epoch. A state of another worker, or another number of
                workers, raises it when the epoch begins.
        """
        worker = {name: state[name] for name in _worker() if name in state}
        progress = _Progress(state["epoch"], state["samples"], state.get("ended", False), worker)
        if "version" not in state and progress.is_within:
            anew = {"epoch": progress.epoch, "samples": 0}
            advice = f"It does not say whose share of which shards was read. The state {anew} begins the epoch anew."
            raise StateMismatchError("version", None, _STATE_VERSION, advice)
        identity.check({"version": _STATE_VERSION, **state}, {"version": _STATE_VERSION})
        identity.check(state, identity.of(self), free=() if progress.is_within else identity.RANKS, advice=_ADVICE)
        self._next, self._progress = progress, None

    def _state_identity(self) -> dict[str, Any]:
        return {
            "shards": self._checksum,
            "shuffle_shards": self.shuffle_shards,
            "shuffle_buffer": self.shuffle_buffer,
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return identity.checksum(_names(self.shards))

    def _reader(self) -> tuple[int, int]:
        """Return which of those who read the data this is, and how many they are: workers of all ranks together."""
        worker, num_workers = _worker().values()
        return self.rank * num_workers + worker, self.world_size * num_workers

    async def _shuffled(self, sources: Sources, reader: tuple[int, int], epoch: int) -> AsyncGenerator[RawSample, None]:
        """Draw from a buffer that is filled up again after each sample."""
        rng = random.Random(f"{self.seed} {epoch} {reader[0]}")
        buffer: list[RawSample] = []
        async with contextlib.aclosing(self._share(sources, reader, epoch)) as samples:
            async for sample in samples:
                if len(buffer) < self.shuffle_buffer:
                    buffer.append(sample)
                    continue
                if buffer:
                    place = rng.randrange(len(buffer))
                    buffer[place], sample = sample, buffer[place]
                yield sample
        rng.shuffle(buffer)
        for sample in buffer:
            yield sample

    async def _share(self, sources: Sources, reader: tuple[int, int], epoch: int) -> AsyncGenerator[RawSample, None]:
        """Yield the samples that are this reader's, in the order of the shards."""
        order = list(self.shards)
        if self.shuffle_shards:
            random.Random(f"{self.seed} {epoch}").shuffle(order)  # the same for all ranks and workers
        mine, part, parts = share_of(order, *reader)
        async with contextlib.aclosing(_read_ahead(sources, mine, self.access.retries)) as shards:
            async for url, chunks in shards:
                number = 0
                async with contextlib.aclosing(read_samples(chunks, url, self.max_bytes)) as samples:
                    async for sample in samples:
                        if number % parts == part:
                            yield sample
                        number += 1

    def _connect(self) -> Opened[Sources]:
        return Opened(Sources(self.access), self.decode_threads if self.decode else 0)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if _is_distributed():  # which a spawned worker is not
            state["_part"] = self.rank, self.world_size
        return state


@dataclasses.dataclass
class _Progress:
    """How far a worker is in its share of an epoch, or begins in the next one.

    Attributes:
        epoch: Its number.
        samples: Samples of the share that were read.
        ended: The share was read to its end. A worker counts epochs by itself: its next samples are the next epoch's.
        worker: Which worker of how many has that share.
    """

    epoch: int
    samples: int = 0
    ended: bool = False
    worker: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_within(self) -> bool:
        """Whether it is in the middle of an epoch."""
        return self.samples > 0 and not self.ended


def share_of(shards: list[str], reader: int, readers: int) -> tuple[list[str], int, int]:
    """Return the shards that one of so many readers reads, and which of their samples are its own: part i of n."""
    if len(shards) >= readers:
        return shards[reader::readers], 0, 1
    place = reader % len(shards)
    return [shards[place]], reader // len(shards), len(range(place, readers, len(shards)))


def _worker() -> dict[str, int]:
    info = get_worker_info()
    return {"worker": info.id if info else 0, "num_workers": info.num_workers if info else 1}


def _names(shards: list[str]) -> list[str]:
    """Return what tells shards from others wherever they lie: paths within the folder that they have in common.

    Without queries, which may be signatures of an hour, unless these tell them apart.
    """
    plain = [urlsplit(shard)._replace(query="", fragment="").geturl() if "://" in shard else shard for shard in shards]
    names = plain if len(set(plain)) == len(set(shards)) else shards
    folders = zip(*(name.split("/")[:-1] for name in names), strict=False)
    within = sum(len(level[0]) + 1 for level in takewhile(lambda level: len(set(level)) == 1, folders))
    return [name[within:] for name in names]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank_and_world_size() -> tuple[int, int]:
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _is_distributed() else (0, 1)


async def _read_ahead(
    sources: Sources, urls: list[str], retries: Retries
) -> AsyncGenerator[tuple[str, AsyncIterator[bytes]], None]:
    """Yield each file with its chunks, which are read some way ahead, the beginning of the next file included."""
    queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(_CHUNKS_AHEAD)

    async def fill() -> None:
        try:
            for url in urls:
                async with contextlib.aclosing(sources.read(url)) as chunks:
                    async for chunk in chunks:
                        await queue.put(chunk)
                await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def chunks_of_one() -> AsyncIterator[bytes]:
        while (chunk := await queue.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    filling = asyncio.create_task(fill())
    try:
        for url in urls:
            chunks = chunks_of_one()
            yield url, chunks
            await retries.run(partial(_pass_over, chunks, url), f"{url}, behind the end of the archive")
    finally:
        filling.cancel()
        await asyncio.wait({filling})


async def _pass_over(chunks: AsyncIterator[bytes], url: str) -> None:
    """Read the padding behind the end of an archive, and so to the checksum of one that is compressed."""
    passed = 0
    async for chunk in chunks:
        passed += len(chunk)
        if passed > _MOST_PADDING:
            raise FetchError(f"{url}: damaged: more than {_MOST_PADDING:,} bytes follow behind the end of the archive")
