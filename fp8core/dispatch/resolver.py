"""What answers a descriptor with an operation: dispatch, or a record of what is asked for."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fp8core.backend_api import OpDesc
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved

__all__ = ["DISPATCH", "UNNAMED", "Purpose", "Resolver"]


class Purpose(NamedTuple):
    """What an operation is for: the position of its link in the chain, and the step of that link,
    ``fprop``, ``weight``, ``gelu backward``."""

    position: int = 0
    step: str = ""


UNNAMED = Purpose()
"""The purpose of an operation that belongs to no chain."""


class Resolver(Protocol):
    """What links and quantizers are bound with: it answers each descriptor with an operation."""

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        """Return the operation for ``desc``, or raise UnsupportedError."""

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        """Return the operation for ``desc`` by ``backend``, None if that one does not offer it."""


class _Dispatch:
    """The backends' own operations, by :mod:`fp8core.dispatch.table`."""

    __slots__ = ()

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        return table.resolve(desc, device)

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        return table.resolve_optional(desc, device, backend)


DISPATCH: Resolver = _Dispatch()
