"""Where this backend logs what a user should know, and raises nothing for."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("fp8core.cuda")
