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
from itertools import takewhile
from types import FrameType

_OWN = re.compile(re.escape(os.sep).join(["asyncloader", "(worker|backends|messages|ray)", ""]))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_HEAD = re.compile(r"(Current t|T)hread\b.*\(most recent call first\):$")
_LEFT_OUT = "  (frames of asyncloader, and of what started the worker, are left out)"


def shorten(text: str) -> str:
    """Return what faulthandler wrote without the loader's frames, and without threads that have no others.

    Text beside the stacks stays as it is; so does a text in which no stack has a frame of the user's.
    """
    lines, shown, has_users, at = text.splitlines(), list[str](), False, 0
    while at < len(lines):
        head, at = lines[at], at + 1
        if not _HEAD.match(head):
            shown.append(head)
            continue
        frames = list(takewhile(lambda line: line.startswith("  "), lines[at:]))
        at += len(frames)
        users = list(takewhile(lambda line: not _OWN.search(line), frames))
        if len(users) == len(frames):
            shown += [head, *frames]
        elif not all(_STANDARD in line and "-packages" not in line for line in users):
            has_users = True
            shown += [head, *users, _LEFT_OUT]
        elif at < len(lines) and not lines[at]:  # the empty line behind a stack
            at += 1
    return "\n".join([*shown, ""]) if has_users else text


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
