"""Train a small CNN on images that are rows of a PostgreSQL table: a query for each batch.

    python examples/train_from_postgres.py [--epochs 15] [--workers 2]

The server is one of its own on this machine (local_postgres.py), with a table that is filled once. First the same rows
are read with torch's DataLoader, a query for each row as one writes it there, and with ours, for comparison; then the
network is trained with ours. Ends with the test accuracy and with the share of the training time that was spent waiting
for data; exits with 1 if the accuracy is below 97 %.
"""

import argparse
import asyncio
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from asyncloader import DataLoader, sample_rng
from digits import Sample, training_arguments, write_digits
from local_postgres import local_postgres
from train_digits import train_and_report
from train_from_object_store import images_per_second

QUERY = "SELECT id, png, label FROM images WHERE id = ANY($1)"


class Rows:
    """The rows of a table: an async dataset, which opens a pool of connections in each worker."""

    def __init__(self, dsn: str, keys: list[int], make: Callable[[Any], Sample]) -> None:
        self.dsn, self.keys, self.make = dsn, keys, make
        self.pool: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    async def __aenter__(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=4)

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()
        self.pool = None

    async def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Ask for the rows of a batch in one query. The server returns them in an order of its own."""
        keys = [self.keys[index] for index in indices]
        rows = {row["id"]: row for row in await self.pool.fetch(QUERY, keys)}
        return [self.make(rows[key]) for key in keys]


async def fill(dsn: str, files: list[Path]) -> None:
    """Put image files into a table."""
    rows = [(number, path.read_bytes(), int(path.parent.name)) for number, path in enumerate(files)]
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("CREATE TABLE images (id int PRIMARY KEY, png bytea, label int)")
        await connection.copy_records_to_table("images", records=rows)
    finally:
        await connection.close()


async def all_keys(dsn: str) -> list[int]:
    """Ask which rows there are."""
    connection = await asyncpg.connect(dsn)
    try:
        return [row["id"] for row in await connection.fetch("SELECT id FROM images ORDER BY id")]
    finally:
        await connection.close()


def decode(row: Any) -> Sample:
    """Make an image of shape (1, 8, 8) of a row."""
    with Image.open(io.BytesIO(row["png"])) as image:
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None], row["label"]


def decode_and_shift(row: Any) -> Sample:
    """Shift the image as well, by up to one pixel: the same shifts for the same seed, however batches overlap."""
    image, label = decode(row)
    top, left = sample_rng().integers(0, 3, 2)
    return nn.functional.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8], label


class RowByRow(Dataset[Sample]):
    """The same rows for torch's DataLoader: a connection in each worker, a query for each row."""

    def __init__(self, dsn: str, keys: list[int]) -> None:
        self.dsn, self.keys = dsn, keys
        self.connection: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample:
        if self.connection is None:
            self.loop = asyncio.new_event_loop()
            self.connection = self.loop.run_until_complete(asyncpg.connect(self.dsn))
        query = self.connection.fetchrow("SELECT png, label FROM images WHERE id = $1", self.keys[index])
        return decode(self.loop.run_until_complete(query))


def main() -> None:
    args = training_arguments(__doc__).parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more, and the workers want the other cores
    write_digits(args.data)
    with local_postgres() as dsn:
        asyncio.run(fill(dsn, sorted(args.data.glob("*/*.png"))))
        run(args, dsn)


def run(args: argparse.Namespace, dsn: str) -> None:
    """Ask for the keys, compare, train."""
    keys = asyncio.run(all_keys(dsn))
    random.Random(0).shuffle(keys)
    test_keys, train_keys = keys[: len(keys) // 5], keys[len(keys) // 5 :]
    print(f"{len(train_keys)} images to train on and {len(test_keys)} to test with, at {dsn}")

    theirs = images_per_second(torch.utils.data.DataLoader(RowByRow(dsn, keys), 32, num_workers=args.workers))
    ours = images_per_second(DataLoader(Rows(dsn, keys * 5, decode), 32, num_workers=args.workers))
    times = f"{ours / theirs:.1f} times as many"
    print(f"torch's DataLoader reads {theirs:.0f} images/s row by row, ours {ours:.0f} ({times})")

    train_set = Rows(dsn, train_keys, decode_and_shift)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(Rows(dsn, test_keys, decode), batch_size=128, num_workers=args.workers)
    train_and_report(train_loader, test_loader, args.epochs, args.min_accuracy)


if __name__ == "__main__":
    main()
