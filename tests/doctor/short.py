"""Shortens the self-test of a process of the doctor, a fork that finds this imported.

It tests the uses of one recipe alone, and the operations that take little time. What recipes ask of
backends is found here, once for all forks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8core.conformance.catalogue import catalogue
from fp8core.doctor import findings
from tests.dispatch import toys
from tests.doctor import SHORT

RECIPE = "current"

_whole = findings.check


def _check(spec: Any, op: str, device: Any, needs: Mapping[str, Any]) -> findings.Check | None:
    return _whole(spec, op, device, {RECIPE: needs[RECIPE]})


findings.check = _check
findings.OPS = SHORT
with toys.isolation():  # the forks load plug-ins for themselves
    findings.needs_by_recipe()
    catalogue()
