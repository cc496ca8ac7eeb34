"""The error tree.

    AsyncLoaderError
    ├── ConfigurationError      (also ValueError)                  an option that cannot work
    ├── LoaderClosedError       (also RuntimeError)                taking from what was closed
    ├── BatchTimeoutError       (also TimeoutError, RuntimeError)  the awaited batch did not come in time
    ├── StateMismatchError      (also ValueError)                  a state that was taken of something else
    ├── InternalError           (also RuntimeError)                a bug of asyncloader's own
    └── WorkerError             (also RuntimeError)
        ├── WorkerStartError                                       a worker did not come up
        └── WorkerDiedError                                        a worker process ended on its own

Errors that a dataset, sampler or ``collate_fn`` raises are not in this tree: they are raised as they were (see
:mod:`asyncloader.messages.failure`).
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Sequence
from typing import Any

from asyncloader.stack_text import shorten

_KEYS_SHOWN = 8
_MOST_OF_A_KEY = 200


_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_SECRET = re.compile(  # the value of a parameter of a url that is named like a secret, or looks like one
    r"([?&#][^=&#\s]*(?:sig|token|key|secret|passw|pwd|auth|cred|session|policy|jwt)[^=&#\s]*=)[^&#\s'\",)\]]+"
    r"|([?&#][^=&#\s]+=)[\w%+=-]{32,}(?=[&#\s'\",:)\]]|$)",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Return a text without the logins and signatures of the urls in it, for errors and logs."""
    return _SECRET.sub(lambda found: f"{found[1] or found[2]}***", _LOGIN.sub("***@", text))


class AsyncLoaderError(Exception):
    """Base of all errors of this package. No url in a message has its login or signature: see :func:`redacted`.

    They can be pickled: each can be made of its message alone, and gets its attributes afterwards.

    Args:
        args: The message.
        facts: The attributes that errors of its kind have.
    """

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))
        vars(self).update(facts)


class ConfigurationError(AsyncLoaderError, ValueError):
    """An option, or a combination of options, that cannot work. Raised at construction."""


class LoaderClosedError(AsyncLoaderError, RuntimeError):
    """The iterator was closed, or belongs to another process, and has no more batches to give."""


class BatchTimeoutError(AsyncLoaderError, TimeoutError, RuntimeError):
    """The awaited batch did not come within ``timeout`` seconds.

    With ``on_timeout="raise"`` nothing is lost: the next call waits for the same batch. With ``"retry"`` the batch was
    tried as often as ``max_retries`` allows, and is given up.

    Attributes:
        timeout_s: The consumer's wait, in seconds.
        keys: The indices of the awaited batch, as the sampler gave them.
        pid: Process id of the worker that holds it, or None.
        stack: Python stack of that worker at the moment of the timeout; may be empty.
    """

    timeout_s: float = 0.0
    keys: Any = None
    pid: int | None = None
    stack: str = ""


class StateMismatchError(AsyncLoaderError, ValueError, AssertionError):
    """A state does not fit what it is loaded into: a ValueError, and as torchdata's error an AssertionError.

    Attributes:
        field: The name that differs.
        saved: Its value when the state was taken.
        now: Its value now.
    """

    def __init__(self, field: str, saved: Any = None, now: Any = None, advice: str = "") -> None:
        super().__init__(field, saved, now, advice)
        self.field = field
        self.saved = saved
        self.now = now

    def __str__(self) -> str:
        text = f"The state does not fit: {self.field} was {self.saved!r} when it was taken, and is {self.now!r} now."
        return redacted(f"{text} {self.args[3]}".rstrip())


class InternalError(AsyncLoaderError, RuntimeError):
    """Something in asyncloader itself has failed, which no dataset, option or machine is to blame for.

    The error ends the run for all consumers, and its workers. ``__cause__`` is the exception that was raised, and a
    note has the last events of the run. The loader can be used again.
    """


class WorkerError(AsyncLoaderError, RuntimeError):
    """Something is wrong with a worker itself, not with the data."""


class WorkerStartError(WorkerError):
    """A worker did not start, or ended before it could take a batch."""


