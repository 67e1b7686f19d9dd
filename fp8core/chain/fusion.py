"""A producer and the quantization of its result as one operation, where a backend offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    Chunks,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
    Quantized,
    QuantizedChunks,
    QuantizeDesc,
)
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.chain.request import Handover, QuantizeRequest, SplitRequest
from fp8core.chain.shape import BindContext
from fp8core.dispatch import settings
from fp8core.errors import UnsupportedError
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.quantizer_binding import LowPrecision, with_slots

Producer: TypeAlias = NormDesc | NormBackwardDesc | ActivationDesc | ActivationBackwardDesc
Variant: TypeAlias = tuple[bool, bool, bool]


@dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """The fused operation for each of its :func:`variants`; ``chunked`` computes those in chunks of
    rows that the backend offers so, and ``run_again`` the columnwise operand in backward.
    ``row_step``: it takes multiples of so many rows."""

    runs: dict[Variant, Callable[..., Any]]
    chunked: dict[Variant, Callable[..., Any]]
    packing: tuple[int, int]
    is_checked: bool
    row_step: int
    run_again: Callable[..., Any] | None

    def serves(self, out: QuantizeRequest, rows: int) -> bool:
        """Return whether it can make of a tensor of ``rows`` rows what ``out`` requests."""
        return out.is_plain and not (rows % self.row_step and out.columnwise)

    def __call__(self, out: QuantizeRequest, *arguments: Any) -> list[Any]:
        """Return the producer's results, the first of them as ``out`` requests it."""
        run = self.runs[out.rowwise, out.columnwise, out.has_sums]
        keywords = {} if out.rng is None else {"rng": out.rng}
        return self._handed(run(*arguments, **keywords), out, arguments[0].shape[0])

    def again(self, out: QuantizeRequest, *arguments: Any) -> Handover | None:
        """Return the columnwise operand of the producer's first result once more; None where this
        is not offered. It records no amax and counts no NaN or inf."""
        run, rows = self.run_again, arguments[0].shape[0]
        if run is None or not self.serves(out, rows):
            return None
        keywords = {} if out.scale is None else {"scale": out.scale}
        handed: Handover = self._handed(run(*arguments, **keywords), out, rows)[0]
        return handed

    def in_chunks(self, out: QuantizeRequest, *arguments: Any) -> list[Any] | None:
        """Return the same with a rowwise operand that may come in chunks, the first argument with
        rows that may be computed while it is read; None where this is not offered, or ``out`` does
        not take chunks."""
        if not out.takes_chunks or out.rng is not None:
            return None
        run = self.chunked.get((out.rowwise, out.columnwise, out.has_sums))
        return None if run is None else self._handed(run(*arguments), out, arguments[0].shape[0])

    def _handed(self, results: Sequence[Any], out: QuantizeRequest, rows: int) -> list[Any]:
        quantized, *rest = results
        sums = [rest.pop()] if out.has_sums else []
        if isinstance(out, SplitRequest):
            of_halves = [*zip(*[total.chunk(2) for total in sums], strict=True)] or [(), ()]
            halves = [
                self._handover(each, part, rows, total)
                for each, part, total in zip(quantized, out.parts, of_halves, strict=True)
            ]
            return [Handover(Orientations(*halves), rows), *rest]
        return [self._handover(quantized, out, rows, sums), *rest]

    def _handover(
        self, quantized: Any, out: QuantizeRequest, rows: int, sums: Sequence[torch.Tensor]
    ) -> Handover:
        if self.is_checked:
            _check_orientations(quantized, out, rows, self.packing)
        return Handover(quantized, rows, sums)


def variants(fused: FusedDesc) -> dict[Variant, FusedDesc]:
    """Return the descriptors that a fusion needs, by ``(rowwise, columnwise, sums)``.

    ``fused`` itself comes first. An input is always wanted rowwise, columnwise if the weight is
    trained, and never summed. A gradient is wanted either way or both ways; with ``sums`` it is
    summed if the bias is trained, and not if it is frozen.
    """
    if fused.quantize.rowwise is None:
        return {(False, True, False): fused}
    rowwise, columnwise = fused.quantize.halves()
    casts = {(True, True): fused.quantize, (True, False): rowwise}
    if isinstance(fused.producer, NormBackwardDesc | ActivationBackwardDesc):
        casts[False, True] = columnwise
    return {
        (*orientations, sums): FusedDesc(fused.producer, replace(cast, sums=sums))
        for orientations, cast in casts.items()
        for sums in ((True, False) if cast.sums else (False,))
    }


