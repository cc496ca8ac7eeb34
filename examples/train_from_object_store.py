"""Train a small CNN on images in an object store that takes 20 ms for each of them.

    python examples/train_from_object_store.py [--epochs 15] [--workers 2] [--latency-ms 20]

The store is a server of its own on this machine (local_bucket.py); with --endpoint, --bucket and the usual variables
(AWS_ACCESS_KEY_ID, ...) it can be any. First the same images are read with torch's DataLoader and with ours, for
comparison; then the network is trained with ours. Ends with the test accuracy and with the share of the training time
that was spent waiting for data; exits with 1 if the accuracy is below 97 %.
"""

import argparse
import contextlib
import http.client
import io
import random
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore
import torch
import torch.utils.data
from obstore.store import S3Store
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from asyncloader import DataLoader, sample_rng
from asyncloader.datasets import RemoteDataset
from digits import Sample, training_arguments, write_digits
from local_bucket import local_bucket
from train_digits import train_and_report


def decode(data: bytes, key: str) -> Sample:
    """Make an image of shape (1, 8, 8) of a PNG file; its class is the name of its folder."""
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None], int(key.split("/")[-2])


def decode_and_shift(data: bytes, key: str) -> Sample:
    """Shift the image as well, by up to one pixel: the same shifts for the same seed, however samples overlap."""
    image, label = decode(data, key)
    top, left = sample_rng().integers(0, 3, 2)
    return nn.functional.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8], label


class BlockingImages(Dataset[Sample]):
    """The same images for torch's DataLoader: one request at a time in each worker, over a connection that is kept."""

    def __init__(self, endpoint: str, bucket: str, keys: list[str]) -> None:
        self.host, self.bucket, self.keys = urlsplit(endpoint).netloc, bucket, keys
        self.connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample:
        self.connection = self.connection or http.client.HTTPConnection(self.host)
        self.connection.request("GET", f"/{self.bucket}/{self.keys[index]}")
        return decode(self.connection.getresponse().read(), self.keys[index])


def images_per_second(loader: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Read once, and count from the first batch on: how long workers take to start is another matter."""
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    images = sum(len(labels) for _, labels in batches)
    return images / (time.perf_counter() - began)


def main() -> None:
    parser = training_arguments(__doc__)
    parser.add_argument("--latency-ms", type=float, default=20, help="of the local store (default: 20)")
    parser.add_argument("--endpoint", help="url of another store; its images have to lie as CLASS/NAME.png")
    parser.add_argument("--bucket", default="digits")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more, and the workers want the other cores
    with contextlib.ExitStack() as stack:
        endpoint = args.endpoint
        config: Any = {}  # of obstore
        if endpoint is None:
            write_digits(args.data)
            endpoint = stack.enter_context(local_bucket(args.data, args.latency_ms))
            config = {"access_key_id": "example", "secret_access_key": "example", "region": "us-east-1"}
        store = S3Store(args.bucket, endpoint=endpoint, config=config, client_options={"allow_http": True})
        run(args, store, endpoint)


def run(args: argparse.Namespace, store: S3Store, endpoint: str) -> None:
    """List the images, compare, train."""
    names = sorted(entry["path"] for chunk in obstore.list(store) for entry in chunk if entry["path"].endswith(".png"))
    random.Random(0).shuffle(names)
    test, train = names[: len(names) // 5], names[len(names) // 5 :]
    print(f"{len(train)} images to train on and {len(test)} to test with, at {endpoint}")

    blocking = BlockingImages(endpoint, args.bucket, test)
    theirs = images_per_second(torch.utils.data.DataLoader(blocking, batch_size=32, num_workers=args.workers))
    # Where obstore has been used, as for the list, forked workers would wait for its threads for ever.
    workers = {"num_workers": args.workers, "multiprocessing_context": "forkserver"}
    everything = RemoteDataset(store, names * 3, decode)
    ours = images_per_second(DataLoader(everything, batch_size=32, **workers))
    print(f"torch's DataLoader reads {theirs:.0f} images/s, ours {ours:.0f} ({ours / theirs:.0f} times as many)")

    train_loader = DataLoader(RemoteDataset(store, train, decode_and_shift), batch_size=32, shuffle=True, **workers)
    test_loader = DataLoader(RemoteDataset(store, test, decode), batch_size=128, **workers)
    train_and_report(train_loader, test_loader, args.epochs, args.min_accuracy)


if __name__ == "__main__":
    main()