class WorkerDiedError(WorkerError):
    """A worker process ended while it had work.

    Attributes:
        pid: Its process id.
        exitcode: Its exit code; negative for a signal, as in :mod:`multiprocessing`; None if unknown.
        keys: The indices it held, one entry a batch, the batch in work first.
        output: The text that :mod:`faulthandler` wrote before the end; may be empty.
    """

    pid: int = -1
    exitcode: int | None = None
    keys: Sequence[Any] = ()
    output: str = ""


MAIN_IS_IMPORTED = (
    "Workers that are not forked import the main module again. What is only for the trainer goes under "
    '`if __name__ == "__main__":`.'
)

NO_GUARD = """The main module iterates over a DataLoader while it is imported for a worker, since it has no guard. Write

    def main():
        for batch in DataLoader(...):
            ...

    if __name__ == "__main__":
        main()

Workers that are not forked (spawn, or the fork server, which is the default from Python 3.14 on) import the main module
again, to find the classes and functions in it; what trains must not run then."""


def describe_keys(keys: Any) -> str:
    """Write the indices of one batch, as the sampler gave them, for a message: the first ones and the last."""
    if not isinstance(keys, (list, tuple)):
        return _describe_key(keys)
    if len(keys) <= _KEYS_SHOWN:
        return f"[{', '.join(map(_describe_key, keys))}]"
    first = ", ".join(map(_describe_key, keys[: _KEYS_SHOWN - 2]))
    return f"[{first}, ..., {_describe_key(keys[-1])}] ({len(keys)} indices)"


def _describe_key(key: Any) -> str:
    try:
        text = repr(key)
    except Exception as error:  # the user's; a message must come about all the same
        return f"<{type(key).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= _MOST_OF_A_KEY else f"{text[: _MOST_OF_A_KEY - 3]}..."


def describe_death(pid: int, exitcode: int | None) -> str:
    """Say how a worker ended, in torch's words, with the likely cause."""
    if exitcode is not None and exitcode < 0:
        return f"DataLoader worker (pid {pid}) is killed by signal: {_signal_name(-exitcode)}. {_cause(-exitcode)}"
    if exitcode is None:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly. If a fork server made it, that has ended too."
    return (
        f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exitcode}. Something in the dataset, "
        "collate_fn or worker_init_fn, or a library that they use, ended the process (sys.exit, os._exit). "
        "Rerunning with num_workers=0 may give better error trace."
    )


def last_words(output: str | bytearray) -> str:
    """Return what a worker wrote at its end, or we about that, to be put behind how it ended."""
    text = output if isinstance(output, str) else output.decode(errors="replace")
    return f"\nLast words of the worker:\n{shorten(text)}" if text else ""


def died(
    pid: int, exitcode: int | None, keys: Sequence[Any], tries: int, output: str, note: str = ""
) -> WorkerDiedError:
    """Build the error for a worker that died with work in hand.

    The ``note`` says what can be done about it. Batches of a stream have no indices.
    """
    parts = [describe_death(pid, exitcode)]
    are_of_a_stream = all(map(_is_of_a_stream, keys))
    if keys and are_of_a_stream:
        parts.append(f"It was reading an iterable dataset, and {len(keys)} batches were asked of it.")
    elif keys:
        parts.append(f"It was working on the indices {describe_keys(keys[0])}.")
    if len(keys) > 1 and not are_of_a_stream:
        parts.append(f"Batches queued behind it: {', '.join(describe_keys(k) for k in keys[1:])}.")
    if tries > 1:
        parts.append(f"This batch was tried {tries} times.")
    if note:
        parts.append(note)
    return WorkerDiedError(" ".join(parts) + last_words(output), pid=pid, exitcode=exitcode, keys=keys, output=output)


def _is_of_a_stream(keys: Any) -> bool:
    """Whether the keys of a batch only say how many samples it has."""
    return keys is None or (isinstance(keys, (list, tuple)) and len(keys) > 0 and all(key is None for key in keys))


