"""Train a small CNN on handwritten digits that lie as image files on disk: an ordinary script with `for`.

    python examples/train_digits.py [--epochs 15] [--workers 2]

Ends with the test accuracy and with the share of the training time that was spent waiting for data; exits with 1 if the
accuracy is below 97 %.
"""

import sys
import time

import torch
from tqdm import tqdm

from asyncloader import DataLoader
from digits import Sample, Trainer, train_and_test_sets, training_arguments, write_digits


def train_epoch(trainer: Trainer, loader: DataLoader[Sample], epoch: int) -> tuple[float, float]:
    """Train on every batch once.

    Returns:
        The mean loss, and the seconds during which training stood still because it waited for the loader.
    """
    losses, waited_s = [], 0.0
    asked = time.perf_counter()
    for images, labels in tqdm(loader, desc=f"epoch {epoch}", unit="batch", leave=False, disable=None):
        waited_s += time.perf_counter() - asked
        losses.append(trainer.step(images, labels))
        asked = time.perf_counter()
    waited_s += time.perf_counter() - asked  # starting workers counted at the first batch, ending them counts here
    return sum(losses) / len(losses), waited_s


def accuracy(trainer: Trainer, loader: DataLoader[Sample]) -> float:
    """Measure the share of images that are classified rightly."""
    right = images_seen = 0
    for images, labels in loader:
        right += trainer.count_right(images, labels)
        images_seen += len(labels)
    return right / images_seen


def train_and_report(
    train_loader: DataLoader[Sample], test_loader: DataLoader[Sample], epochs: int, min_accuracy: float
) -> None:
    """Train, print how it went, and exit with 1 if the test accuracy is below what is asked for."""
    trainer = Trainer(steps=epochs * len(train_loader))
    trained_s = waited_s = 0.0
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        loss, waited_in_epoch_s = train_epoch(trainer, train_loader, epoch)
        trained_s += time.perf_counter() - started
        waited_s += waited_in_epoch_s
        reached = accuracy(trainer, test_loader)
        print(f"epoch {epoch:2}: loss {loss:.3f}, test accuracy {reached:.1%}")

    print(f"test accuracy {reached:.1%} after {epochs} epochs")
    print(f"training took {trained_s:.1f} s, {waited_s:.2f} s of it ({waited_s / trained_s:.0%}) waiting for data")
    if reached < min_accuracy:
        sys.exit(f"test accuracy is below {min_accuracy:.0%}")


def main() -> None:
    args = training_arguments(__doc__).parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more, and the workers want the other cores
    write_digits(args.data)
    train_set, test_set = train_and_test_sets(args.data)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_set, batch_size=128, num_workers=args.workers)
    print(f"{len(train_set)} images to train on and {len(test_set)} to test with, in {args.data}")

    train_and_report(train_loader, test_loader, args.epochs, args.min_accuracy)


if __name__ == "__main__":
    main()
