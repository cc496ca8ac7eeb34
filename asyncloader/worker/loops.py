"""The loops of the portal and of workers, which go on after SystemExit and KeyboardInterrupt.

asyncio lets both out of `run_forever`, whatever task or callback raised them, for it takes them for the wish to end the
program. In a worker process that is what they do. In the trainer's process others use the same loop, or thread, and a
sample cannot end the loop that serves all loaders: what was raised is the failure of the batch, like anything else that
a sample raises.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncloader import threads

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop: uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until its `stop` is called."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            if not (threads.is_ending or _is_of_a_task(error)):
                message = f"A callback on a DataLoader's event loop raised {type(error).__name__}"
                loop.call_exception_handler({"message": message, "exception": error})


def run(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end on the loop of the runner, and return what it returns."""
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    task.add_done_callback(lambda _: loop.stop())
    run_forever(loop)
    return task.result()


def _is_of_a_task(error: BaseException) -> bool:
    """Whether it was raised in a coroutine: then the task has it for whoever awaits that, or reports it itself."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_flags & inspect.CO_COROUTINE for frame, _ in frames)
