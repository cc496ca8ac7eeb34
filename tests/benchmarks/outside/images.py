"""JPEG images by the rules of four: imread-benchmark, torchdata's imagenet example, datago, turboloader."""

from __future__ import annotations

import gc
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting, loader_class

Pixels = npt.NDArray[np.uint8]


# ---- imread-benchmark: how fast a loader supplies decoded images ----


class Jpegs(Dataset[Pixels]):
    """JPEG files in memory, decoded by Pillow to arrays of (height, width, 3) when they are asked for."""

    def __init__(self, encoded: list[bytes], repeats: int) -> None:
        self._encoded, self._repeats = encoded, repeats

    def __len__(self) -> int:
        return len(self._encoded) * self._repeats

    def __getitem__(self, index: int) -> Pixels:
        from PIL import Image

        with Image.open(io.BytesIO(self._encoded[index % len(self._encoded)])) as image:
            return np.array(image.convert("RGB"), copy=True)


def as_it_is(samples: Any) -> Any:
    return samples


def supply(name: str, workers: int, setting: Setting) -> Run:
    """A pass that checks, one that warms up, and one that counts, with workers that stay; images a second."""
    encoded = [path.read_bytes() for path in sorted((setting.folder / "large").iterdir())]
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": 1, "persistent_workers": True}
    dataset = Jpegs(encoded, 2 if setting.quick else 6)
    loader = loader_class(name)(dataset, 1, num_workers=workers, collate_fn=as_it_is, **options if workers else {})
    for _ in range(2):
        assert sum(len(batch) for batch in loader) == len(dataset)
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    for batch in loader:
        assert batch[0].shape == (1536, 2048, 3)
    return Run(len(dataset) / (time.perf_counter() - began))


def write_large(setting: Setting) -> None:
    from tests.benchmarks.photos import photographs

    write(setting.folder / "large", photographs(8, (2048, 1536)))


def supply_benchmark(workers: int) -> Benchmark:
    return Benchmark(
        title=f"{workers} workers",
        unit="images/s",
        whose="imread-benchmark's loader-supply",
        link="https://github.com/ternaus/imread_benchmark",
        rules="JPEG images of 2048 by 1536 pixels in memory, decoded by Pillow to arrays; batches of one, not "
        "collated, spawned workers that stay, `prefetch_factor=1`; one pass is timed after two that are "
        "not.",
        sides={name: partial(supply, name, workers) for name in ("torch", "asyncloader")},
        prepare=write_large,
        rounds=5,
    )


# ---- torchdata's imagenet example ----


class Cropped(Dataset[dict[str, Any]]):
    """Files, opened and decoded by Pillow, the middle of 224 by 224 pixels as a tensor."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(path) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return crop({"img_path": self.paths[index]})


def crop(sample: dict[str, Any]) -> dict[str, Any]:
    import torch
    from PIL import Image

    with Image.open(sample["img_path"]) as image:
        pixels: Tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    top, left = ((side - 224) // 2 for side in pixels.shape[1:])
    return {**sample, "img": pixels[:, top : top + 224, left : left + 224]}


def crop_batch(samples: list[dict[str, Any]]) -> Any:
    from torch.utils.data import default_collate

    return default_collate([crop(sample) for sample in samples])


def nodes(dataset: Cropped, method: str) -> Iterable[Any]:
    """The example's nodes: the batch is made first, and one worker decodes all of it."""
    import torchdata.nodes as tn

    def forever() -> Iterator[dict[str, str]]:
        while True:
            yield from ({"img_path": path} for path in dataset.paths)

    node: Any = tn.IterableWrapper(forever())
    node = tn.Batcher(node, batch_size=16)
    node = tn.ParallelMapper(node, crop_batch, num_workers=4, in_order=False, method=method)  # the example's default
    return tn.Loader(tn.Prefetcher(node, prefetch_factor=2))


def imagenet(name: str, setting: Setting) -> Run:
    """Images a second from the moment when the iterator is there, the first batch included."""
    dataset = Cropped(setting.folder / "photos")
    steps = 20 if setting.quick else 100
    method = {"torchdata.nodes, processes": "process", "torchdata.nodes, threads": "thread"}.get(name)
    if method:
        loader = nodes(dataset, method)
    else:
        from torch.utils.data import RandomSampler

        endless = RandomSampler(dataset, num_samples=16 * (steps + 16))
        loader = loader_class(name)(dataset, batch_size=16, sampler=endless, num_workers=4)
    iterator = iter(loader)
    began = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    return Run(16 * steps / (time.perf_counter() - began))


def write_photos(setting: Setting) -> None:
    from tests.benchmarks.photos import photographs

    write(setting.folder / "photos", photographs(40 if setting.quick else 200, (500, 375)))


# ---- datago: a folder of JPEGs, to images of Pillow's ----


class Opened(Dataset[Any]):
    """Files, decoded to images of Pillow's; resized as datago's benchmark does for torch."""

    def __init__(self, folder: Path, side: int | None, count: int) -> None:
        self.paths, self.side, self.count = sorted(folder.iterdir()), side, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[index % len(self.paths)]) as image:
            rgb = image.convert("RGB")
        return rgb.resize((self.side, self.side), Image.Resampling.LANCZOS) if self.side else rgb


def folder_of_images(name: str, side: int | None, setting: Setting) -> Run:
    """Images a second, the start of workers or threads included."""
    count = len(os.listdir(setting.folder / "photos"))
    began = time.perf_counter()
    samples = datago(setting.folder / "photos", side, count) if name == "datago" else opened(name, setting, side, count)
    assert sum(1 for _ in samples) == count
    return Run(count / (time.perf_counter() - began))


