"""Train the CNN of train_digits.py with Lightning: our loaders are handed to its Trainer, and that is all.

    pip install lightning
    python examples/train_lightning.py [--epochs 15] [--workers 2] [--devices 1]

Ends with the test accuracy; exits with 1 if it is below 97 %. With --devices 2 Lightning starts a second process, gives
each a half of the images (it makes our loader anew, with a DistributedSampler) and averages the gradients.
"""

import sys

import lightning
import torch
from torch import Tensor, nn

from asyncloader import DataLoader
from digits import small_cnn, train_and_test_sets, training_arguments, write_digits


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer, as Lightning wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_cnn()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = training_arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="processes, each on the CPU (default: %(default)s)")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    write_digits(args.data)
    train_set, test_set = train_and_test_sets(args.data)
    keep = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, **keep)
    test_loader = DataLoader(test_set, batch_size=128, **keep)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train_loader, test_loader)

    reached = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero:
        loader = trainer.train_dataloader
        print(f"loaded by {type(loader).__module__}.{type(loader).__name__}, {type(loader.sampler).__name__}")
        print(f"test accuracy {reached:.1%} after {args.epochs} epochs")
    if reached < args.min_accuracy:
        sys.exit(f"test accuracy is below {args.min_accuracy:.0%}")


if __name__ == "__main__":
    main()
