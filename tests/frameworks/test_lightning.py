"""Lightning's Trainer and Fabric, in one process. It iterates over our loader, or makes another one out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import SequentialSampler

from asyncloader import DataLoader, to_device
from asyncloader.stateful import StatefulDataLoader
from tests.frameworks.lightning_model import LineModel
from tests.frameworks.witness import Line, Sample, Stream, assert_made_by_us, indices

# Options of ours that are not at their defaults, and so are lost if they are not handed on.
OPTIONS: dict[str, Any] = {"scheduling": "dynamic", "max_buffered_bytes": 0, "max_retries": 5}


def same(batch: Any) -> Any:
    """A transform that changes nothing."""
    return batch


MakeTrainer = Callable[..., lightning.Trainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """Makes Trainers that train on the CPU and say little."""

    def make(**options: Any) -> lightning.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            **{"accelerator": "cpu", "default_root_dir": tmp_path, "enable_checkpointing": False, **quiet, **options}
        )

    return make


class WithKeywords(DataLoader[Sample]):
    """A subclass as people write them: arguments of its own, the others handed on."""

    def __init__(self, length: int, tag: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("dataset", Line(length))
        super().__init__(**kwargs)
        self.length = length
        self.tag = tag


def options_of(loader: Any, names: Iterable[str] = OPTIONS) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in names}


def test_fit_and_validate_iterate_over_our_loader(make_trainer: MakeTrainer) -> None:
    """Two epochs train on every sample once, shuffled, between them validation; all of it made by our workers."""
    train = DataLoader(Line(40), batch_size=4, shuffle=True, num_workers=2, **OPTIONS)
    validate = DataLoader(Line(12), batch_size=4, num_workers=2)
    model = LineModel()
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(model, train, validate)

    first, second = indices(model.trained[:10]), indices(model.trained[10:])
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert indices(model.validated) == list(range(12)) * 2
    assert_made_by_us(model.trained, num_workers=2)
    assert_made_by_us(model.validated, num_workers=2)
    assert trainer.train_dataloader is train
    assert trainer.validate(model, validate, verbose=False)[0]["loss"] < 10


def test_fit_iterates_over_a_wrapper(make_trainer: MakeTrainer) -> None:
    """As over any loader that is not torch's: shuffled, with a state, and it is not made anew."""
    train = to_device(DataLoader(Line(40), batch_size=4, shuffle=True, num_workers=2), "cpu", transform=same)
    model = LineModel()
    make_trainer(max_epochs=2).fit(model, train)
    first, second = indices(model.trained[:10]), indices(model.trained[10:])
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert_made_by_us(model.trained, num_workers=2)


def test_predict_makes_our_loader_anew_with_all_its_options(make_trainer: MakeTrainer) -> None:
    """Predict builds another loader from the attributes of the one it is given: of our class, with our options."""
    given = DataLoader(Line(20), batch_size=4, num_workers=2, **OPTIONS)
    trainer = make_trainer()
    predicted = trainer.predict(LineModel(), given)

    used = trainer.predict_dataloaders
    assert used is not given
    assert type(used) is DataLoader
    assert options_of(used) == OPTIONS
    assert indices(predicted) == list(range(20))
    assert_made_by_us(predicted, num_workers=2)


def test_overfit_batches_repeats_the_same_batches(make_trainer: MakeTrainer) -> None:
    """Overfitting replaces the random sampler by a sequential one, in a new loader of our class with our options."""
    model = LineModel()
    trainer = make_trainer(max_epochs=3, overfit_batches=2)
    trainer.fit(model, DataLoader(Line(40), batch_size=4, shuffle=True, num_workers=2, **OPTIONS))

    used = trainer.train_dataloader
    assert type(used) is DataLoader
    assert isinstance(used.sampler, SequentialSampler)
    assert options_of(used) == OPTIONS
    assert indices(model.trained) == list(range(8)) * 3
    assert_made_by_us(model.trained, num_workers=2)


