"""Print what is compared with torch, and what differs on purpose; `--json` for programs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys

import tests.conformance
from tests.conformance import comparison, differences

for module in pkgutil.iter_modules(tests.conformance.__path__):
    if module.name.startswith("test_"):
        importlib.import_module(f"tests.conformance.{module.name}")

if "--json" in sys.argv:
    listed = {"same": comparison.CASES, "different": differences.DIFFERENCES}
    print(json.dumps({name: [dataclasses.asdict(line) for line in lines] for name, lines in listed.items()}, indent=1))
else:
    print("## The same as torch\n", comparison.table(comparison.CASES), sep="\n")
    print("\n## Different on purpose\n", differences.table(differences.DIFFERENCES), sep="\n")
