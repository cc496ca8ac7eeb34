"""torch's answers, written down by version, so that the quick tests need not ask torch in every case again.

    a case on ours ──> digest of what it saw ── equal to the recorded one? ──> passed
                                                     └─ no, or none is recorded ──> torch is asked, and the two compared

A recording can only save a question. Where ours differs from the digest, torch itself is asked, and what is compared
then is what both saw. Each night torch is asked in every case, and its answers have to be the recorded ones. An answer
that is not the same each time, since it has an address in it or is a matter of timing, is recorded as null.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "recordings"
COMMAND = "python -m tests.conformance --record"
ANOTHER_HASH_SEED = "1"


def path() -> Path:
    """Return where the answers of this version of torch, on this version of Python, are."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return FOLDER / f"torch-{torch.__version__.partition('+')[0]}-python-{python}.json"


def digest(seen: Any) -> str:
    """Return a digest of what a case saw, as plain values."""
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


class Recording:
    """Answers by the name of the case and its arguments."""

    def __init__(self) -> None:
        self._answers: dict[str, str | None] = json.loads(path().read_text()) if path().exists() else {}
        self._given: dict[str, str | None] = {}

    def confirms(self, key: str, seen: Any) -> bool:
        """Whether torch has answered this; False where that is not known."""
        return self._answers.get(key) == digest(seen)

    def check(self, key: str, seen: Any) -> None:
        """See that an answer that torch has just given is the recorded one, if there is a recording of this version."""
        recorded = self._answers.get(key, "")
        self._given[key] = digest(seen) if recorded in ("", digest(seen)) else None
        if self._answers and recorded is not None:
            assert recorded == digest(seen), f"torch answers otherwise than recorded ({COMMAND}): {seen!r}"

    def write(self) -> None:
        """Keep what torch has answered since this was made; what was recorded before and is not the same varies."""
        FOLDER.mkdir(exist_ok=True)
        path().write_text(json.dumps({**self._answers, **self._given}, indent=0, sort_keys=True) + "\n")


def record() -> None:
    """Ask torch in every case, twice: in processes that hash differently."""
    path().unlink(missing_ok=True)
    for seed in ("0", ANOTHER_HASH_SEED):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--subject", "torch", "--record"]
        command += [str(Path(__file__).parent)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=False)
