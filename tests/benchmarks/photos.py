"""JPEG files of real photographs without a network: crops of the two photographs that scikit-learn carries."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor


def jpegs(count: int, side: int = 160) -> list[bytes]:
    """Encode `count` square crops, each of another place, alternating between the two photographs."""
    photographs = load_sample_images().images  # 427 x 640, RGB
    rng = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        top, left = (int(rng.integers(0, size - side)) for size in photograph.shape[:2])
        buffer = io.BytesIO()
        Image.fromarray(photograph[top : top + side, left : left + side]).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def photographs(count: int, size: tuple[int, int]) -> list[bytes]:
    """Encode `count` pictures of this width and height, each of another part of the photographs."""
    originals = load_sample_images().images
    rng = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        original = originals[number % len(originals)]
        share = rng.uniform(0.8, 1.0)
        height, width = (int(side * share) for side in original.shape[:2])
        top, left = int(rng.integers(original.shape[0] - height + 1)), int(rng.integers(original.shape[1] - width + 1))
        buffer = io.BytesIO()
        picture = Image.fromarray(original[top : top + height, left : left + width]).resize(size)
        picture.save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Write them as files."""
    paths = [folder / f"{number:05}.jpg" for number in range(count)]
    for path, data in zip(paths, jpegs(count), strict=True):
        path.write_bytes(data)
    return paths


def decode(data: bytes, key: object = None, size: tuple[int, int] | None = None) -> Tensor:
    """Decode to a tensor of shape (3, height, width), uint8; resized to this width and height if they are given."""
    with Image.open(io.BytesIO(data)) as image:
        picture = image if size is None else image.resize(size)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
