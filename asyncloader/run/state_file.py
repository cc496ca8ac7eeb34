"""States of loaders in files: written whole or not at all, read back as they were.

A state that JSON says all of, as most are, is written as JSON; one with objects of the user's in it by `torch.save`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import torch

from asyncloader.plain import says_all


def write_state(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state; whoever reads the file meanwhile, or after a crash, finds the one before or this one."""
    with _beside(path) as (temporary, target):
        with open(temporary, "xb") as file:
            file.write(_packed(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


async def awrite_state(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state as `write_state` does, without blocking the loop."""
    data = _packed(state)
    with _beside(path) as (temporary, target):
        async with aiofiles.open(temporary, "xb") as file:
            await file.write(data)
            await file.flush()
            await aiofiles.os.wrap(os.fsync)(file.fileno())
        await aiofiles.os.replace(temporary, target)


def read_state(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Read what `write_state` has written.

    Args:
        path: The file's.
        weights_only: As for :func:`torch.load`: False also unpickles objects of your own, which can run any code.
    """
    return _unpacked(Path(path).read_bytes(), weights_only)


async def aread_state(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Read a state as `read_state` does, without blocking the loop."""
    async with aiofiles.open(path, "rb") as file:
        return _unpacked(await file.read(), weights_only)


@contextlib.contextmanager
def _beside(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """Give a name for a file that is to take the place of another, which a link may lead to; leave nothing under it."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield temporary, target
    finally:
        temporary.unlink(missing_ok=True)


def _packed(state: dict[str, Any]) -> bytes:
    if says_all(state):
        return json.dumps(state).encode()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes, weights_only: bool) -> dict[str, Any]:
    if data.startswith(b"{"):
        state: dict[str, Any] = json.loads(data)
    else:
        state = torch.load(io.BytesIO(data), weights_only=weights_only)
    return state
