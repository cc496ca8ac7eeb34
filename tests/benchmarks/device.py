"""device: batches on a GPU, while it computes. Never run so far: no machine with a GPU was there.

Measured: seconds a step, with the step's batch from a loader and with one that is on the GPU already; what the loader
costs is the ratio. Batches of 38.5 MB (64 pictures of 3 x 224 x 224 float32) and of 9.6 MB (the same as bytes,
converted on the GPU). A step is one of a convolutional network (torchvision's ResNet-50 where that is installed), or
one that keeps the stream busy for as long and computes nothing. Sides: torch's DataLoader with pin_memory and
``non_blocking=True``; that with a side stream (our `to_device`); SPDL's `transfer_tensor` where it is installed; ours
with `to_device`. CPU seconds are those of all processes.

Then the bandwidth of the copies alone, without a step, against ``copy_`` out of page-locked memory.

Targets: a step with our loader takes at most 1.02 times as long as one on data that is there; copies reach 95 % of the
bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from asyncloader import DataLoader, to_device
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds

PICTURES, SHAPE = 64, (3, 224, 224)
WORKERS = 8


class Pictures(Dataset[torch.Tensor]):
    """Samples that cost little more than their memory."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.data = torch.zeros(256, *SHAPE, dtype=dtype)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index % len(self.data)]


def as_floats(batch: torch.Tensor) -> torch.Tensor:
    return batch.float().div_(255) if batch.dtype == torch.uint8 else batch


def network() -> Callable[[torch.Tensor], object]:
    """Return a training step of ResNet-50, or of a smaller network where torchvision is not installed."""
    try:
        from torchvision.models import resnet50  # type: ignore[import-not-found]

        model = resnet50().cuda()
    except ImportError:
        blocks: list[torch.nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
            blocks += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
        model = torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(as_floats(batch)).square().mean().backward()
        optimizer.step()

    return step


def sleeping(batch: torch.Tensor) -> None:
    """Keep the stream busy for some 10 ms."""
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]


def plain(dataset: Any) -> Iterable[torch.Tensor]:
    loader: Any = TorchLoader(dataset, PICTURES, num_workers=WORKERS, pin_memory=True)
    return (batch.to("cuda", non_blocking=True) for batch in loader)


def side_stream(dataset: Any) -> Iterable[torch.Tensor]:
    return to_device(TorchLoader(dataset, PICTURES, num_workers=WORKERS, pin_memory=True), "cuda")


def ours(dataset: Any) -> Iterable[torch.Tensor]:
    return to_device(DataLoader(dataset, PICTURES, num_workers=WORKERS, pin_memory=True), "cuda")


def spdl(dataset: Any) -> Iterator[torch.Tensor]:
    from spdl.io import transfer_tensor  # type: ignore[import-not-found]

    loader: Any = TorchLoader(dataset, PICTURES, num_workers=WORKERS)
    return (transfer_tensor(batch) for batch in loader)


def there(dataset: Any) -> Iterator[torch.Tensor]:
    """Batches that are on the GPU already."""
    batch = torch.stack([dataset[i] for i in range(PICTURES)]).cuda()
    return (batch for _ in range(len(dataset) // PICTURES))


def steps(
    make: Callable[[Any], Iterable[torch.Tensor]],
    dtype: torch.dtype,
    step: Callable[[torch.Tensor], object],
    count: int,
) -> Run:
    """Take some steps after a few that are not counted; seconds a step."""
    batches = iter(make(Pictures(dtype, (count + 20) * PICTURES)))
    for batch in islice(batches, 10):
        step(batch)
    torch.cuda.synchronize()
    began, cpu = time.perf_counter(), cpu_seconds()
    for batch in islice(batches, count):
        step(batch)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / count
    return Run(1000 * seconds, {"CPU s": (cpu_seconds() - cpu) / count})


def bandwidth(make: Callable[[Any], Iterable[torch.Tensor]], count: int) -> float:
    """Return the GB/s at which batches of floats arrive, without steps."""
    run = steps(make, torch.float32, lambda batch: None, count)
    return PICTURES * torch.Size(SHAPE).numel() * 4 / (run.value / 1000) / 1e9


def copies(count: int) -> float:
    """Return the GB/s of `copy_` out of page-locked memory."""
    source = torch.empty(PICTURES, *SHAPE, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return count * source.nbytes / (time.perf_counter() - began) / 1e9


def measure(bench: Bench) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("device: needs a GPU, and torch sees none")
    print(torch.cuda.get_device_name())
    count, rounds = (50, 2) if bench.quick else (200, 5)
    sides: dict[str, Callable[[Any], Iterable[torch.Tensor]]] = {
        "on the GPU already": there, "torch": plain, "torch, side stream": side_stream, "ours": ours,
    }  # fmt: skip
    if find_spec("spdl") is not None:
        sides["SPDL"] = spdl
    for kind, dtype in (("float32", torch.float32), ("bytes", torch.uint8)):
        for name, step in (("a network", network()), ("sleeping", sleeping)):
            runs = {side: partial(steps, make, dtype, step, count) for side, make in sides.items()}
            targets = {"ours": Target("<=", 1.02)}
            bench.compare(f"{kind}, {name}", "ms/step", runs, rounds=rounds, targets=targets)
    most = copies(4 * count)
    bench.note("copies", **{"GB/s": most})
    bench.check("bandwidth of ours against copies", bandwidth(sides["ours"], count) / most, Target(">=", 0.95))


if __name__ == "__main__":
    main(__doc__ or "", measure)
