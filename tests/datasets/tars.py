"""Tar files for tests, made in memory."""

from __future__ import annotations

import io
import tarfile

SAMPLES = 20  # of each shard


def tar_bytes(files: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an archive of a folder and these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as shard:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        shard.addfile(folder)
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5  # a fraction of a second makes a pax header
            shard.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def shard_bytes(number: int) -> bytes:
    """Return a shard of 20 samples of about 50 kB."""
    ids = [f"{number:02}-{position:03}" for position in range(SAMPLES)]
    return tar_bytes(
        [(f"{one}.{part}", one.encode() * size) for one in ids for part, size in (("txt", 1), ("bin", 8000))]
    )


SHARDS = {f"{number:02}.tar": shard_bytes(number) for number in range(6)}
IDS = [f"{number:02}-{position:03}" for number in range(6) for position in range(SAMPLES)]


def text(sample: dict[str, bytes]) -> str:
    """Decode a sample of `SHARDS`: its name."""
    return sample["txt"].decode()
