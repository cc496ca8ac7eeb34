"""Samples that a trainer goes on without: each is left out of its batches from a batch on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from asyncloader.engine.actions import VOID
from asyncloader.epochs import as_number
from asyncloader.errors import ConfigurationError
from asyncloader.plain import plain, unplain
from asyncloader.samplers.pieces import Piece


class Exclusions:
    """The samples that one loader goes on without. Samplers do not hear of it: no other batch changes.

    Args:
        state: A result of `state`; None for no samples.
    """

    def __init__(self, state: Any = None) -> None:
        self._since: dict[Any, tuple[int, int]] = {
            _hashable(key): (epoch, number) for key, epoch, number in unplain(state) or ()
        }
        self._text: Any = None

    def __bool__(self) -> bool:
        return bool(self._since)

    def add(self, keys: Iterable[Any], epoch: int, number: int) -> None:
        """Leave samples out from this batch of this run on; those that are left out already stay so.

        Raises:
            ConfigurationError: if a key cannot be looked up.
        """
        try:
            if isinstance(keys, (str, bytes)):
                raise TypeError(f"one {type(keys).__name__} would be many keys; of one sample it is [{keys!r}]")
            self._since = {**dict.fromkeys(map(_hashable, keys), (epoch, number)), **self._since}
            self._text = None
        except TypeError as error:
            raise ConfigurationError(f"exclude takes keys of samples as the sampler yields them: {error}") from error

    def add_those_of(self, other: Exclusions, epoch: int, number: int) -> None:
        """Leave out what another leaves out, from this batch of this run on."""
        self.add(other._since, epoch, number)

    def hold_from(self, epoch: int, number: int) -> None:
        """Let those of this run that hold from a later batch on hold from this one on: numbers mean others by now."""
        self._since = {key: min(at, (epoch, number)) if at[0] == epoch else at for key, at in self._since.items()}
        self._text = None

    def without(self, keys: Any, number: int, *, epoch: int, is_batched: bool) -> Any:
        """Return the keys of a batch without those that are left out of it; VOID if there are no others."""
        since, here = self._since, (epoch, number)
        if not since:
            return keys

        def is_left(key: Any) -> bool:
            try:
                at = since.get(_hashable(key))
            except TypeError:  # none that could be named
                at = None
            return at is None or at > here

        if not is_batched:
            return keys if is_left(keys) else VOID
        try:
            keys = keys if hasattr(keys, "__len__") else list(keys)
        except TypeError:  # a slice, for instance
            return keys
        left = list(filter(is_left, keys))
        return keys if len(left) == len(keys) else left or VOID

    def state(self) -> Any:
        """Return them as plain data; None for no samples."""
        if self._text is None and self._since:
            self._text = plain([[key, *at] for key, at in self._since.items()])
        return self._text


def _hashable(key: Any) -> Any:
    """Return a key as it can be looked up: JSON has lists where tuples were."""
    key = key.sample if type(key) is Piece else key  # a piece is one of its sample, whose number stands for all
    if type(key) in (int, str):
        return key
    if isinstance(key, (list, tuple)):
        return tuple(map(_hashable, key))
    if (number := as_number(key)) is not None:  # an index of whatever type
        return number
    if isinstance(key, (torch.Tensor, np.ndarray)):
        raise TypeError(f"unhashable type: {type(key).__name__} of more than one number")
    hash(key)
    return key
