"""Loaders around loaders: what is done to batches on their way from a loader to training.

A wrapper is a loader itself, and may be around any loader, or around another wrapper: see `LoaderWrapper`.
"""

from asyncloader.wrap.moving import move
from asyncloader.wrap.step_iterator import equal_steps
from asyncloader.wrap.wrapper import IteratorWrapper, LoaderWrapper

__all__ = ["IteratorWrapper", "LoaderWrapper", "equal_steps", "move"]
