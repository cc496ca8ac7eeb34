"""The command ``asyncloader``: bench, trace, doctor."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Without the packages of the extra ``cli`` it says so, but for the self-test."""
    try:
        from asyncloader.cli import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich", "psutil"):
            raise
        if sys.argv[1:3] == ["doctor", "--selftest"]:
            from asyncloader.cli.selftest import selftest

            sys.exit(not selftest("--json" in sys.argv))
        sys.exit(f"The command line needs {missing.name}: pip install 'asyncloader[cli]'")
    app.main()
