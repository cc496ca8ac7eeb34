"""Files read and decoded on threads."""

from __future__ import annotations

import asyncio
import contextvars
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asyncloader import ConfigurationError
from asyncloader.datasets import FileDataset, ImageFolder, TarShards


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten files, some of them a folder deeper."""
    for number in range(10):
        path = tmp_path / "texts" / ("even" if number % 2 == 0 else "") / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"text {number}")
    return tmp_path / "texts"


def number_of(data: bytes, path: Path) -> tuple[int, str]:
    return int(path.stem), data.decode()


@pytest.mark.parametrize("threads", [0, 1, 4])
async def test_samples_come_decoded_one_by_one_and_in_batches(texts: Path, threads: int) -> None:
    """Same samples for any number of threads; a batch keeps the order of its indices."""
    dataset = FileDataset(texts, number_of, pattern="**/*.txt", threads=threads)
    assert len(dataset) == 10
    numbers = [int(Path(file).stem) for file in dataset.files]
    assert numbers == [1, 3, 5, 7, 9, 0, 2, 4, 6, 8]  # sorted by path
    copy = pickle.loads(pickle.dumps(dataset))
    async with dataset, copy:
        assert await dataset[2] == (5, "text 5")
        wanted = [(numbers[index], f"text {numbers[index]}") for index in (7, 0, 3)]
        if threads <= 1:
            assert await copy.__getitems__([7, 0, 3]) == wanted
        else:
            assert copy.__getitems__ is None  # then every file is a job of its own
            assert await asyncio.gather(*(copy[index] for index in (7, 0, 3))) == wanted


async def test_decoding_leaves_the_loop_free_and_has_the_callers_context(texts: Path) -> None:
    """It runs on another thread, with the context variables of the caller, and its exceptions come as they are."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    go_on = threading.Event()

    def decode(data: bytes, path: Path) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if path.stem == "3":
            raise ValueError("broken", path.name)
        assert go_on.wait(10)  # set by the loop, which therefore is not blocked
        return variable.get()

    async with FileDataset([texts / "1.txt", texts / "3.txt"], decode) as dataset:
        variable.set("of the caller")
        sample = asyncio.ensure_future(dataset[0])
        await asyncio.sleep(0)
        go_on.set()
        assert await sample == "of the caller"
        with pytest.raises(ValueError, match="broken") as caught:
            await dataset[1]
        assert caught.value.args == ("broken", "3.txt")


async def test_missing_files_and_folders_are_named(texts: Path) -> None:
    """A folder that is not there, or has nothing that matches, is an error at construction; a file when it is read."""
    with pytest.raises(FileNotFoundError, match=r"no such folder.*nowhere"):
        FileDataset(texts / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"nothing in it is \*\.png"):
        FileDataset(texts, pattern="*.png")
    with pytest.raises(ValueError, match="threads must not be negative"):
        FileDataset(texts, threads=-1)
    async with FileDataset([texts / "1.txt", texts / "gone.txt"]) as dataset:
        assert await dataset[0] == b"text 1"
        with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
            await dataset[1]


async def test_open_only_between_enter_and_exit(texts: Path) -> None:
    """Two that have entered share the threads; the last who leaves closes; then it says what to do."""
    dataset = FileDataset(texts)
    with pytest.raises(RuntimeError, match=r"FileDataset is not open: .*async with"):
        await dataset[0]
    async with dataset:
        async with dataset:
            await dataset[0]
        await dataset[0]
        assert await asyncio.to_thread(asyncio.run, first_of(dataset)) == b"text 1"  # on a loop of its own
        await dataset[0]
    with pytest.raises(RuntimeError, match="not open"):
        await dataset[0]
    async with dataset:
        await dataset[0]


async def first_of(dataset: FileDataset[Any]) -> Any:
    async with dataset:
        return await dataset[0]


