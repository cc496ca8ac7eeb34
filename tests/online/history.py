"""What the processes of a run of chaos have written down, and what has to hold.

- In the history that the states make, the samples of each item are trained exactly once, whole and side by side. Those
  of dropped items are not, nor what was not put: refused, or given up.
- What a producer has put without a lease, and has heard of to be in, is trained once, unless the trainer was killed
  before it had saved a state with that.
- All peers of a rank are given the same in each step, and all ranks have as many.
- What is left is less than a unit for each rank.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

ITEMS = 120
IN_PARTS = 0


def is_dropped(item: int) -> bool:
    """Whether producers drop an item."""
    return item % 17 == 3


def names_of(unit: str, group: int) -> list[str]:
    """Return the names of the samples of a unit: an item, or what was put without a lease."""
    size = 1 + int(unit) % 3 if group == IN_PARTS and unit.isdigit() else max(1, group)
    return [f"{unit}.{part}" for part in range(size)]


def note(folder: Path, *words: object) -> None:
    """Append a line to the history, at once and whole."""
    file = os.open(folder / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def read(folder: Path) -> list[list[str]]:
    """Return the history so far."""
    path = folder / "history"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


class _History:
    """The steps that the states make, and what was put without leases."""

    def __init__(self, lines: list[list[str]]) -> None:
        self.trained: dict[int, dict[tuple[int, int], list[str]]] = {}  # by step and seat
        self.shapes: dict[int, tuple[int, int]] = {}
        self.is_in: list[str] = []
        self.not_put: set[str] = set()
        self.left, self.ranks = 0, 1
        saved, shape = dict[int, int](), (1, 1)  # so many were in before the state of a step
        for kind, *words in lines:
            if kind == "begin":
                first, *rest = map(int, words)
                self.trained = {step: seats for step, seats in self.trained.items() if step < first}
                del self.is_in[saved.get(first, 0) :]
                self.ranks, _ = shape = rest[0], rest[1]
            elif kind == "trained":
                step, rank, peer = map(int, words[:3])
                self.trained.setdefault(step, {})[rank, peer] = words[3:]
                self.shapes[step] = shape
            elif kind == "saving":
                saved[int(words[0])] = len(self.is_in)
            elif kind == "in":
                self.is_in += words
            elif kind == "not":
                self.not_put |= {*words}
            elif kind == "end" and words[:2] == ["0", "0"]:
                self.left = int(words[2])

    def units(self, group: int) -> list[str]:
        """Return the units that were trained.

        Raises:
            ValueError: in words, if the ranks and peers of a step, or the samples of a unit, do not fit together.
        """
        units = []
        for step, seats in sorted(self.trained.items()):
            ranks, peers = self.shapes[step]
            if len(seats) < ranks * peers:
                raise ValueError(f"step {step} was trained by {sorted(seats)} of {ranks} x {peers}")
            for (rank, peer), names in seats.items():
                if seats[rank, 0] != names:
                    raise ValueError(f"peer {peer} of rank {rank} had {names} in step {step}, not {seats[rank, 0]}")
                units += _units_of(names, group) if peer == 0 else []
        return units


def _units_of(names: list[str], group: int) -> list[str]:
    units = []
    while names:
        unit = names[0].partition(".")[0]
        whole = names_of(unit, group)
        if names[: len(whole)] != whole:
            raise ValueError(f"unit {unit} is torn: {names}")
        units.append(unit)
        names = names[len(whole) :]
    return units


def check(lines: list[list[str]], group: int = 1) -> str:
    """Return what does not hold; nothing if all does."""
    history = _History(lines)
    try:
        units = Counter(history.units(group))
    except ValueError as error:
        return str(error)
    items = {str(item) for item in range(ITEMS) if not is_dropped(item)}
    missing = sorted((items | {*history.is_in}) - {*units})
    twice = sorted(unit for unit, count in units.items() if count > 1)
    wrong = sorted(unit for unit in units if unit in history.not_put or (unit.isdigit() and unit not in items))
    lost = missing if len(missing) > history.left or history.left >= history.ranks else []
    return f"lost: {lost}; trained twice: {twice}; not put: {wrong}" if lost or twice or wrong else ""
