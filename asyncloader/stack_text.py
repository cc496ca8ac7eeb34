"""Stacks of workers for messages: the user's frames, without those of the loader and of the trainer around them.

most recent call first, as faulthandler writes      shown
File "dataset.py", line 7 in __getitem__          yes
File "asyncloader/worker/...                      no, and nothing below: the loader's frames, and in a forked
File "train.py", line 90 in <module>              worker those of the trainer that forked it
"""

from __future__ import annotations

import os
import re
import traceback
from types import FrameType

_OWN = re.compile(re.escape(os.sep).join(["asyncloader", "(worker|backends|messages|ray)", ""]))
_LOADERS = re.compile(rf"^  File .*{_OWN.pattern}.*\n(  .*\n?)*", re.MULTILINE)
_LEFT_OUT = "  (frames of asyncloader, and of what started the worker, are left out)\n"


def shorten(text: str) -> str:
    """Return what faulthandler wrote; of each stack, without the loader's frames, and what is below them.

    A text that would have no frame left stays as it is.
    """
    shown = _LOADERS.sub(_LEFT_OUT, text)
    return shown if '  File "' in shown else text


def stack_of(frame: FrameType | None) -> str:
    """Return the stack of a thread of this process, as a traceback shows it, without the loader's outer frames."""
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    begin = max((number + 1 for number, each in enumerate(frames) if _OWN.search(each.filename)), default=0)
    return "".join(traceback.format_list(frames[begin:] or frames))


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, without the loader's outer frames."""
    trace = users = error.__traceback__
    while trace is not None:
        if _OWN.search(trace.tb_frame.f_code.co_filename):
            users = trace.tb_next
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, users or error.__traceback__))
