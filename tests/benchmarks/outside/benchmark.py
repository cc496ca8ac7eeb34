"""What a benchmark of others consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.measure import Run


class Setting(NamedTuple):
    """What a side is told: where files are that were prepared, and whether a short run will do."""

    folder: Path
    quick: bool


@dataclass(frozen=True)
class Benchmark:
    """One figure of a benchmark: whose that is, its rules in some sentences, and the loaders, compared with the first.

    Each run of a side is a fresh process, so the modules of this package import what a side needs inside of it.
    """

    title: str
    unit: str
    whose: str
    link: str
    rules: str
    sides: Mapping[str, Callable[[Setting], Run]]
    needs: Mapping[str, str] = field(default_factory=dict)  # side: the module that it needs
    prepare: Callable[[Setting], None] | None = None
    rounds: int = 3

    @property
    def name(self) -> str:
        return f"{self.whose}: {self.title}"


def loader_class(name: str) -> Any:
    """Return torch's class or ours, which take the same arguments."""
    if name.startswith("torch"):
        from torch.utils.data import DataLoader as TorchLoader

        return TorchLoader
    from asyncloader import DataLoader

    return DataLoader
