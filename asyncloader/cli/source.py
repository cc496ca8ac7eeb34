"""The user's loader, by the name of the function that makes it, and the same loader made anew with other options."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.utils.data
from typer import BadParameter

from asyncloader.loader import OPTIONS, DataLoader
from asyncloader.options import OF_WORKERS, AutoWorkers

_TORCH = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class Source(NamedTuple):
    """The result of a user's function: a loader of torch's or of ours, and the step that uses a batch, if any."""

    loader: torch.utils.data.DataLoader[Any]
    step: Callable[[Any], object] | None

    def make(self, kind: type[torch.utils.data.DataLoader[Any]], **changes: Any) -> Any:
        """Make the loader anew as this class, with these options changed."""
        loader = self.loader
        options = {name: getattr(loader, name) for name in _TORCH}
        if issubclass(kind, DataLoader):
            options |= {name: getattr(loader, name) for name in OPTIONS if hasattr(loader, name)}
        options |= changes
        if options["num_workers"] != "auto" and not isinstance(options["num_workers"], AutoWorkers):
            options.pop("max_workers", None)
        if not options["num_workers"]:
            options = {name: value for name, value in options.items() if name not in OF_WORKERS}
        return kind(loader.dataset, **self._batching(), **options)

    def _batching(self) -> dict[str, Any]:
        loader = self.loader
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if loader.batch_sampler is None:
            return {"batch_size": None, "sampler": loader.sampler}
        if type(loader.batch_sampler) is not torch.utils.data.BatchSampler or loader.batch_size is None:
            return {"batch_sampler": loader.batch_sampler}
        return {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}


def find(name: str) -> Source:
    """Call the function that ``module:function`` names; a file's path may stand for the module.

    Raises:
        BadParameter: if there is no such function, or it makes no loader.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not colon:
        raise BadParameter(f"{name!r} should be module:function, such as train:make_loader")
    module = _module(module_name)
    made = getattr(module, function_name, None)
    if made is None:
        raise BadParameter(f"{module_name!r} has no {function_name!r}")
    made = made() if callable(made) and not isinstance(made, torch.utils.data.DataLoader) else made
    loader, step = made if isinstance(made, tuple) else (made, None)
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise BadParameter(
            f"{name} made {type(loader).__name__}, not a DataLoader (or a pair of a DataLoader and a step)"
        )
    if step is not None and (not callable(step) or inspect.iscoroutinefunction(step)):
        raise BadParameter(f"the step that {name} gave is not a function")
    return Source(loader, step)


def _module(name: str) -> ModuleType:
    """Import a module by its name, or a file by its path."""
    path = Path(name)
    is_file = path.suffix == ".py"
    if not is_file and not all(map(str.isidentifier, name.split("."))):
        raise BadParameter(f"cannot import {name!r}: it is neither the name of a module nor a file that ends with .py")
    if is_file and not path.is_file():
        raise BadParameter(f"there is no file {name!r} (looked for in {Path.cwd()})")
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    name = path.stem if is_file else name
    if "." not in name and name not in sys.modules and importlib.util.find_spec(name) is None:
        raise BadParameter(f"cannot import {name!r}: there is no such module")
    module = importlib.import_module(name)
    found = getattr(module, "__file__", None)
    if is_file and (found is None or not path.samefile(found)):
        raise BadParameter(
            f"{name!r} cannot be imported: the module {path.stem!r} is another one ({found or 'built in'})"
        )
    return module
