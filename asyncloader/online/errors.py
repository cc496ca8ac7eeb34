"""Errors of feeds."""

from __future__ import annotations

from asyncloader.errors import AsyncLoaderError


class FeedClosedError(AsyncLoaderError, RuntimeError):
    """The feed takes no more samples, or has no more items to lease. The message says why.

    Attributes:
        feed: Address of the feed, which its handles know as well.
        is_failure: Something is wrong: its source has raised, or a handle finds no feed, or was interrupted in the
            middle of a message. ``__cause__`` is that error, in the process where it was raised.
    """

    feed = ""
    is_failure = False


def closed(feed: str, why: str, cause: BaseException | None = None) -> FeedClosedError:
    """Return the error of the feed at this address.

    Args:
        feed: Its address.
        why: In words.
        cause: The error behind it; None if the feed has come to its end.
    """
    error = FeedClosedError(why)
    error.feed, error.is_failure, error.__cause__ = feed, cause is not None, cause
    return error


class FeedFullError(AsyncLoaderError, RuntimeError):
    """There is no room for another sample now, and the caller does not wait."""


class LeaseLostError(AsyncLoaderError, RuntimeError):
    """The lease has ended: its item was settled, or went to another producer. What was put with it is not taken."""