async def test_image_folder_has_the_classes_of_its_folders(tmp_path: Path) -> None:
    """Classes sorted by name, samples of image and class, other files left out, images as the transform makes them."""
    pixels = np.random.default_rng(0).integers(0, 255, (2, 3, 5, 4), np.uint8)
    for name, of_class in (("dog", pixels[:1]), ("cat", pixels[1:])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "readme.txt").write_text("no image")
        for number, picture in enumerate(of_class.transpose(0, 2, 3, 1)):
            Image.fromarray(picture).save(tmp_path / name / f"{number}.PNG")
    dataset = ImageFolder(tmp_path, np.asarray)
    assert (dataset.classes, dataset.targets) == (["cat", "dog"], [0, 1])
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    async with dataset:
        cat, dog = await dataset.__getitems__([0, 1])
    assert (cat[0] == pixels[1].transpose(1, 2, 0)).all()
    assert (dog[0] == pixels[0].transpose(1, 2, 0)).all()
    assert (cat[1], dog[1]) == (0, 1)
    async with ImageFolder(tmp_path, decode=lambda data, path: Image.open(io.BytesIO(data)).size) as sizes:
        assert await sizes[0] == ((4, 5), 0)
    (tmp_path / "fox").mkdir()
    with pytest.raises(FileNotFoundError, match="fox"):
        ImageFolder(tmp_path)


def listed_by_torchvision(root: Path) -> list[str]:
    """What make_dataset of torchvision.datasets.folder lists, where nothing leads in a circle."""
    return [
        os.path.join(folder, name)
        for of_class in sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        for folder, _, names in sorted(os.walk(root / of_class, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(".png")
    ]


# IMG_EXTENSIONS of torchvision.datasets.folder
OF_TORCHVISION = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def test_image_folder_takes_the_suffixes_of_torchvision(tmp_path: Path) -> None:
    """And no others, which would give the images behind them other indices."""
    (tmp_path / "a").mkdir()
    for suffix in (*OF_TORCHVISION, ".gif", ".avif", ".txt"):
        (tmp_path / "a" / f"image{suffix}").touch()
    dataset = ImageFolder(tmp_path, decode=lambda data, path: None)
    assert sorted(os.path.splitext(file)[1] for file in dataset.files) == sorted(OF_TORCHVISION)


def test_image_folder_lists_as_torchvision_does(tmp_path: Path) -> None:
    """Files of a folder before those of folders in it; linked folders too, each once along a path."""
    for name in (
        "root/a/z.png",
        "root/a/deep/y.png",
        "root/a/deep-er/x.PNG",
        "root/a.b/1.png",
        "far/0.png",
        "far/in/1.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    root = tmp_path / "root"
    for link in ("linked", "a/more", "a/deep/twice"):  # a class, and one folder at two places
        (root / link).symlink_to(tmp_path / "far")
    (root / "a" / "file.png").symlink_to(tmp_path / "far" / "0.png")
    (root / "a" / "broken").symlink_to(tmp_path / "none")
    expected = listed_by_torchvision(root)
    assert len(expected) == 11

    with pytest.raises(ConfigurationError, match=r"a list of them, such as \['.png'\]"):
        ImageFolder(root, decode=lambda data, path: None, suffixes=".png")

    def dataset() -> ImageFolder:
        return ImageFolder(root, decode=lambda data, path: None, suffixes=[".PNG"])

    assert dataset().files == expected
    assert [dataset().classes[target] for target in dataset().targets] == ["a"] * 8 + ["a.b"] + ["linked"] * 2
    (root / "a" / "circle").symlink_to(root / "a")
    (root / "a.b" / "other").symlink_to(tmp_path / "side")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "back").symlink_to(root / "a.b")
    assert dataset().files == expected


@pytest.mark.parametrize("kind", [FileDataset, ImageFolder, TarShards])
async def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(kind: Any, tmp_path: Path) -> None:
    """Nobody may ever write into it."""
    pipe = tmp_path / "class" / "1.png"
    pipe.parent.mkdir()
    os.mkfifo(pipe)

    async def first() -> None:
        dataset = await asyncio.to_thread(kind, tmp_path if kind is ImageFolder else [pipe])
        async with dataset:
            if kind is TarShards:
                await anext(aiter(dataset))
            else:
                await dataset[0]

    writer = asyncio.get_running_loop().call_later(20, os.open, pipe, os.O_RDWR)  # or the thread would never end
    with pytest.raises(OSError, match="is no regular file"):
        await first()
    assert not writer.cancelled()
    assert writer.when() > asyncio.get_running_loop().time(), "it was waited for"
    writer.cancel()