def bind_fusion(
    step: str,
    producer: Producer,
    consumer: QuantizeRequest | None,
    context: BindContext,
    *,
    is_remade: bool = False,
) -> Fusion | None:
    """Return the fusion of ``producer``, which computes ``step``, with the cast of ``consumer``;
    ``is_remade``: backward makes the columnwise operand.

    None where nothing is cast, or the backend has none. Only the backend that quantizes for
    ``consumer`` is asked: a fusion is no reason to change it. Where its fusion adds no zeros behind
    rows, as the cast does, it serves whole steps of rows.
    """
    if consumer is None:
        return None
    is_split = isinstance(consumer, SplitRequest)
    parts = consumer.parts if isinstance(consumer, SplitRequest) else (consumer,)
    quantizers = [part.quantizer for part in parts if isinstance(part.quantizer, LowPrecision)]
    if len(quantizers) != len(parts):
        return None
    descs = {each.desc for each in quantizers}
    has_halves = isinstance(producer, ActivationBackwardDesc) and producer.name in GATED
    if is_split and (not has_halves or len(descs) != 1):
        return None
    cast = replace(descs.pop(), sums=consumer.has_sums, split=is_split)
    fusion = _bind(step, producer, cast, quantizers, context, is_remade)
    if fusion is None and cast.padded:
        cast = replace(cast, padded=0)
        return _bind(step, producer, cast, quantizers, context, is_remade)
    return fusion


def _bind(
    step: str,
    producer: Producer,
    cast: QuantizeDesc,
    quantizers: Sequence[LowPrecision],
    context: BindContext,
    is_remade: bool,
) -> Fusion | None:
    runs, chunked = {}, {}
    quantizer = quantizers[0]
    backend = quantizer.choices[0].backend
    with_slot = partial(with_slots, quantizers) if cast.split else quantizer.with_slot
    is_dense = not cast.grouped and not cast.split
    takes_chunks = isinstance(producer, ActivationBackwardDesc) and is_dense
    for key, desc in variants(FusedDesc(producer, cast)).items():
        fused = context.resolve_optional(f"{step} with cast", desc, backend)
        if fused is None:
            return None
        runs[key] = with_slot(fused.run)
        if not takes_chunks or None in (desc.quantize.rowwise, desc.quantize.columnwise):
            continue
        in_chunks = replace(desc, quantize=replace(desc.quantize, chunked=True))
        fused = context.resolve_optional(f"{step} with cast", in_chunks, backend)
        if fused is not None:
            chunked[key] = with_slot(fused.run)
    again = None
    if is_remade:
        half = FusedDesc(producer, replace(cast, rowwise=None, counted=False))
        fused = context.resolve_optional(f"{step} with cast", half, backend)
        again = None if fused is None else fused.run
    rows, columns = (
        1 if spec is None else codes_per_byte(spec) for spec in (cast.rowwise, cast.columnwise)
    )
    row_step = 1 if cast.padded else quantizer.row_step
    return Fusion(runs, chunked, (rows, columns), settings.read().debug, row_step, again)


def _check_orientations(
    quantized: Quantized | QuantizedChunks,
    out: QuantizeRequest,
    rows: int,
    packing: tuple[int, int],
) -> None:
    """Refuse a result that is not the orientations asked for of a tensor of ``rows`` rows.

    Shapes tell a swap apart unless the tensor is square.
    """
    for name, is_due, operand in (
        ("rowwise", out.rowwise, quantized.rowwise),
        ("columnwise", out.columnwise, quantized.columnwise),
    ):
        if is_due != (operand is not None):
            problem = f"lacks the {name} operand" if is_due else f"has a {name} operand unasked"
            raise UnsupportedError(f"a fused operation's result {problem}.")
    row, column = map(_elements, quantized, packing)
    if row is not None and row[0] != rows:
        raise UnsupportedError(
            f"a fused operation's rowwise operand is {row}; the tensor has {rows} rows."
        )
    columns = [] if row is None else row[1:]
    whole = rows + -rows % out.quantizer.row_step
    if column is not None and (column[1] != whole or columns not in ([], column[:1])):
        raise UnsupportedError(
            f"a fused operation's columnwise operand is {column}, not the transpose of a tensor "
            f"of {whole} rows{'' if row is None else f', {row}'}."
        )


def _elements(operand: Operand | Chunks | None, packing: int) -> list[int] | None:
    if operand is None:
        return None
    if not isinstance(operand, Operand):  # its columns are seen when it is read
        return [operand.rows]
    return [operand.data.shape[0], operand.data.shape[1] * packing]
