"""Runs programs as a user runs them: in a process of their own, with warnings as errors."""

import os
import subprocess
import sys
from pathlib import Path

ALLOWED_WARNINGS = (
    "ignore:This process:DeprecationWarning",  # Python 3.12 and later, at any fork: see pyproject.toml
    # Python 3.15, of multiprocessing's copy of the main module: as an error it ends torch's import in a fork server.
    "ignore:Module globals is missing:DeprecationWarning",
    "ignore:This DataLoader will create:UserWarning",  # more workers than this machine has cores
)


def run_python(*arguments: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, from a folder that is not the repository's, and without progress bars."""
    filters = [part for allowed in ALLOWED_WARNINGS for part in ("-W", allowed)]
    command = [python, "-W", "error", *filters, *arguments]
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd="/", env=quiet, check=False)
