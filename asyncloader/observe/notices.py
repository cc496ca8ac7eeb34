"""Warnings that name the user's line, however many of our frames, and of torch's, lie before it."""

from __future__ import annotations

import os
import sys
import warnings

import torch.utils.data

_INSIDE = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.utils.data.__file__) + os.sep)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the innermost line that is neither ours nor of torch's DataLoader."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
