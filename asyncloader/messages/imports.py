"""The imports of other threads, in a forked worker: their locks are held by nobody, their modules are half made.

With torch's loader the thread that iterates forks the worker, and so does ours; but a worker that is replaced is forked
by the background thread, whatever other threads are at.
"""

from __future__ import annotations

import importlib._bootstrap as importing
import sys
import threading
from typing import Any, cast

_imports = cast(Any, importing)


def imports_here() -> frozenset[str]:
    """Return the modules that the calling thread is in the middle of importing, as if it iterates in the body of one.

    It holds their locks.
    """
    me, locks = threading.get_ident(), tuple(_imports._module_locks.items())
    return frozenset(name for name, ref in locks if getattr(ref(), "owner", None) == me)


def forget_imports_of_others(iterating: frozenset[str]) -> None:
    """In a forked child: let modules that other threads were importing be imported anew.

    The child has none of those threads: an import of the same module would wait for ever, or find half a module. A
    module that the iterating thread was in the middle of stays as it is, as it would be there for a child of that
    thread: to run it again would iterate again.

    Args:
        iterating: The modules that the thread that iterates is importing.
    """
    me = threading.get_ident()
    for name, ref in tuple(_imports._module_locks.items()):
        lock = ref()
        owner = getattr(lock, "owner", None)
        if owner is not None and owner == me:
            continue
        _imports._module_locks.pop(name, None)
        is_half_made = getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)
        if owner is not None and name not in iterating and is_half_made:
            del sys.modules[name]
    _imports._blocking_on.clear()