def test_options_of_a_subclass_with_keywords_survive(make_trainer: MakeTrainer) -> None:
    """A subclass that takes any keywords is made anew with our options, which it does not name, and its own."""
    trainer = make_trainer()
    predicted = trainer.predict(LineModel(), WithKeywords(16, "mine", batch_size=4, num_workers=2, **OPTIONS))

    used = trainer.predict_dataloaders
    assert type(used) is WithKeywords
    assert (used.tag, options_of(used)) == ("mine", OPTIONS)
    assert indices(predicted) == list(range(16))
    assert_made_by_us(predicted, num_workers=2)


@pytest.mark.parametrize("loader_class", [DataLoader, WithKeywords])
def test_loaders_made_in_a_hook_keep_their_options(make_trainer: MakeTrainer, loader_class: type) -> None:
    """Inside `*_dataloader` hooks Lightning notes what a loader was made with, and makes it anew from that."""

    class WithHook(LineModel):
        def predict_dataloader(self) -> Any:
            what = 16 if loader_class is WithKeywords else Line(16)
            loader = loader_class(what, batch_size=4, num_workers=2, **OPTIONS)
            loader.note = "set in the hook"
            return loader

    trainer = make_trainer()
    predicted = trainer.predict(WithHook())
    used = trainer.predict_dataloaders
    assert type(used) is loader_class
    assert (used.note, options_of(used)) == ("set in the hook", OPTIONS)
    assert_made_by_us(predicted, num_workers=2)


def test_persistent_workers_stay_for_all_epochs(make_trainer: MakeTrainer) -> None:
    """With persistent workers three epochs come from the same two processes, until Lightning lets go of them."""
    model = LineModel()
    loader = DataLoader(Line(16), batch_size=4, num_workers=2, persistent_workers=True)
    make_trainer(max_epochs=3).fit(model, loader)
    pids = {int(pid) for batch in model.trained for pid in batch["witness"][:, 1]}
    assert len(pids) == 2
    assert indices(model.trained) == list(range(16)) * 3
    assert_made_by_us(model.trained, num_workers=2)
    assert loader._iterator is None  # Lightning lets go of it, and so of its workers


def test_several_loaders_side_by_side(make_trainer: MakeTrainer) -> None:
    """A step gets a batch of each of several loaders, the shorter one begun again."""

    class Both(LineModel):
        def training_step(self, batch: dict[str, Sample], batch_idx: int) -> torch.Tensor:
            self.other.append(batch["short"])
            return super().training_step(batch["long"], batch_idx)

    model = Both()
    model.other = []
    loaders = {"long": DataLoader(Line(24), 4, num_workers=2), "short": DataLoader(Line(8), 4, num_workers=2)}
    combined = lightning.pytorch.utilities.CombinedLoader(loaders, "max_size_cycle")
    make_trainer(max_epochs=1).fit(model, combined)
    assert indices(model.trained) == list(range(24))
    assert indices(model.other) == list(range(8)) * 3
    assert_made_by_us([*model.trained, *model.other], num_workers=2)


def test_iterable_dataset(make_trainer: MakeTrainer) -> None:
    """A stream without a length, divided among the workers, trains to its end in every epoch."""
    model = LineModel()
    make_trainer(max_epochs=2).fit(model, DataLoader(Stream(22), batch_size=4, num_workers=2))
    for epoch in (model.trained[:6], model.trained[6:]):
        assert sorted(indices(epoch)) == list(range(22))
    assert_made_by_us(model.trained, num_workers=2)


