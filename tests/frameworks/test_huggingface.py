"""The Hugging Face Trainer, which loads through Accelerate, and `datasets`, map-style and streamed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import accelerate.data_loader
import datasets
import datasets.distributed
import pytest
import torch
import torch.utils.data
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from asyncloader import DataLoader
from asyncloader.accelerate import use_asyncloader
from asyncloader.datasets import ParallelMap
from asyncloader.protocols import leaves_out_buffer
from asyncloader.stateful import StatefulDataLoader
from tests.frameworks.witness import Sample, assert_made_by_torch, assert_made_by_us, attest, indices

VOCABULARY = 16


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one call that keeps our loader, taken back afterwards."""
    monkeypatch.setattr(accelerate.data_loader, "DataLoader", accelerate.data_loader.DataLoader)
    monkeypatch.setattr(accelerate.data_loader.DataLoaderAdapter, "__aiter__", None, raising=False)
    use_asyncloader()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Classifier(BertForSequenceClassification):
    """A tiny BERT that remembers which samples it was given."""

    def __init__(self) -> None:
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        super().__init__(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, num_labels=2, **shape))
        self.seen: list[Sample] = []

    def forward(self, *, index: Tensor, witness: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        self.seen.append({"index": index, "witness": witness})
        return super().forward(**inputs)


class Sentences(torch.utils.data.Dataset[Sample]):
    """Sentences of four words, whose label is whether the first is in the upper half of the vocabulary."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(VOCABULARY, (length, 4), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Sample:
        words = self.words[index]
        label = int(words[0] >= VOCABULARY // 2)
        return {"input_ids": words, "labels": label, "index": index, "witness": attest()}


class StatefulTrainer(Trainer):  # type: ignore[misc]
    """Makes the loader itself, as programs do that were written for torchdata's."""

    def get_train_dataloader(self) -> Any:
        loader = StatefulDataLoader(self.train_dataset, 4, shuffle=True, num_workers=2)
        return self.accelerator.prepare(loader)


def make_trainer(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> tuple[Trainer, Classifier]:
    torch.manual_seed(0)
    model = Classifier()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        dataloader_num_workers=2,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", "num_train_epochs": 2, **options},
    )
    data = Sentences(40)
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=Sentences(12)), model


@pytest.mark.usefixtures("kept")
def test_trainer_trains_and_evaluates_from_our_workers(tmp_path: Path) -> None:
    """One call before, and train, evaluate and predict iterate over our loader; every sample once an epoch."""
    trainer, model = make_trainer(tmp_path)
    trainer.train()
    first, second = indices(model.seen[:10]), indices(model.seen[10:])
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert_made_by_us(model.seen, num_workers=2)
    for use in (trainer.evaluate, lambda: trainer.predict(Sentences(12))):
        model.seen.clear()
        use()
        assert indices(model.seen) == list(range(12))
        assert_made_by_us(model.seen, num_workers=2)
    assert type(trainer.get_train_dataloader().base_dataloader) is DataLoader


def test_without_the_call_the_trainer_uses_torchs(tmp_path: Path) -> None:
    """Without the call the Trainer's loader is torch's: what the call is for."""
    trainer, model = make_trainer(tmp_path, num_train_epochs=1)
    trainer.train()
    assert_made_by_torch(model.seen)


@pytest.mark.usefixtures("kept")
def test_persistent_workers_of_the_trainer(tmp_path: Path) -> None:
    """The Trainer's own options for the loader reach ours: two processes make all epochs."""
    trainer, model = make_trainer(
        tmp_path, num_train_epochs=3, dataloader_persistent_workers=True, dataloader_prefetch_factor=3
    )
    trainer.train()
    assert len(model.seen) == 30
    assert len({int(pid) for batch in model.seen for pid in batch["witness"][:, 1]}) == 2
    assert_made_by_us(model.seen, num_workers=2)
    loader = trainer.get_train_dataloader()
    assert (loader.persistent_workers, loader.prefetch_factor) == (True, 3)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("kind", "step"), [(Trainer, 6), (StatefulTrainer, 12)])
