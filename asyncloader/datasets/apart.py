"""Ask servers in a process of their own, so that this one can still be forked afterwards (see :mod:`.source`).

parent:  run_apart(function, arguments) ── pickle ──> child: calls it ── pickle ──> result or error

For what a dataset has to know when it is made, such as how long its files are. It takes as long as `import torch`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle

from asyncloader.datasets.errors import FetchError

T = TypeVar("T")

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from asyncloader.datasets.apart import serve
serve()
"""


def run_apart(function: Callable[..., T], *args: Any) -> T:
    """Return what a function of this package returns, called in another process. What it raises is raised.

    Raises:
        FetchError: The process ended before it had an answer.
    """
    request = pickle.dumps(sys.path) + cloudpickle.dumps((function, args))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=request, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise FetchError(f"a process that asked the servers ended with code {done.returncode}: {said}")
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def serve() -> None:
    """Answer the request on standard input, in the child, and end at once.

    An interpreter that ends as ever, while threads of obstore's are at work, is aborted now and then.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints is no answer
    function, args = pickle.load(sys.stdin.buffer)
    answer: tuple[Any, BaseException | None]
    try:
        answer = function(*args), None
    except Exception as error:
        answer = None, _bare(error)
    out.write(cloudpickle.dumps(answer))
    out.flush()
    os._exit(0)


def _bare(error: Exception) -> Exception:
    """Return an error as it can be pickled: without causes of other libraries' classes."""
    error.__cause__ = error.__context__ = None
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return FetchError(f"{type(error).__name__}: {error}")
