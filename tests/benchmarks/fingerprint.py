"""fingerprint: what a digest of each batch costs.

Measured: batches/s with `fingerprint=True` and without, taking turns, and CPU seconds of all processes, of batches of
(64, 3, 224, 224) float32 (38.5 MB). Samples are photos of 500 x 375, decoded from JPEG, cropped and scaled, as for
ImageNet; or JPEGs of 224 x 224; or made of bytes in memory by one pass of numpy; or constant: then a batch is a copy
out of the cache into shared memory, and nothing else. Further, a dictionary of 114 tensors of 64 floats each. And the
CPU seconds of one digest of 38.5 MB beside those of zlib's crc32, of a sum of the same memory, and of a memcpy.

Target: at most 5 % of the throughput of batches of photos.

Found on two cores that others kept busy eight times over: the fingerprint took 5.3 ms of CPU beside the 136 of a batch
of photos (3.9 %), 4.0 beside 48 for small ones (8 %), 5.2 beside 17.6 for converted bytes (30 %), 4.9 beside 7.2 for
mere copies (67 %), and 0.57 beside 0.84 for the dictionary (68 %). So 5 % hold where a batch of this size takes some
100 ms of CPU. Throughput of photos was 0.97 and 1.01 of that without, in two runs with 1 worker, and 0.95 and 1.23 with
2 (rounds from 0.74 to 1.9): such noise hides it, and the 4 to 5 ms of CPU of all large batches are the figure. In
private memory a digest took 4.05 ms, a sum 3.95, a memcpy 6.6, crc32 17.2; on quieter cores 2.6, 2.6, 5.8 and 16. Tried
without success: hashing each row right behind its copy. Copying row by row took 1 ms more than torch's `stack`, and all
in all 11.5 ms, as copying and then hashing.
"""

from __future__ import annotations

import ctypes
import io
import statistics
import zlib
from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.worker.digest import Digester
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, drain
from tests.benchmarks.transport import IMAGES, Constant, dictionary, image


class Photos(Dataset[torch.Tensor]):
    """The same JPEG at every index, decoded anew each time: of 500 x 375, cropped and scaled to 224 x 224, or of 224.

    Args:
        size: Of the file's picture, in pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).resize(size).save(file, "JPEG", quality=90)
        self.file = file.getvalue()

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = PIL.Image.open(io.BytesIO(self.file))
        if picture.size != (224, 224):
            picture = picture.resize((224, 224), PIL.Image.Resampling.BILINEAR, box=(40, 30, 380, 350))
        return torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).astype(np.float32) / 255)


class Converted(Dataset[torch.Tensor]):
    """Bytes in memory as float32, by one pass of numpy."""

    def __init__(self) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224), np.uint8)

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.multiply(self.pixels, np.float32(1 / 255)))


def run(dataset: Callable[[], Any], batch_size: int | None, workers: int, batches: float, fingerprint: bool) -> Run:
    loader = DataLoader(dataset(), batch_size, num_workers=workers, fingerprint=fingerprint)
    return drain(loader, None, warm_up=4, batches=batches, seconds=float("inf"))


PHOTOS, SMALL = partial(Photos, (500, 375)), partial(Photos, (224, 224))
CASES: dict[str, tuple[Callable[[], Any], int | None, int, int, Target | None]] = {
    "photos, 1 worker": (PHOTOS, 64, 1, 8, Target(">=", 0.95)),
    "photos, 2 workers": (PHOTOS, 64, 2, 16, Target(">=", 0.95)),
    "small photos, 1 worker": (SMALL, 64, 1, 20, None),
    "converted, 1 worker": (Converted, 64, 1, 50, None),
    "constant, 1 worker": (lambda: Constant(image(224)), 64, 1, 150, None),
    "114 tensors, 1 worker": (lambda: Constant(dictionary()), None, 1, 3000, None),
}


def measure(bench: Bench) -> None:
    digests(bench, 5 if bench.quick else 31)
    for title, (dataset, batch_size, workers, batches, target) in CASES.items():
        batches = max(4, batches // 10) if bench.quick else batches
        sides = {
            "without": partial(run, dataset, batch_size, workers, batches, False),
            "fingerprint": partial(run, dataset, batch_size, workers, batches, True),
        }
        targets = {} if target is None else {"fingerprint": target}
        found = bench.compare(title, "batches/s", sides, rounds=2 if bench.quick else 7, targets=targets)
        cpu = [[each.extras["cpu us/batch"] for each in found[name]] for name in sides]
        more = statistics.median(one - other for other, one in zip(*cpu, strict=True))
        bench.note(f"{title}: CPU of the fingerprint", us_per_batch=more, share=more / statistics.median(cpu[0]))


def digests(bench: Bench, rounds: int) -> None:
    """Compare ways to read all of a batch once; sides take turns."""
    batch, copy, digest = torch.rand(IMAGES), torch.empty(IMAGES), Digester()
    memory = batch.numpy().reshape(-1)
    jobs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(copy.data_ptr(), batch.data_ptr(), batch.nbytes),
        "sum": memory.view(np.uint64).sum,
        "digest": lambda: digest(batch),
        "crc32": lambda: zlib.crc32(memory.data),
    }
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            began = thread_time()
            job()
            spent[name].append((thread_time() - began) * 1e3)
    bench.note("CPU ms for 38.5 MB", **{name: statistics.median(each) for name, each in spent.items()})


if __name__ == "__main__":
    main(__doc__ or "", measure)