def test_trainer_resumes_within_an_epoch(kind: type[Trainer], step: int, tmp_path: Path) -> None:
    """The Trainer skips what it has trained on by Accelerate's skip_first_batches; the rest comes from our workers."""
    whole, complete = make_trainer(tmp_path / "whole", kind, max_steps=20, save_strategy="steps", save_steps=6)
    whole.train()
    resumed, rest = make_trainer(tmp_path / "resumed", kind, max_steps=20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert indices(rest.seen) == indices(complete.seen[step:])
    assert_made_by_us(rest.seen, num_workers=2)
    assert all(torch.equal(*pair) for pair in zip(complete.parameters(), rest.parameters(), strict=True))


def with_witness(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**rows, "witness": [attest().tolist() for _ in rows["index"]]}


def with_tensors(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**rows, "witness": [attest() for _ in rows["index"]]}


@pytest.fixture
def table() -> datasets.Dataset:
    """Forty rows, in memory."""
    rows = range(40)
    return datasets.Dataset.from_dict(
        {"index": list(rows), "x": [[row / 40, 1.0] for row in rows], "name": [f"row {row}" for row in rows]}
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_datasets_table_gives_what_it_gives_torch(table: datasets.Dataset, num_workers: int) -> None:
    """A `datasets.Dataset` formatted for torch gives the same batches to our loader as to torch's, shuffled alike."""

    def batches(loader_class: type) -> list[Any]:
        own = torch.Generator().manual_seed(1)
        loader = loader_class(table.with_format("torch"), 8, shuffle=True, num_workers=num_workers, generator=own)
        return [[batch["index"].tolist(), batch["x"].tolist(), batch["name"]] for batch in loader]

    ours = batches(DataLoader)
    assert ours == batches(torch.utils.data.DataLoader)
    assert sorted(index for batch in ours for index in batch[0]) == list(range(40))


def test_datasets_transform_runs_in_our_workers(table: datasets.Dataset) -> None:
    """A transform, as for augmentation or tokenizing, runs in our workers, for a whole batch at once."""
    batches = list(DataLoader(table.with_transform(with_tensors), batch_size=8, num_workers=2))
    assert indices(batches) == list(range(40))
    assert_made_by_us(batches, num_workers=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_one_look_up(table: datasets.Dataset, num_workers: int) -> None:
    """`__getitems__` of the table is used: a transform sees all rows of a batch together, and no more often."""

    def counted(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**rows, "together": [len(rows["index"])] * len(rows["index"])}

    loader = DataLoader(table.with_transform(counted), batch_size=16, num_workers=num_workers)
    assert [set(batch["together"].tolist()) for batch in loader] == [{16}, {16}, {8}]


@pytest.mark.parametrize("name", ["torch", "numpy", "arrow", "pandas"])
def test_every_format_gives_what_it_gives_torch(table: datasets.Dataset, name: str) -> None:
    """Row by row where it has rows; whole batches of indices, for formats that are tables."""
    formatted = table.select_columns(["index", "x"]).with_format(name)
    batches = torch.utils.data.BatchSampler(range(40), 16, drop_last=False)

    def whole(loader_class: type) -> list[Any]:
        loader = loader_class(formatted, batch_size=None, sampler=batches, num_workers=2)
        return [[type(rows), list(map(int, rows["index"]))] for rows in loader]

    assert whole(DataLoader) == whole(torch.utils.data.DataLoader)
    if name != "arrow":  # which `datasets` itself cannot take rows of
        ours, theirs = (
            [[batch["index"].tolist(), [x.tolist() for x in batch["x"]]] for batch in loader_class(formatted, 16)]
            for loader_class in (DataLoader, torch.utils.data.DataLoader)
        )
        assert ours == theirs


def test_epochs_reach_streams_in_persistent_workers(table: datasets.Dataset) -> None:
    """`loader.set_epoch` gives the order that the stream has in that epoch, whichever epochs came before."""
    stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10).with_format("torch")

    def fresh(epoch: int) -> list[int]:
        stream.set_epoch(epoch)
        return indices(DataLoader(stream, batch_size=8, num_workers=2))

    expected = [fresh(epoch) for epoch in (0, 1, 2)]
    assert expected[0] != expected[1]
    stream.set_epoch(0)
    loader = DataLoader(stream, batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in (0, 2, 1):
        loader.set_epoch(epoch)
        assert indices(loader) == expected[epoch]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [None, 10])
def test_streams_go_on_where_they_were(
    table: datasets.Dataset, num_workers: int, buffer_size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By the stream's own state; one that is shuffled, whose state lacks its buffer, is read again; the log says so."""
    options = {"batch_size": 4, "num_workers": num_workers}

    def loader() -> DataLoader[Any]:
        stream = table.to_iterable_dataset(num_shards=4)
        stream = stream if buffer_size is None else stream.shuffle(seed=3, buffer_size=buffer_size)
        return DataLoader(stream.with_format("torch"), **options)

    first = loader()
    first.set_epoch(1)
    with iter(first) as batches:
        before = [next(batches)["index"].tolist() for _ in range(4)]
        state = first.state_dict()
        rest = [batch["index"].tolist() for batch in batches]
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch["index"].tolist() for batch in resumed] == rest
    assert sorted(index for batch in before + rest for index in batch) == list(range(40))
    assert ("lacks what is in its shuffle buffer" in caplog.text) == (buffer_size is not None)


@pytest.mark.parametrize("wrap", ["map", "interleave", "take"])
def test_shuffle_buffers_are_found_below_what_is_done_with_a_stream(table: datasets.Dataset, wrap: str) -> None:
    """Its state lacks them there too, also a buffer of one row."""

    def wrapped(buffer_size: int | None) -> Any:
        stream = table.to_iterable_dataset(num_shards=4)
        stream = stream if buffer_size is None else stream.shuffle(seed=3, buffer_size=buffer_size)
        if wrap == "interleave":
            return datasets.interleave_datasets([stream, table.to_iterable_dataset()])
        return stream.map(lambda row: row) if wrap == "map" else stream.take(8)

    assert all(map(leaves_out_buffer, (wrapped(10), wrapped(1))))
    assert not any(map(leaves_out_buffer, (wrapped(None), table)))


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("buffer_size", [None, 1, 5])
def test_epochs_after_a_resume_are_whole(
    table: datasets.Dataset, buffer_size: int | None, num_workers: int, is_mapped: bool
) -> None:
    """The stream keeps the state that it has loaded; the next epochs begin at the beginning all the same.

    They are those of a loader that was not interrupted: a ParallelMap tells its stream each epoch, and `datasets` has
    another order of the shards in later ones, also of a stream that is not shuffled.
    """

    def loader() -> DataLoader[Any]:
        stream = table.to_iterable_dataset(num_shards=4)
        stream = stream if buffer_size is None else stream.shuffle(seed=3, buffer_size=buffer_size)
        dataset: Any = ParallelMap(stream, itemgetter("index")) if is_mapped else stream.select_columns(["index"])
        return DataLoader(dataset, 4, collate_fn=list, num_workers=num_workers, persistent_workers=num_workers > 0)

    uninterrupted = loader()
    epochs = [list(uninterrupted) for _ in range(4)]
    for epoch in epochs:
        rows = chain.from_iterable(epoch)
        assert sorted(row if is_mapped else row["index"] for row in rows) == list(range(40))
    first = loader()
    assert list(first) == epochs[0]
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    del iterator
    resumed = loader()
    resumed.load_state_dict(state)
    assert [list(resumed) for _ in range(3)] == [epochs[1][3:], epochs[2], epochs[3]]
    for each in (uninterrupted, first, resumed):
        each.close()


class KillsOnce:
    """Kills the worker that maps a row, the first time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["index"] == 20 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row


def test_a_killed_worker_of_a_shuffled_stream_is_replaced(table: datasets.Dataset, tmp_path: Path) -> None:
    """By one that reads the same again: no row is lost, none comes twice."""
    mapped = table.map(lambda row: row)

    def batches(path: Path) -> list[list[int]]:
        stream = mapped.to_iterable_dataset(num_shards=4).map(KillsOnce(path)).shuffle(seed=3, buffer_size=10)
        return [batch["index"].tolist() for batch in DataLoader(stream.with_format("torch"), 4, num_workers=2)]

    (tmp_path / "never").touch()
    whole = batches(tmp_path / "never")
    assert batches(tmp_path / "once") == whole
    assert (tmp_path / "once").exists()


def test_ranks_share_a_stream(table: datasets.Dataset) -> None:
    """`split_dataset_by_node` divides the shards among ranks, and each of our loaders its part among workers."""
    stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10).with_format("torch")
    found = []
    for rank in range(2):
        own = datasets.distributed.split_dataset_by_node(stream, rank=rank, world_size=2)
        mine = indices(DataLoader(own, batch_size=4, num_workers=2))
        assert len(mine) == 20
        found += mine
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streamed_datasets_are_divided_among_workers(table: datasets.Dataset, num_workers: int) -> None:
    """A `datasets.IterableDataset` gives each worker its shards: the batches that torch gives, new in each epoch."""
    stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10).with_format("torch")

    def epochs(loader_class: type) -> list[list[int]]:
        loader = loader_class(stream, batch_size=8, num_workers=num_workers)
        taken = []
        for epoch in range(2):
            stream.set_epoch(epoch)
            taken.append(indices(loader))
        return taken

    first, second = epochs(DataLoader)
    assert [first, second] == epochs(torch.utils.data.DataLoader)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_streamed_datasets_come_from_our_workers(table: datasets.Dataset) -> None:
    """What is mapped over a stream runs in our workers."""
    stream = table.to_iterable_dataset(num_shards=2).map(with_witness, batched=True, batch_size=4).with_format("torch")
    batches = list(DataLoader(stream, batch_size=8, num_workers=2))
    assert sorted(indices(batches)) == list(range(40))
    assert_made_by_us(batches, num_workers=2)


def test_a_layer_trains_on_a_table(table: datasets.Dataset) -> None:
    """The whole way, without a Trainer: a loss falls."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.2)
    losses = []
    for _ in range(5):
        for batch in DataLoader(table.with_format("torch"), batch_size=8, shuffle=True, num_workers=2):
            loss = nn.functional.mse_loss(layer(batch["x"])[:, 0], batch["index"] / 40)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
