"""Local files, read and decoded on a thread."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.utils.data import Dataset

from asyncloader.datasets.extras import require
from asyncloader.datasets.limits import open_regular
from asyncloader.datasets.opened import Openable, Threads
from asyncloader.errors import ConfigurationError
from asyncloader.seeding.sample_context import sample_at
from asyncloader.seeding.turns import sample_seed

T_co = TypeVar("T_co", covariant=True)

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class FileDataset(Openable[Threads], Dataset[T_co]):
    """Serve files, each read whole and decoded by a function of yours.

    A batch is one job of a thread that reads and decodes one file after the other, while the loop goes on. This
    is the fastest way to read local files in asyncio: one job for each file, and aiofiles, which makes three jobs of
    each, cost more than reading a small file does (tests/benchmarks/files.py). Where opening a file takes long, as on a
    file server, give it more ``threads``: each file is then a job of its own.

    Args:
        files: The files, in the order of their indices; or a folder, of which all files that match ``pattern`` are
            taken, sorted by path.
        decode: Makes a sample of a file's bytes and its path; without it the bytes are the sample. Runs on a thread:
            several at once only if there are several ``threads``. Random numbers come from
            :func:`asyncloader.sample_rng`; or, with ``seeding="sample"``, from the global generators: files are then
            read by all threads, and decoded by one at a time (:class:`asyncloader.sample_seed`).
        pattern: Which files of a folder to take, as in :meth:`pathlib.Path.glob`.
        threads: Threads that read and decode, in each worker. 0 reads on the event loop itself.

    Raises:
        FileNotFoundError: The folder does not exist, or no file in it matches.

    Example:
        >>> import asyncio, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("a.txt", "b.txt"):
        ...     _ = (folder / name).write_text(name * 2)
        >>> dataset = FileDataset(folder, lambda data, path: (path.stem, data.decode()))
        >>> async def main():
        ...     async with dataset:
        ...         return await dataset[1]
        >>> asyncio.run(main())
        ('b', 'b.txtb.txt')
    """

    seeds_samples = True

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        decode: Callable[[bytes, Path], T_co] | None = None,
        *,
        pattern: str = "**/*",
        threads: int = 1,
    ) -> None:
        super().__init__()
        if threads < 0:
            raise ConfigurationError(f"threads must not be negative, but got {threads}")
        if isinstance(files, (str, os.PathLike)):
            self.files: Sequence[str] = _files_in(Path(files), pattern)
        else:
            self.files = [os.fspath(file) for file in files]
        self.decode = decode
        self.threads = threads
        if threads > 1:
            self.__getitems__ = None  # type: ignore[method-assign, assignment]  # batches are fetched file by file

    def __len__(self) -> int:
        return len(self.files)

    async def __getitem__(self, index: int) -> T_co:  # type: ignore[override]  # Dataset's is not asynchronous
        """Read and decode one file."""
        return await self._client.run(self.load, index)

    async def __getitems__(self, indices: list[int]) -> list[T_co]:
        """Read and decode the files of a batch."""
        return await self._client.run(self._load_all, indices)

    def load(self, index: int) -> T_co:
        """Read and decode one file, here and now; called on the threads."""
        with open_regular(self.files[index]) as file:
            data = file.read()
        with sample_seed():
            return self._made(index, data)

    def _made(self, index: int, data: bytes) -> T_co:
        return cast(T_co, data) if self.decode is None else self.decode(data, Path(self.files[index]))

    def _load_all(self, indices: list[int]) -> list[T_co]:
        samples = []
        for position, index in enumerate(indices):
            with sample_at(position):
                samples.append(self.load(index))
        return samples

    def _connect(self) -> Threads:
        return Threads(self.threads)


class ImageFolder(FileDataset[tuple[Any, int]]):
    """Serve the images of a folder with one folder per class, as torchvision's class of this name does.

    Images have the same indices as there: folders in the order of their paths, and in each its files by name.

    Args:
        root: Folder whose sub-folders, sorted by name, are the classes. Images may lie deeper in them. Links to folders
            are followed, but not back into a folder that they lie in.
        transform: Makes of an image what goes into the sample. If it draws from the global generators, as most do, give
            the loader ``seeding="sample"``: so the same images come of any number of workers and threads.
        decode: Makes an image of a file's bytes and its path; by default a PIL image in RGB.
        suffixes: Which files are images, whatever the case; by default those of torchvision, which leave
            out ``.gif``.
        threads: As for :class:`FileDataset`.

    Attributes:
        classes: Names of the classes; a sample is ``(transform(image), index of its class)``.
        class_to_idx: The indices by name.
        targets: The class of each file.

    Raises:
        ConfigurationError: ``suffixes`` is one text.
        FileNotFoundError: The folder does not exist, has no classes, or a class has no image.
        ImportError: Pillow, which the default ``decode`` needs, is not installed (``asyncloader[images]``).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Callable[[bytes, Path], Any] | None = None,
        suffixes: Sequence[str] = IMAGE_SUFFIXES,
        threads: int = 1,
    ) -> None:
        if decode is None:
            require("PIL.Image", "images", "ImageFolder")
        if isinstance(suffixes, str):
            raise ConfigurationError(f"suffixes is a list of them, such as [{suffixes!r}], but got {suffixes!r}")
        self.root = Path(root)
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if not self.classes:
            raise FileNotFoundError(errno.ENOENT, "there is no folder of a class in it", os.fspath(root))
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        of_classes = [_images_in(os.fspath(self.root / name), suffixes) for name in self.classes]
        self.targets = [index for index, files in enumerate(of_classes) for _ in files]
        self.transform = transform
        super().__init__([file for files in of_classes for file in files], decode or open_rgb, threads=threads)

    def _made(self, index: int, data: bytes) -> tuple[Any, int]:
        image: Any = super()._made(index, data)
        return (image if self.transform is None else self.transform(image)), self.targets[index]


def open_rgb(data: bytes, path: Path) -> Any:
    """Decode an image to a PIL image in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _files_in(folder: Path, pattern: str) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", os.fspath(folder))
    files = sorted(str(path) for path in folder.glob(pattern) if path.is_file())
    if not files:
        raise FileNotFoundError(errno.ENOENT, f"nothing in it is {pattern}", os.fspath(folder))
    return files


def _images_in(folder: str, suffixes: Sequence[str]) -> list[str]:
    endings = tuple(suffix.lower() for suffix in suffixes)
    images = [
        os.path.join(path, name)
        for path, names in sorted(_walk(folder))
        for name in sorted(names)
        if name.lower().endswith(endings)
    ]
    if not images:
        wanted = f"nothing in it is a file that ends with one of {', '.join(suffixes)}"
        raise FileNotFoundError(errno.ENOENT, wanted, folder)
    return images


def _walk(folder: str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder with the names of its files. os.walk follows links that lead in a circle 40 times."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        below: list[str] = []
        files: list[str] = []
        for entry in entries:
            (below if entry.is_dir() else files).append(entry.name)
    yield folder, files
    for name in below:
        yield from _walk(os.path.join(folder, name), above | {here})
