"""List the keys of an object store in a process of its own, so that this one can still be forked.

    parent:  list_apart(url, options, retries) ── pickle ──> child: obstore.list ── pickle ──> keys, or what it raised

The child is a plain `python -c` that imports obstore and nothing of ours: a tenth of a second.
"""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle

from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.errors import redacted

# os._exit: an interpreter that ends as ever, while threads of obstore's are at work, is aborted now and then.
_CHILD = """
import os, pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
try:
    url, options = pickle.load(sys.stdin.buffer)
    import obstore, obstore.store
    store = obstore.store.from_url(url, **options)
    found = [entry["path"] for chunk in obstore.list(store, chunk_size=1000) for entry in chunk], None
except Exception as error:
    found = None, (type(error).__name__, str(error).partition("\\n")[0])
pickle.dump(found, sys.stdout.buffer)
sys.stdout.flush()
os._exit(0)
"""


def list_apart(url: str, options: Mapping[str, Any], retries: Retries) -> list[str]:
    """Return all keys behind a url. obstore itself tries again, as `retries` says.

    Raises:
        FetchError: The listing did not succeed, or not in time.
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
    request = pickle.dumps(sys.path) + cloudpickle.dumps((url, {**options, "retry_config": retry_config}))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=request, capture_output=True, check=False)
    if done.returncode:
        raise FetchError(f"{url}: listing ended with code {done.returncode}: {done.stderr.decode()[-2000:]}")
    keys: list[str]
    keys, failure = pickle.loads(done.stdout)
    if failure is not None:
        kind, said = failure
        raise (PermissionError if "Permission" in kind or "Unauthenticated" in kind else FetchError)(
            redacted(f"{url}: {said}")
        )
    return keys