def test_a_checkpoint_goes_on_at_the_next_epoch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """What was saved after two epochs of four trains for two more, to the weights of an uninterrupted run."""

    def fit(folder: Path, checkpoint: Path | None = None) -> LineModel:
        torch.manual_seed(3)
        model = LineModel()
        loader = DataLoader(Line(24), batch_size=4, num_workers=2)
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        make_trainer(max_epochs=4, enable_checkpointing=True, callbacks=[saving]).fit(
            model, loader, ckpt_path=checkpoint, weights_only=False
        )
        return model

    whole = fit(tmp_path / "whole")
    resumed = fit(tmp_path / "resumed", tmp_path / "whole" / "epoch=1.ckpt")
    assert indices(whole.trained) == list(range(24)) * 4
    assert indices(resumed.trained) == list(range(24)) * 2
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert_made_by_us(resumed.trained, num_workers=2)


def test_seed_everything_reaches_the_workers(make_trainer: MakeTrainer) -> None:
    """`seed_everything(workers=True)` sets a worker_init_fn of Lightning's on our loader, which runs it."""
    try:
        lightning.seed_everything(1, workers=True, verbose=False)
        model = LineModel()
        loader = DataLoader(Line(16), batch_size=4, num_workers=2)
        make_trainer(max_epochs=1).fit(model, loader)
    finally:
        lightning.seed_everything(1, workers=False, verbose=False)
    assert "pl_worker_init_function" in repr(loader.worker_init_fn)
    assert_made_by_us(model.trained, num_workers=2)


def test_fabric_iterates_over_our_loader() -> None:
    """Fabric wraps the loader for moving batches to the device, and iterates over ours."""
    fabric = Fabric(accelerator="cpu", devices=1)
    given = DataLoader(Line(20), batch_size=4, num_workers=2, **OPTIONS)
    loader = fabric.setup_dataloaders(given)
    batches = list(loader)
    assert indices(batches) == list(range(20))
    assert_made_by_us(batches, num_workers=2)
    assert options_of(loader) == OPTIONS


@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
def test_a_checkpoint_goes_on_in_the_middle_of_an_epoch(
    loader_class: type[DataLoader[Any]], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Lightning saves the state of our loader; a run of two epochs goes on from the middle of either, shuffled.

    A checkpoint that is taken in the step with the last batch of an epoch goes on with what is left of it, nothing,
    which Lightning counts as the next epoch; with torchdata's StatefulDataLoader it does the same.
    """

    def fit(folder: Path, checkpoint: Path | None = None) -> LineModel:
        torch.manual_seed(3)
        model = LineModel()
        loader = loader_class(Line(24), batch_size=4, shuffle=True, num_workers=2)
        torch.manual_seed(4 if checkpoint is None else 5)
        saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
        make_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saving]).fit(
            model, loader, ckpt_path=checkpoint, weights_only=False
        )
        return model

    whole = fit(tmp_path / "whole")
    order = indices(whole.trained)
    for step in (2, 4, 8):
        resumed = fit(tmp_path / f"resumed {step}", tmp_path / "whole" / f"step={step}.ckpt")
        assert indices(resumed.trained) == order[4 * step :], step
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
        assert_made_by_us(resumed.trained, num_workers=2)
    assert fit(tmp_path / "at the end", tmp_path / "whole" / "step=6.ckpt").trained == []


class AsksForSteps(LineModel):
    """It has a schedule over all steps, as people write it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=int(steps))]


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning", "ignore:The dirpath")
def test_a_state_that_lightning_does_not_load_is_warned_of(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Lightning sets the loader up before it has read the checkpoint's state of it, and begins the epoch again."""

    def fit(model: LineModel, checkpoint: Path | None = None) -> LineModel:
        folder = tmp_path / ("first" if checkpoint is None else "resumed")
        saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
        trainer = make_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saving])
        loader = DataLoader(Line(24), batch_size=4, num_workers=2)
        trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
        return model

    fit(AsksForSteps())  # without a warning: nothing is loaded
    with pytest.warns(UserWarning, match="Lightning#20550"):
        resumed = fit(AsksForSteps(), tmp_path / "first" / "step=4.ckpt")
    assert indices(resumed.trained)[:4] == [0, 1, 2, 3]  # as the warning says
