"""The logger of this backend, for facts that a user should know but that are no errors."""

from __future__ import annotations

import logging

logger = logging.getLogger("fp8core.cuda")