def opened(name: str, setting: Setting, side: int | None, count: int) -> Iterable[Any]:
    dataset = Opened(setting.folder / "photos", side, count)
    loader: Iterable[Any] = loader_class(name)(dataset, 1, num_workers=cores(), collate_fn=as_it_is)
    return loader


def datago(folder: Path, side: int | None, count: int) -> Iterator[Any]:
    os.environ["DATAGO_MAX_TASKS"] = str(cores())
    from datago import DatagoClient

    config: dict[str, Any] = {
        "source_type": "file",
        "source_config": {"root_path": str(folder), "rank": 0, "world_size": 1},
        "prefetch_buffer_size": 256, "samples_buffer_size": 256, "limit": count,
    }  # fmt: skip
    if side:
        config["image_config"] = {
            "crop_and_resize": True, "default_image_size": side, "downsampling_ratio": 32, "min_aspect_ratio": 0.5,
            "max_aspect_ratio": 2.0, "pre_encode_images": False,
        }  # fmt: skip
    client = DatagoClient(json.dumps(config))
    client.start()
    for _ in range(count):
        yield client.get_sample_auto_convert()["image"]
    client.stop()


def folder_benchmark(side: int | None) -> Benchmark:
    return Benchmark(
        title="resized to 1024" if side else "decoded",
        unit="images/s",
        whose="datago's folder of JPEGs",
        link="https://github.com/Photoroom/datago/blob/main/python/benchmark_filesystem.py",
        rules="Files of 500 by 375 pixels, to images of Pillow's one by one, as they are or resized to 1024 by "
        "1024 or so (Lanczos); as many workers or threads as cores, whose start is included.",
        sides={name: partial(folder_of_images, name, side) for name in ("torch", "datago", "asyncloader")},
        needs={"datago": "datago"},
        prepare=write_photos,
    )


# ---- turboloader: batches that a network can be fed with ----


MEAN, DEVIATION = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


class Normalized(Opened):
    """Images as float32 of (3, 224, 224), as networks for ImageNet take them."""

    def __getitem__(self, index: int) -> Tensor:
        import torch
        from PIL import Image

        with Image.open(self.paths[index % len(self.paths)]) as image:
            small = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
        scaled = (np.asarray(small, dtype=np.float32) / 255 - MEAN) / DEVIATION
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def ready_for_training(name: str, setting: Setting) -> Run:
    """Images a second in the second epoch, when threads have been started; workers of the others stay."""
    count = len(os.listdir(setting.folder / "photos")) * (1 if setting.quick else 4)
    count -= count % 32
    if name == "turboloader":
        import turboloader

        loader: Any = turboloader.DataLoader(
            str(setting.folder / "photos.tar"), batch_size=32, num_workers=cores(), image_size=224,
            output_format="pytorch", transform=turboloader.ImageNetNormalize(), drop_last=True,
        )  # fmt: skip
    else:
        dataset = Normalized(setting.folder / "photos", 224, count)
        loader = loader_class(name)(dataset, 32, num_workers=cores(), persistent_workers=True)
    for epoch in range(2):
        began, seen = time.perf_counter(), 0
        for batch in loader:
            images = batch[0] if isinstance(batch, tuple) else batch
            assert images.shape[1:] == (3, 224, 224)
            seen += len(images)
        rate = seen / (time.perf_counter() - began)
        assert epoch == 0 or seen
    return Run(rate)


def write_tar(setting: Setting) -> None:
    """The same photographs in a tar file, which is what turboloader reads; as often as others go through the folder."""
    write_photos(setting)
    with tarfile.open(setting.folder / "photos.tar", "w") as tar:
        for repeat in range(1 if setting.quick else 4):
            for path in sorted((setting.folder / "photos").iterdir()):
                tar.add(path, f"{repeat}-{path.name}")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def write(folder: Path, encoded: list[bytes]) -> None:
    if not folder.exists():
        folder.mkdir()
        for number, data in enumerate(encoded):
            (folder / f"{number:05}.jpg").write_bytes(data)


BENCHMARKS = [
    *map(supply_benchmark, (0, 2, 4)),
    Benchmark(
        title="decoded and cut",
        unit="images/s",
        whose="torchdata's imagenet example",
        link="https://github.com/meta-pytorch/data/blob/main/examples/nodes/imagenet_benchmark.py",
        rules="JPEG files (of 500 by 375 pixels, in place of ImageNet), decoded by Pillow, the middle of 224 by "
        "224; batches of 16, four workers, from the moment when the iterator is there. Nodes need not keep "
        "the order.",
        sides={
            name: partial(imagenet, name)
            for name in ("torch", "torchdata.nodes, processes", "torchdata.nodes, threads", "asyncloader")
        },
        needs={"torchdata.nodes, processes": "torchdata.nodes", "torchdata.nodes, threads": "torchdata.nodes"},
        prepare=write_photos,
    ),
    folder_benchmark(None),
    folder_benchmark(1024),
    Benchmark(
        title="resized to 224",
        unit="images/s",
        whose="turboloader's images for training",
        link="https://github.com/ALJainProjects/TurboLoader",
        rules="JPEG files of 500 by 375 pixels, to float32 of 224 by 224 in batches of 32, as many workers or "
        "threads as cores, the second epoch. turboloader reads a tar file, in C++; others decode with "
        "Pillow.",
        sides={name: partial(ready_for_training, name) for name in ("torch", "turboloader", "asyncloader")},
        needs={"turboloader": "turboloader"},
        prepare=write_tar,
    ),
]
