"""Errors of feeds."""

from __future__ import annotations

from asyncloader.errors import AsyncLoaderError


class FeedClosedError(AsyncLoaderError, RuntimeError):
    """The feed takes no more samples, or has no more items to lease. The message says why."""


class FeedFullError(AsyncLoaderError, RuntimeError):
    """There is no room for another sample now, and the caller does not wait."""


class LeaseLostError(AsyncLoaderError, RuntimeError):
    """The lease has ended: its item was settled, or went to another producer. What was put with it is not taken."""


class RanksError(AsyncLoaderError, RuntimeError):
    """Ranks do not take the same steps of a feed: one has left, has not come in time, or goes on at another place."""
