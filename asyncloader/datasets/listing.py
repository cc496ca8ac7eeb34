"""List the keys of an object store in a process of its own, so that this one can still be forked.

    parent:  list_apart(url, options, retries) ── pickle ──> child: obstore.list ── pickle ──> keys, or what it raised

The child is a plain `python -c` that imports obstore and nothing of ours: a tenth of a second.
"""

from __future__ import annotations

import datetime
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle

from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.errors import redacted

MOST_KEYS = 10_000_000
_MOST_BYTES = 8 << 30
_LONGEST_S = 1e8

# os._exit: an interpreter that ends as ever, while threads of obstore's are at work, is aborted now and then.
_CHILD = """
import os, pickle, resource, signal, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
try:
    url, options, most_keys, most_bytes, chunk_s = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    import obstore, obstore.store
    signal.setitimer(signal.ITIMER_REAL, chunk_s)
    store, keys = obstore.store.from_url(url, **options), []
    for chunk in obstore.list(store, chunk_size=1000):
        signal.setitimer(signal.ITIMER_REAL, chunk_s)
        keys += [entry["path"] for entry in chunk]
        if len(keys) > most_keys:
            raise OverflowError(f"there are more than {most_keys:,} objects: name those that are wanted (keys=...)")
    signal.setitimer(signal.ITIMER_REAL, 0)
    found = keys, None
except Exception as error:
    found = None, (type(error).__name__, str(error).partition("\\n")[0][:2000])
pickle.dump(found, sys.stdout.buffer)
sys.stdout.flush()
os._exit(0)
"""


def ask_child(code: str, question: Any) -> subprocess.CompletedProcess[bytes]:
    """Run code in another interpreter: it finds the path for imports, then the question, pickled on its input."""
    request = pickle.dumps(sys.path) + cloudpickle.dumps(question)
    return subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, check=False)


def list_apart(url: str, options: Mapping[str, Any], retries: Retries) -> list[str]:
    """Return all keys behind a url. obstore itself tries again, as `retries` says.

    A server may list for ever: pages without keys, keys that it makes up, a page without an end. So there are bounds.

    Raises:
        FetchError: The listing did not succeed, or 1,000 more keys did not come within the seconds of `retries`; there
            are more keys than `MOST_KEYS`, or they take more memory than `_MOST_BYTES`.
    """
    retry_config = {
        "max_retries": retries.tries - 1,
        "retry_timeout": datetime.timedelta(seconds=retries.total_s),
        "backoff": {
            "init_backoff": datetime.timedelta(seconds=retries.first_wait_s),
            "max_backoff": datetime.timedelta(seconds=retries.longest_wait_s),
            "base": 2,
        },
    }
    chunk_s = min(retries.total_s, _LONGEST_S)
    told = url, {**options, "retry_config": retry_config}, MOST_KEYS, _MOST_BYTES, chunk_s
    done = ask_child(_CHILD, told)
    if done.returncode == -signal.SIGALRM:
        raise FetchError(
            f"{url}: listing has come to a halt: 1,000 more keys did not come within {chunk_s:g} s. Give more time "
            "(retries=Retries(total_s=...)), or name the objects (keys=...)"
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        said = said if len(said) < 2000 else f"{said[:500]} ... {said[-1500:]}"
        raise FetchError(
            f"{url}: listing, which may take {_MOST_BYTES:,} bytes, ended with code {done.returncode}: {said}"
        )
    keys: list[str]
    keys, failure = pickle.loads(done.stdout)
    if failure is not None:
        kind, said = failure
        raise (PermissionError if "Permission" in kind or "Unauthenticated" in kind else FetchError)(
            redacted(f"{url}: {said}")
        )
    return keys
