"""The connection of a worker in this process: messages through a queue, outcomes as calls on the parent's loop.

    pool ── put, hang_up ──> LocalTransport ── receive / listen ──> SerialLoop, OverlapLoop
         <── post ──────────────                <── send, send_outcome ──

Nothing is pickled. How large a batch is, which decides how far workers run ahead, is worked out here (`batch_bytes`);
and so is what ``torch.utils.data.get_worker_info()`` says in worker threads (`set_worker_info`).
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker

from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.transport import ParentGone, WorkerTransport

UNKNOWN = -1
"""What `batch_bytes` returns of a batch that holds something which it does not look into."""

_NUMBERS = frozenset({int, float, bool, complex, type(None)})
_PLAIN = (str, bytes, bytearray, int, float, np.generic, type(None))

_info: ContextVar[Any] = ContextVar("asyncloader worker", default=None)


class LocalTransport(WorkerTransport):
    """Both ends of the connection: messages in through a queue, outcomes out as calls on the parent's loop.

    Args:
        where: For the words of errors; "" on the portal's loop, where there is no worker in the user's eyes.
        post: Gives a message, kind and contents, to the parent; of an outcome, its kind and the outcome.
    """

    def __init__(self, where: str, post: Callable[[int, Any], None]) -> None:
        self.where = where
        self._post = post
        self._messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._is_hung_up = False
        self._context: contextvars.Context

    # ----------------------------------------------------------------------------------------- the parent's side

    def put(self, kind: int, contents: Any = None) -> None:
        """Send the worker a message."""
        self._messages.put((kind, contents))
        # The worker's thread sets `_loop`, and then reads once (`listen`). Either this thread finds the loop, and has
        # it read; or the loop was set after this look, and so that read comes after the message was put.
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended, and so has its loop
                loop.call_soon_threadsafe(self._ready, context=self._context)

    def hang_up(self) -> None:
        """Take nothing from the worker any more, and have it end as soon as it looks."""
        self._is_hung_up = self._is_muted = True
        self.put(Kind.END)

    # ----------------------------------------------------------------------------------------- the worker's side

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Become a worker in torch's eyes, in this thread. Its generators are everybody's: they are not seeded."""
        if self.where:
            info = torch_worker.WorkerInfo(
                id=worker_id,
                num_workers=spec.num_workers,
                seed=spec.base_seed + worker_id,
                dataset=open_dataset(),
                worker_method="thread",
            )
            set_worker_info(info)

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message."""
        try:
            message = self._messages.get(wait)
        except queue.Empty:
            message = None
        if self._is_hung_up:
            raise ParentGone
        return message

    def listen(self, loop: GuardedLoop, ready: Callable[[], None]) -> None:
        """Have the parent call ``ready`` on the loop, in the context of this worker."""
        self._context = contextvars.copy_context()
        super().listen(loop, ready)

    def unlisten(self) -> None:
        """Do so no more; the context, in which `get_worker_info` knows the dataset, is let go of."""
        super().unlisten()
        self._context = contextvars.Context()  # and not none: a parent in another thread may be about to use one

    def ends(self, error: BaseException) -> bool:
        """Whether the worker cannot go on after this: the user's SystemExit is told instead, to who waits for it."""
        return isinstance(error, ParentGone)

    def send(self, kind: int, body: Any = None) -> None:
        """Hand a message over."""
        if not self._is_muted:
            self._post(kind, body)

    def send_outcome(self, held: list[Outcome]) -> None:
        """Hand over what has become of a ticket."""
        outcome = held.pop()
        if outcome.kind == Kind.BATCH:
            outcome = outcome._replace(nbytes=batch_bytes(outcome.data))
        self.send(outcome.kind, outcome)


def set_worker_info(info: Any) -> None:
    """Set what ``get_worker_info()`` returns in this context: this thread, its tasks, and ``asyncio.to_thread``.

    torch keeps the answer in a global of its module, which is right in a worker process. Set in this process it would
    be the answer in the trainer's own threads as well. So the function is given a body that looks into a context
    variable first; a body and not another function, for many have imported it by name.
    """
    theirs: Any = torch_worker
    if not hasattr(theirs, "_asyncloader_info"):
        theirs._asyncloader_info = _look
        theirs.get_worker_info.__code__ = _get_worker_info.__code__
    _info.set(info)


def _get_worker_info() -> Any:  # runs with the globals of torch's module
    return _asyncloader_info(_worker_info)  # type: ignore[name-defined] # noqa: F821


def _look(default: Any) -> Any:
    # torch's collation asks whether to put tensors into shared memory for another process. A thread has none.
    if sys._getframe(2).f_globals is vars(torch_collate):
        return default
    return _info.get() or default


def batch_bytes(batch: Any, levels: int = 3) -> int:
    """Return the bytes of a batch: of tensors, arrays and texts in it, in up to three levels of containers.

    Returns:
        UNKNOWN if anything in it is of another kind, or deeper: then workers do not run ahead of torch's window.
    """
    if isinstance(batch, torch.Tensor):
        return batch.nbytes if batch.layout is torch.strided and not batch.is_nested else UNKNOWN
    if isinstance(batch, np.ndarray):
        return UNKNOWN if batch.dtype.hasobject else batch.nbytes
    if isinstance(batch, _PLAIN):
        return sys.getsizeof(batch)
    if not levels or not isinstance(batch, (list, tuple, dict)):
        return UNKNOWN
    parts = batch.values() if isinstance(batch, dict) else batch
    if _NUMBERS.issuperset(map(type, parts)):  # of which there may be thousands
        return sys.getsizeof(batch) + 32 * len(parts)
    sizes = [sys.getsizeof(batch), *(batch_bytes(part, levels - 1) for part in parts)]
    return UNKNOWN if UNKNOWN in sizes else sum(sizes)
