"""Files that appear under their names when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_one_piece(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Return a path beside this one, to write to inside: the file there takes the place of this one at the end.

    Raises:
        OSError: The file cannot be put there.
    """
    beside = Path(f"{os.fspath(path)}.{secrets.token_hex(4)}.part")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
