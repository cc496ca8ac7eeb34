"""The package's one logger: what is filtered, sent on or silenced by its name is all that the package says."""

from __future__ import annotations

import logging

log: logging.Logger = logging.getLogger("asyncloader")
