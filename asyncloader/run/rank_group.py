"""The group in which ranks tell each other how many batches they have: one for all loaders of a process.

    consumers ── ask ──> questions ── all_gather, in the thread of the group ──> answers of all ranks ──> consumers

Whose turn it is in there is the order of the loaders' calls, which threads and tasks may mix up, differently on each
rank: so a question says which loader it is of.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
import torch.distributed as dist

from asyncloader import threads
from asyncloader.engine import exits
from asyncloader.engine.answer import Answer


class Question:
    """A message of this rank to all others, answered by theirs.

    Args:
        said: Loader, run, chunk, and how many batches there are for that, up to one beyond.

    Attributes:
        is_asked: Written by the thread of the group.
        answers: The messages of all ranks.
    """

    def __init__(self, said: list[int]) -> None:
        self.said = said
        self.is_asked = False
        self.answers = Answer[list[list[int]]]()
        self.answers.set_running_or_notify_cancel()  # from now on nobody can cancel it


class RankGroup:
    """A group for this alone, over gloo: what the trainer does in its own at the time is not disturbed.

    All ranks have to join in making it, and in each question. So both happen once, in a thread of its own, whoever
    stops waiting for it; and where a signal's handler does not come in between.

    Args:
        world: The group of the trainer.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self._group: Any = None
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._is_served = threading.Lock()  # held by the thread

    def ask(self, question: Question) -> None:
        """Have a question asked. Whoever does not know whether this was done does it again."""
        self._questions.put(question)
        if not self._is_served.locked():
            threads.start(self._serve, "asyncloader equal steps")

    def stop(self) -> None:
        """End the thread. Returns at once."""
        self._questions.put(None)

    def _serve(self) -> None:
        if not self._is_served.acquire(blocking=False):
            return  # there was another one
        try:
            while (question := self._questions.get()) is not None:
                if not question.is_asked:
                    question.is_asked = True
                    self._answer(question)
                del question
        finally:
            self._is_served.release()
        if self._questions.qsize():  # whoever asked since the end was said has found this thread still there
            self._serve()

    def _answer(self, question: Question) -> None:
        try:
            question.answers.set_result(self._gather(question.said))
        except BaseException as error:
            question.answers.set_exception(error)

    def _gather(self, said: list[int]) -> list[list[int]]:
        """Return what all ranks say."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        own = torch.tensor(said)
        told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(told, own, group=self._group)
        return [each.tolist() for each in told]


_group: RankGroup | None = None
_choosing = threading.Lock()  # held to replace it


def own_group() -> RankGroup:
    """Return our group beside that of the trainer, which may be another one by now."""
    global _group
    world = dist.group.WORLD
    with _choosing:
        group = _group
        if group is None or group.world is not world:
            _stop_at_exit()
            group = _group = RankGroup(world)
    return group


def _stop_at_exit() -> None:
    """Have the thread end."""
    if _group is not None:
        _group.stop()


exits.at_exit(_stop_at_exit)
