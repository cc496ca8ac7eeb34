"""Accelerate, and what is built on it (the Hugging Face Trainer), with loaders of ours.

use_asyncloader() ── once, before training ──> prepare(loader) and Trainer build asyncloader.DataLoader, not torch's
async for batch in prepared
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any

from asyncloader.errors import ConfigurationError
from asyncloader.loader import OPTIONS, DataLoader
from asyncloader.messages.modes import Modes

_END: Any = object()


def use_asyncloader(**options: Any) -> None:
    """Have Accelerate build loaders of ours from now on, with these options, and let them take ``async for``.

    Accelerate builds another loader in place of each that it prepares, and so does the Hugging Face Trainer, whose
    loaders Accelerate prepares. With this call, which may be repeated, these are loaders of ours. The call sets
    `accelerate.data_loader.DataLoader`, the name by which Accelerate finds torch's, and an ``__aiter__`` and the
    ``__init__`` of its loaders: with ``use_stateful_dataloader=True`` these are ours too, and not torchdata's.

    Args:
        options: Options of ours, such as ``scheduling="dynamic"``: Accelerate hands on torch's arguments only.

    Raises:
        ConfigurationError: if there is no such option.
        ImportError: if Accelerate is not installed.

    Example:
        >>> import asyncloader.accelerate
        >>> asyncloader.accelerate.use_asyncloader(scheduling="dynamic")
    """
    import accelerate.data_loader as theirs

    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ConfigurationError(
            f"{', '.join(unknown)}: no option beyond torch's; what torch's loader takes is given to the loader, or to "
            "TrainingArguments (dataloader_...)"
        )
    theirs.DataLoader = partial(DataLoader, **options) if options else DataLoader
    theirs.DataLoaderAdapter.__aiter__ = _batches
    init = theirs.DataLoaderAdapter.__init__
    if not hasattr(init, "__wrapped__"):
        theirs.DataLoaderAdapter.__init__ = _init_of_ours(init)


def _init_of_ours(init: Any) -> Any:
    """Return an ``__init__`` of Accelerate's loaders that builds `DataLoader` where torchdata's is asked for, too.

    Checkpoints have its state then: Accelerate looks at ``use_stateful_dataloader``.
    """

    @wraps(init)
    def build(self: Any, dataset: Any, use_stateful_dataloader: bool = False, **arguments: Any) -> None:
        init(self, dataset, **arguments)
        self.use_stateful_dataloader = use_stateful_dataloader

    return build


async def _batches(prepared: Any) -> AsyncIterator[Any]:
    """Iterate as Accelerate does, on a thread, so that the caller's loop is free while a batch is waited for.

    All that Accelerate does around a batch (it looks one ahead, moves it, notes the state) is done by its own
    ``__iter__``.
    """
    modes, iterator = Modes.of_this_thread(), iter(prepared)

    def step() -> Any:
        with modes.active():
            return next(iterator, _END)

    thread = ThreadPoolExecutor(1, "asyncloader accelerate")
    try:
        while (batch := await asyncio.wrap_future(thread.submit(step))) is not _END:
            yield batch
            del batch
    finally:
        thread.submit(iterator.close)  # behind a step that a cancelled task has left
        thread.shutdown(wait=False)
