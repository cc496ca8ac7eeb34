"""Try again what failed for a reason that passes: exponential back-off with jitter, within a bounded total time.

Written here because the libraries for it (tenacity, and stamina on top of it) draw their jitter from the global
generator of :mod:`random`: a server that stutters would change the augmentation of seeded workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncloader.errors import AsyncLoaderError, ConfigurationError, redacted

T = TypeVar("T")

_log = logging.getLogger("asyncloader.datasets")
_jitter = random.SystemRandom()  # has no state: forked workers would inherit the same one, and come back together


class FetchError(AsyncLoaderError, OSError):
    """A file, object or row did not come, for a reason other than that it is not there.

    Raised when the tries or the time that :class:`Retries` allows are used up, its cause being the last failure, and at
    once when trying again cannot help (the server says that the request is wrong).
    """


class TransientError(Exception):
    """A failure that may be gone in a moment; datasets raise it inside a try, users never see it.

    Attributes:
        wait_s: How long the server asks to be left alone, or None if it does not say.
    """

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(redacted(message))
        self.wait_s = wait_s


@dataclasses.dataclass(frozen=True, slots=True)
class Retries:
    """How often and how long a fetch is tried.

    Between the first try and the second there is a wait of ``first_wait_s``, then one twice as long, and so on up to
    ``longest_wait_s``, each cut by up to a half at random, so that workers that failed together do not come back
    together. A server that says how long it wants to be left alone (``Retry-After``) is obeyed. Each wait is logged: a
    line of level INFO from the logger ``asyncloader.datasets``.

    Args:
        tries: Tries in all, the first included; 1 never tries again.
        total_s: Seconds for all tries and waits together; a try that is under way then is cancelled.
        first_wait_s: Seconds between the first try and the second.
        longest_wait_s: The most seconds between two tries, unless the server asks for more.
    """

    tries: int = 6
    total_s: float = 120.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0

    def __post_init__(self) -> None:
        is_possible = self.total_s > 0 and 0 <= self.first_wait_s <= self.longest_wait_s  # which nan is not
        if self.tries < 1 or not is_possible:
            raise ConfigurationError(f"tries and times that cannot be kept to: {self!r}")

    async def run(self, attempt: Callable[[], Awaitable[T]], what: object) -> T:
        """Await ``attempt()`` until it succeeds; any exception but :class:`TransientError` ends it.

        Args:
            attempt: Makes one try.
            what: Named in the error and in the log.

        Raises:
            FetchError: No try succeeded in time.
        """
        tried = 0
        last: TransientError | None = None
        try:
            async with asyncio.timeout(self.total_s) as limit:
                while True:
                    tried += 1
                    try:
                        return await attempt()
                    except TransientError as failure:
                        last = failure
                    if tried == self.tries:
                        break
                    wait_s = self._wait_s(tried, last)
                    _log.info(
                        "%s: %s; try %d of %d follows in %.2g s",
                        redacted(str(what)),
                        last,
                        tried + 1,
                        self.tries,
                        wait_s,
                    )
                    await asyncio.sleep(wait_s)
        except TimeoutError as error:
            if not limit.expired():
                raise
            so_far = f"; before that: {last}" if last else ""
            raise FetchError(f"{what}: did not come within {self.total_s:g} s{so_far}") from (last or error)
        else:
            raise FetchError(f"{what}: {last} ({tried} {'try' if tried == 1 else 'tries'})") from last
        finally:
            del last  # its traceback has this frame: a circle, which would keep the client open until a collection

    def _wait_s(self, tried: int, failure: TransientError) -> float:
        if failure.wait_s is not None:
            return failure.wait_s
        return min(self.first_wait_s * 2.0 ** min(tried - 1, 62), self.longest_wait_s) * _jitter.uniform(0.5, 1.0)