def could_not_start(error: OSError | RuntimeError) -> WorkerStartError:
    """Build the error for a system that has no room for another worker, or for the loop."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return WorkerStartError(
            "Too many open files: a worker process takes 8 descriptors in the main process. Please increase "
            "the limit with `ulimit -n` in the shell, or use fewer workers."
        )
    if number == errno.EAGAIN:
        return WorkerStartError(
            f"The system allows no further process ({error}); see `ulimit -u`, or use fewer workers."
        )
    return WorkerStartError(f"A worker process could not be started: {error}")


def timed_out(
    timeout_s: float,
    keys: Any = None,
    worker: int | None = None,
    pid: int | None = None,
    stack: str = "",
    why: str = "",
    tries: int = 0,
    may_retry: bool = False,
) -> BatchTimeoutError:
    """Build the error for a batch that did not come in time.

    ``why`` says why there is no stack, or why no worker has the batch; after so many ``tries`` the batch is given up;
    ``may_retry`` says that another worker could try it, if the loader was told to.
    """
    words = f"DataLoader timed out after {timeout_s} seconds."
    if worker is None:
        words += f" No worker has the awaited batch: {why or 'it waits for one, or it is being pinned'}."
        return BatchTimeoutError(words, timeout_s=timeout_s)
    words += f" {describe_batch(keys, worker, pid)} "
    if tries:
        words += f"The batch is given up after {tries} tries.\n"
    else:
        words += "The next call waits for the same batch; raise timeout if samples may take so long"
        words += ', or have another worker try it: on_timeout="retry".\n' if may_retry else ".\n"
    words += f"The worker is at:\n{stack}" if stack else why
    return BatchTimeoutError(words, timeout_s=timeout_s, keys=keys, pid=pid, stack=stack)


def describe_batch(keys: Any, worker: int, pid: int | None) -> str:
    """Say which batch is awaited, and which worker has it."""
    which = "is of an iterable dataset" if _is_of_a_stream(keys) else f"has the indices {describe_keys(keys)}"
    return f"The awaited batch {which}; worker {worker} (pid {pid}) has it."


def internal(error: BaseException, events: str) -> InternalError:
    """Build the error for an exception in a place where none should come from, after these events."""
    made = InternalError(
        f"asyncloader itself has failed ({type(error).__name__}: {error}). This run cannot go on, and its workers are "
        "ended; iter(loader) begins a new run. This is a bug in asyncloader: please report it, with the traceback "
        "above and the versions of Python, torch and asyncloader."
    )
    made.add_note(f"The last events of the run: {events}")
    made.__cause__ = error
    return made


def exiting() -> LoaderClosedError:
    """Say why nothing can be begun any more."""
    return LoaderClosedError("the interpreter is exiting, no more batches are made")


def on_the_loop() -> ConfigurationError:
    """Say why a loader cannot be waited for where it would have to do the work."""
    return ConfigurationError(
        "a loader cannot be waited for by `for`, next() or close() on the event loop of the background "
        "thread, where the code of an async dataset runs with num_workers=0: that loop serves all loaders. Use "
        "`async for` there, or iterate inside asyncio.to_thread, or give the outer loader workers."
    )


def loop_blocked(timeout_s: float, stack: str) -> BatchTimeoutError:
    """Build the error for a batch that did not come because something blocks the loop of the background thread."""
    words = (
        f"DataLoader timed out after {timeout_s} seconds. The event loop of the background thread is blocked, and with "
        "it every loader of this process. With num_workers=0 the code of an async dataset runs there: what takes long "
        "without an await belongs on a thread (asyncio.to_thread), or in workers. "
    )
    return BatchTimeoutError(f"{words}It is at:\n{stack}", timeout_s=timeout_s, stack=stack)


def _signal_name(number: int) -> str:
    try:
        return f"{signal.strsignal(number) or number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _cause(number: int) -> str:
    if number == signal.SIGKILL:
        return "The usual cause is the kernel's out-of-memory killer, or a limit of the job scheduler."
    if number == signal.SIGBUS:
        return (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    if number in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return "A native library that the dataset uses crashed."
    if number != signal.SIGTERM:
        return "Another process sent it."
    return (
        "Another process sent it; or the worker closed its connections to the main process (does something close "
        "descriptors that it did not open?), and was ended for that."
    )
