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


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Write them as files."""
    paths = [folder / f"{number:05}.jpg" for number in range(count)]
    for path, data in zip(paths, jpegs(count), strict=True):
        path.write_bytes(data)
    return paths


def decode(data: bytes, key: object = None) -> Tensor:
    """Decode to a tensor of shape (3, side, side), uint8."""
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
