"""A producer and the quantization of its result as one operation, where a backend offers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    FusedDesc,
    NormDesc,
    Quantized,
)
from fp8core.dispatch import settings, table
from fp8core.errors import UnsupportedError
from fp8core.links.protocol import Handed, Want
from fp8core.quantizer import LowPrecision, Orientations, Quantizer

__all__ = ["Fusion", "bind_fusion"]


class Fusion:
    """The fused operation for each combination of orientations, and of column sums or none."""

    __slots__ = ("_is_checked", "_runs")

    def __init__(
        self, runs: dict[tuple[bool, bool, bool], Callable[..., Any]], is_checked: bool
    ) -> None:
        self._runs = runs
        self._is_checked = is_checked

    def __call__(self, out: Want, *arguments: Any) -> list[Any]:
        """Return what the producer returns, its first tensor as ``out`` wants it."""
        run = self._runs[out.rowwise, out.columnwise, out.has_sums]
        keywords = {} if out.rng is None else {"rng": out.rng}
        made, *rest = run(*arguments, **keywords)
        sums = [rest.pop()] if out.has_sums else ()
        if self._is_checked:
            _check_orientations(made, out)
        return [Handed(Orientations(*made), sums), *rest]


def bind_fusion(
    producer: NormDesc | ActivationDesc | ActivationBackwardDesc,
    consumer: Quantizer,
    device: torch.device,
) -> Fusion | None:
    """Return the fusion of ``producer`` with ``consumer``, None where the backend has none.

    Only the backend that quantizes for ``consumer`` is asked: a fusion is no reason to change it.
    """
    if not isinstance(consumer, LowPrecision):
        return None
    rowwise, columnwise = consumer.desc.halves()
    halves = {(True, True): consumer.desc, (True, False): rowwise, (False, True): columnwise}
    runs = {}
    for (row, column), quantize in halves.items():
        for sums in (False, True):
            desc = FusedDesc(producer, quantize, sums)
            found = table.resolve_optional(desc, device, consumer.choices[0].backend)
            if found is None:
                return None
            runs[row, column, sums] = consumer.with_slot(found.run)
    return Fusion(runs, is_checked=settings.read().debug)


def _check_orientations(made: Quantized, out: Want) -> None:
    for name, asked, operand in (
        ("rowwise", out.rowwise, made.rowwise),
        ("columnwise", out.columnwise, made.columnwise),
    ):
        if asked != (operand is not None):
            verb = "lacks" if asked else "was not asked for"
            raise UnsupportedError(f"a fused operation's result {verb} the {name} operand.")
    if made.rowwise is not None and made.columnwise is not None:
        row, column = made.rowwise.data.shape, made.columnwise.data.shape
        if row[0] * row[1] != column[0] * column[1] or (row[0] != row[1] and row == column):
            raise UnsupportedError(
                f"a fused operation's columnwise operand is {list(column)}, "
                f"not the transpose of the rowwise {list(row)}."
            )
