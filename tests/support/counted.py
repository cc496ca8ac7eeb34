"""What knows its own place: a sampler, or a loader, of numbers."""

from __future__ import annotations

from collections.abc import Iterator


class Counted:
    """Numbers from 0 up. Only this has a state, and not its iterators."""

    def __init__(self, length: int) -> None:
        self.at, self._length = 0, length

    def __iter__(self) -> Iterator[int]:
        while self.at < self._length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
