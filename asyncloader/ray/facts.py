"""Facts that two machines must share to make the same batches, bit for bit: versions, features of the processor.

The same operation of torch gives other last bits of a float where vectors are 16 floats wide (AVX-512) and not 8.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform

import torch

FACTS = ("asyncloader", "Python", "torch", "numpy", "machine", "vectors of torch")
"""What is compared."""


def facts() -> dict[str, str]:
    """Look at this process and its machine."""
    return {
        "asyncloader": importlib.import_module("asyncloader").__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "machine": f"{platform.system()} {platform.machine()}",
        "vectors of torch": torch.backends.cpu.get_cpu_capability(),
    }


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """Say what differs, a line each: "torch is 2.13.0 here and 2.12.1 there"."""
    return [
        f"{name} is {here.get(name)} here and {there.get(name)} there"
        for name in FACTS
        if here.get(name) != there.get(name)
    ]
