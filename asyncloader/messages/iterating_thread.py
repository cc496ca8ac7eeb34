"""The properties of the iterating thread that a worker takes over. With torch's loader that thread forks the worker.

The background thread was made by whoever iterated first, and has the cores and the priority of that moment. And what it
forks finds the imports of all other threads where they were: their locks held by nobody, their modules half made.
"""

from __future__ import annotations

import contextlib
import importlib._bootstrap as importing
import os
import sys
import threading
from typing import Any, NamedTuple, cast

_imports = cast(Any, importing)


class IteratingThread(NamedTuple):
    """The thread that began to iterate.

    Attributes:
        cores: The cores that the thread may use; None where the system does not tell.
        niceness: Its priority.
        importing: Modules whose import it is in the middle of, as if it iterates in the body of one.
    """

    cores: frozenset[int] | None
    niceness: int
    importing: frozenset[str]

    @classmethod
    def of_this_thread(cls) -> IteratingThread:
        """Look at the calling thread."""
        cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        return cls(cores, os.getpriority(os.PRIO_PROCESS, 0), frozenset(_imports_of(threading.get_ident())))

    def adopt(self) -> None:
        """Give the calling thread the same cores and priority, as far as it may."""
        with contextlib.suppress(OSError):
            if self.cores is not None and self.cores != os.sched_getaffinity(0):
                os.sched_setaffinity(0, self.cores)
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, 0) != self.niceness:
                os.setpriority(os.PRIO_PROCESS, 0, self.niceness)

    def forget_imports_of_others(self) -> None:
        """In a forked child: let modules that other threads were importing be imported anew.

        The child has none of those threads: an import of the same module would wait for ever, or find half a module. A
        module that the thread was in the middle of stays as it is, as it would be there for a child of its own: to run
        it again would iterate again.
        """
        me = threading.get_ident()
        for name, ref in tuple(_imports._module_locks.items()):
            lock = ref()
            owner = getattr(lock, "owner", None)
            if owner is not None and owner == me:
                continue
            _imports._module_locks.pop(name, None)
            if owner is not None and name not in self.importing and _is_half_made(name):
                del sys.modules[name]
        _imports._blocking_on.clear()


def _imports_of(thread: int) -> list[str]:
    """Return the modules that a thread is importing: it holds their locks."""
    locks = tuple(_imports._module_locks.items())
    return [name for name, ref in locks if getattr(ref(), "owner", None) == thread]


def _is_half_made(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))
