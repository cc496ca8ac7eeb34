"""A program, run once per rank: takes uneven streams in equal steps, and has the batches go to a device.

python tests/wrap/steps_ranks.py
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asyncloader import DataLoader, to_device
from asyncloader.wrap import equal_steps
from tests.support.ranks import tell
from tests.wrap.equal_steps_ranks import Uneven, in_step
from tests.wrap.simulated import SimulatedDevice

LENGTHS: list[float] = [9, 14]


class Steps:
    """Takes batches of a loader, with a collective and a step of the device for each.

    Args:
        options: Of the loaders; with a "mode", they take equal steps.
        name: Of the device: "cpu" or "simulated".
        transform: As of `to_device`, with the device to compute on.
    """

    def __init__(
        self,
        options: dict[str, Any],
        name: str,
        transform: Callable[[SimulatedDevice | None, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.device = SimulatedDevice() if name == "simulated" else None
        self._options, self._transform = options, transform
        self.seen: list[list[float]] = []

    def make(self) -> Any:
        options = dict(self._options)
        mode, change = options.pop("mode", None), self._transform and partial(self._transform, self.device)
        loader: Any = DataLoader(Uneven(LENGTHS), 2, **options)
        loader = loader if mode is None else equal_steps(loader, mode)
        return to_device(loader, self.device or "cpu", 1, change)  # type: ignore[arg-type]

    def take(self, loader: Any, steps: int = -1) -> list[int]:
        """Take so many batches, or all; return how many a state counts after each."""
        positions: list[int] = []
        for batch in loader:
            self.step(batch)
            del batch
            positions.append(loader.state_dict()["position"])
            if len(positions) == steps:
                break
        return positions

    async def take_async(self, loader: Any) -> None:
        async for batch in loader:
            self.step(batch)
            del batch

    def step(self, batch: torch.Tensor) -> None:
        """What a trainer does: it waits for all ranks, and asks the device for a step."""
        in_step()
        if self.device is None:
            self.seen.append(batch.tolist())
            return
        self.device.step(batch, lambda tensors: self.seen.append(tensors[0].tolist()))
        if len(self.seen) % 2:  # the device does something now and then
            self.device.copies.advance()

    def end(self) -> list[list[float]]:
        """Have the device do all it was asked for; return what steps have read since the last time."""
        if self.device is not None:
            self.device.run()
            assert self.device.faults == []
        seen, self.seen = self.seen, []
        return seen


def noise(device: SimulatedDevice | None, batch: torch.Tensor) -> torch.Tensor:
    """Add what is drawn from the global generator and that of the device."""
    drawn = float(torch.rand(()))
    if device is None:
        return batch + drawn
    drawn += float(torch.rand((), generator=device.generator))
    return device.asked_for(batch, lambda numbers: numbers + drawn)


def noisy(options: dict[str, Any], name: str) -> list[list[float]]:
    """Take a run with a transform that draws, while the trainer draws as well."""
    torch.manual_seed(4)
    steps = Steps(options, name, noise)
    steps.take(steps.make(), 4)
    return steps.end()


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in ("cpu", "simulated"):
        for mode in ("drop", "pad"):
            for workers in (0, 1):
                how: dict[str, Any] = {"num_workers": workers, "worker_backend": "thread"} if workers else {}
                steps = Steps({**how, "mode": mode}, name)
                case = f"{name} {mode} {workers}"
                found[f"{case} positions"] = steps.take(steps.make())
                found[f"{case} most"] = steps.device.most if steps.device else 0
                found[case] = steps.end()
                asyncio.run(steps.take_async(steps.make()))
                found[f"{case} async"] = steps.end()
                for taken in (3, 5):
                    loader, other = steps.make(), steps.make()
                    steps.take(loader, taken)
                    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
                    steps.take(other)
                    found[f"{case} resumed after {taken}"] = steps.end()
                    steps.take(other)
                    found[f"{case} after {taken}, and the next epoch"] = steps.end()
        found[f"{name} noise"] = [
            noisy(how, name)
            for how in (
                {},
                {"mode": "drop"},
                {"mode": "pad", "num_workers": 1, "worker_backend": "thread"},
            )
        ]
    tell(dist.get_rank(), found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
