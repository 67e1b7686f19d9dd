"""Resolvers, which answer a descriptor with an operation: dispatch, or a record of requests."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fp8core.backend_api import OpDesc, Ranks, Recorder, Transfers
from fp8core.dispatch import table
from fp8core.dispatch.table import Resolved


class Purpose(NamedTuple):
    """The purpose of an operation: the position of its link in the chain, and the link's step,
    ``fprop``, ``weight``, ``gelu backward``."""

    position: int = 0
    step: str = ""


UNNAMED = Purpose()
"""The purpose of an operation that belongs to no chain."""


class Resolver(Protocol):
    """The interface that links and quantizers are bound with: an operation for each descriptor."""

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        """Return the operation for ``desc``, or raise UnsupportedError."""

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        """Return the operation for ``desc`` by ``backend``, None if not offered."""

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        """Return what moves rows between ``ranks`` beside products of ``dtype``, if anything."""


class TrackingResolver:
    """A resolver that answers as another does, and notes who records calls of its operations."""

    __slots__ = ("_recorders", "_resolver")

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._recorders: list[Recorder | None] = []

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of all operations so far; None where operations have several, or none."""
        first, *rest = self._recorders or [None]
        return first if all(recorder is first for recorder in rest) else None

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        """Return the operation for ``desc``, or raise UnsupportedError."""
        resolved = self._resolver.resolve(desc, device, purpose)
        self._recorders.append(resolved.offers.recorder)
        return resolved

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        """Return the operation for ``desc`` by ``backend``, None if not offered."""
        resolved = self._resolver.resolve_optional(desc, device, backend, purpose)
        if resolved is not None:
            self._recorders.append(resolved.offers.recorder)
        return resolved

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        """Return what moves rows between ``ranks`` beside products of ``dtype``, if anything."""
        return self._resolver.transfers(ranks, device, dtype)


class _Dispatch:
    """The backends' own operations, by :mod:`fp8core.dispatch.table`."""

    __slots__ = ()

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        return table.resolve(desc, device)

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> Resolved | None:
        return table.resolve_optional(desc, device, backend)

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Transfers | None:
        return table.transfers(ranks, device, dtype)


DISPATCH: Resolver = _Dispatch()
