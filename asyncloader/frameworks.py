"""Frameworks that make a loader anew of the one that they were given: what they find of our options, or a warning."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from types import FunctionType
from typing import Any


def name_options(init: Any, options: Mapping[str, inspect.Parameter]) -> None:
    """Add options to the signature of an ``__init__`` that takes any keywords, before those."""
    if not isinstance(init, FunctionType):
        return
    signature = inspect.signature(init)
    *named, last = signature.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return
    added = [parameter for name, parameter in options.items() if name not in signature.parameters]
    init.__dict__["__signature__"] = signature.replace(parameters=[*named, *added, last])


def warn_of_lost_state() -> None:
    """Warn where Lightning begins an epoch before it has handed over the loader's state, which it then never does.

    Lightning hands over a checkpoint's states of loaders where it sets the loaders up. It does so early where
    ``configure_optimizers`` asks for `Trainer.estimated_stepping_batches`: before it has read the states.
    """
    frame = sys._getframe(1) if _LIGHTNING & sys.modules.keys() else None
    while frame is not None and frame.f_code.co_name != "estimated_stepping_batches":
        frame = frame.f_back
    if frame is None:
        return
    connector = getattr(frame.f_locals.get("self"), "_checkpoint_connector", None)
    checkpoint = getattr(connector, "_loaded_checkpoint", None) or {}
    if checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader"):
        warnings.warn(
            "The checkpoint has a state of the loader, which Lightning will not load, as it was asked for "
            "trainer.estimated_stepping_batches before (Lightning#20550): the epoch begins again at its first batch. "
            "To go on in the middle of it, compute the number of steps from len(loader) and trainer.max_epochs.",
            stacklevel=3,
        )


_LIGHTNING = {"lightning.pytorch", "pytorch_lightning"}


class AskedByAccelerate:
    """An attribute, False, that Accelerate reads just before it builds another loader in place of this: time to warn.

    Not a data descriptor, so that a value which is set on a loader, as Accelerate does, goes before it.
    """

    def __set_name__(self, ours: type, name: str) -> None:
        self._ours = ours

    def __get__(self, loader: Any, owner: type) -> bool:
        # The class that Accelerate builds. Anything but these two was put there by somebody who knows what it does.
        built = getattr(sys.modules.get("accelerate.data_loader"), "DataLoader", None)
        if loader is not None and built in self._ours.__bases__:
            warnings.warn(
                "Accelerate builds a torch DataLoader in place of this one, and asyncloader is not used. To keep it, "
                "call this before: asyncloader.accelerate.use_asyncloader()",
                stacklevel=2,
            )
        elif loader is not None and built is self._ours and (lost := loader._changed_options()):
            warnings.warn(
                f"Accelerate builds this loader anew, without {lost}. To keep that, call this before: "
                f"asyncloader.accelerate.use_asyncloader({lost})",
                stacklevel=2,
            )
        return False
