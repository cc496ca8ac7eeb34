"""Train the CNN of train_digits.py with Accelerate: one call before, and what it prepares is still our loader.

    pip install accelerate
    python examples/train_accelerate.py [--epochs 15] [--workers 2]
    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py

Ends with the test accuracy; exits with 1 if it is below 97 %. `prepare` builds a DataLoader of its own from the one it
is given, to shard it among processes and to move batches to the device. `use_asyncloader` says of which class.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from asyncloader import DataLoader
from asyncloader.accelerate import use_asyncloader
from digits import small_cnn, train_and_test_sets, training_arguments, write_digits

use_asyncloader()  # otherwise Accelerate builds torch's loader


def main() -> None:
    args = training_arguments(__doc__).parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    with accelerator.main_process_first():
        write_digits(args.data)
    train_set, test_set = train_and_test_sets(args.data)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_set, batch_size=128, num_workers=args.workers)
    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = args.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=0.01, total_steps=steps)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            schedule.step()
        reached = accuracy(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch:2}: test accuracy {reached:.1%}")

    loader = train_loader.base_dataloader
    accelerator.print(f"loaded by {type(loader).__module__}.{type(loader).__name__}")
    accelerator.print(f"test accuracy {reached:.1%} after {args.epochs} epochs")
    accelerator.end_training()
    if reached < args.min_accuracy:
        sys.exit(f"test accuracy is below {args.min_accuracy:.0%}")


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]]) -> float:
    """Measure the share of images that are classified rightly, over all processes."""
    model.eval()
    right = []
    for images, labels in loader:
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
