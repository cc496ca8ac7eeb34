"""Print what is compared with torch, and what differs on purpose; `--json` for programs, `--write` for docs/.

`--record` asks torch in every case and writes its answers down (see recording.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import tests.conformance
from tests.conformance import comparison, differences, recording, suites

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
HEAD = """# What was compared with torch

Each behaviour below is a test that runs on torch's DataLoader and on ours, and checks that the results are equal: with
torch's random streams, nearly always with our defaults too, and with `async for` where that may differ. In a checkout,
`python -m tests.conformance --json` names each and says what exactly is compared and on what, `--write` makes this
page; `pytest --start-method spawn tests/conformance` runs the tests with spawned workers.
"""
REASONS = "In words: [differences from torch](differences.md)."


def page() -> str:
    """Write the page."""
    for module in pkgutil.iter_modules(tests.conformance.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"tests.conformance.{module.name}")
    same, different = comparison.table(comparison.CASES), differences.table(differences.DIFFERENCES)
    return (
        f"{HEAD}\n## The same as torch\n\n{same}\n\n## Different on purpose\n\n{REASONS}\n\n{different}\n\n"
        f"## Others' test suites\n\n{suites.section()}\n"
    )


def main() -> None:
    """Print or write what is compared."""
    if "--record" in sys.argv:
        recording.record()
        return
    text = page()
    if "--json" in sys.argv:
        listed = {"same": comparison.CASES, "different": differences.DIFFERENCES}
        plain = {name: [dataclasses.asdict(line) for line in lines] for name, lines in listed.items()}
        print(json.dumps(plain, indent=1))
    elif "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
