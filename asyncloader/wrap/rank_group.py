"""The group in which ranks tell each other how many batches they have: one for all loaders of a process.

    iterators ── ask ──> questions ── all_gather, in a thread ──> answers of all ranks ──> iterators

Whose turn it is in there is the order of the loaders' calls, which threads and tasks may mix up, differently on each
rank: so a question says which loader it is of.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from asyncloader import threads

Answers = Future[list[list[int]]]


class RankGroup:
    """A group for this alone, over gloo: what the trainer does in its own at the time is not disturbed.

    All ranks have to join in making it, and in each question. So both happen once, in a thread, whoever stops waiting
    for it; and where a signal's handler does not come in between. The thread ends when all questions are answered.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._lock = threading.Lock()
        self._questions: deque[tuple[list[int], Answers]] = deque()

    def ask(self, said: list[int]) -> Answers:
        """Tell all ranks something; return what will be what all of them tell, in the order of their ranks."""
        answers = Answers()
        answers.set_running_or_notify_cancel()  # from now on nobody can cancel it
        with self._lock:
            self._questions.append((said, answers))
            if len(self._questions) == 1:
                threads.start(self._answer_all, "asyncloader equal steps")
        return answers

    def _answer_all(self) -> None:
        while True:
            said, answers = self._questions[0]
            try:
                answers.set_result(self._gather(said))
            except BaseException as error:
                answers.set_exception(error)
            with self._lock:  # either `ask` finds this question and this thread goes on, or it starts another thread
                del self._questions[0]
                if not self._questions:
                    return

    def _gather(self, said: list[int]) -> list[list[int]]:
        """Return what all ranks say."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        own = torch.tensor(said)
        told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(told, own, group=self._group)
        return [each.tolist() for each in told]


_groups: weakref.WeakKeyDictionary[Any, RankGroup] = weakref.WeakKeyDictionary()
"""By the group of the trainer."""


def own_group() -> RankGroup:
    """Return our group beside that of the trainer, which may be another one by now."""
    return _groups.setdefault(dist.group.WORLD, RankGroup())
