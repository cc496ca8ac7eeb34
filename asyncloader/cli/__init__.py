"""The command ``asyncloader``: bench, trace, doctor."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Without the packages that it needs it says which these are: asyncloader is on no index."""
    try:
        from asyncloader.cli import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich", "psutil"):
            raise
        sys.exit(f"The command line needs {missing.name}: pip install typer rich psutil")
    app.main()
