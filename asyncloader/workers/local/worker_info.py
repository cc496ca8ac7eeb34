"""``torch.utils.data.get_worker_info()`` in worker threads.

torch keeps the answer in a global of its module, which is right in a worker process. Set in this process it would be
the answer in the trainer's own threads as well. So the function is given a body that looks into a context variable
first; a body and not another function, for many have imported it by name. Done when the first worker thread starts.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker

_info: ContextVar[Any] = ContextVar("asyncloader worker", default=None)


def set_worker_info(info: Any) -> None:
    """Set what ``get_worker_info()`` returns in this context: this thread, its tasks, and ``asyncio.to_thread``."""
    theirs: Any = torch_worker
    if not hasattr(theirs, "_asyncloader_info"):
        theirs._asyncloader_info = _look
        theirs.get_worker_info.__code__ = _get_worker_info.__code__
    _info.set(info)


def _get_worker_info() -> Any:  # runs with the globals of torch's module
    return _asyncloader_info(_worker_info)  # type: ignore[name-defined] # noqa: F821


def _look(default: Any) -> Any:
    # torch's collation asks whether to put tensors into shared memory for another process. There is none here.
    if sys._getframe(2).f_globals is vars(torch_collate):
        return default
    return _info.get() or default
