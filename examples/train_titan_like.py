"""A loop in the manner of torchtitan, with torchdata's StatefulDataLoader replaced by ours: one import is changed.

    python examples/train_titan_like.py

A stream of documents with a state is cut into blocks of tokens; torch.distributed.checkpoint writes model and
optimizer, and each rank of the data its loader. The training is stopped in the middle and resumed by new objects: its
losses are those of the training that nobody stopped, to the bit.
"""

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import IterableDataset

from asyncloader.stateful import StatefulDataLoader  # was: from torchdata.stateful_dataloader import ...

BLOCK, BATCH_SIZE, STEPS, STOP_AT = 32, 8, 12, 7
VOCABULARY = 64


class Blocks(IterableDataset[tuple[Tensor, Tensor]]):
    """Documents of a data set without an end, one behind the other, in blocks; the next token is the label."""

    def __init__(self) -> None:
        self.document = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            while len(self.buffer) > BLOCK:
                block, self.buffer = self.buffer[: BLOCK + 1], self.buffer[BLOCK:]
                yield torch.tensor(block[:-1]), torch.tensor(block[1:])
            length = 20 + self.document * 37 % 90
            self.buffer += [(self.document + 3 * place) % VOCABULARY for place in range(length)]
            self.document += 1

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document, self.buffer = state["document"], list(state["buffer"])


class Trainer:
    """The objects of one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loader = StatefulDataLoader(Blocks(), batch_size=BATCH_SIZE, num_workers=1)

    def train(self, steps: int) -> list[float]:
        """Take so many steps, and return their losses."""
        losses = []
        with iter(self.loader) as batches:
            for _ in range(steps):
                tokens, labels = next(batches)
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                self.optimizer.step()
                losses.append(loss.item())
            self.state = self.loader.state_dict()
        return losses

    def save(self, folder: Path) -> None:
        torch.save(self.state, folder / "loader.pt")
        save(self._parts(), checkpoint_id=folder / "model", no_dist=True)

    def load(self, folder: Path) -> None:
        parts = self._parts()
        load(parts, checkpoint_id=folder / "model", no_dist=True)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.loader.load_state_dict(torch.load(folder / "loader.pt"))

    def _parts(self) -> dict[str, Any]:
        for parameter in self.model.parameters():  # a momentum that is not there yet could not be loaded in place
            self.optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def main() -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this is one process
    whole = Trainer().train(STEPS)
    with tempfile.TemporaryDirectory() as name:
        first = Trainer()
        before = first.train(STOP_AT)
        first.save(Path(name))
        second = Trainer()
        second.load(Path(name))
        after = second.train(STEPS - STOP_AT)
    assert before + after == whole, (before, after, whole)
    print(
        f"loss {whole[0]:.3f} to {whole[-1]:.3f} in {STEPS} steps; stopped after {STOP_AT} and resumed: the same losses"
    )


if __name__ == "__main__":
    main()
