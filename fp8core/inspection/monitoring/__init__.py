"""Statistics of the casts in a model while it trains; :func:`fp8core.monitor` starts them."""

from __future__ import annotations

from fp8core.inspection.monitoring.record import NonFinite, Saturation
from fp8core.inspection.monitoring.rows import Row
from fp8core.inspection.monitoring.watching import Monitor, monitor
from fp8core.inspection.monitoring.what_if import Summary, WhatIf

__all__ = ["Monitor", "NonFinite", "Row", "Saturation", "Summary", "WhatIf", "monitor"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
