"""Attention to quantized queries, keys and values as a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.chain.attention.link import AttentionLink, AttentionProgram
from fp8core.chain.attention.spec import (
    NUM_SAVED,
    check_memory,
    hand_out,
    of_forward,
    saved_tensors,
)
from fp8core.chain.call import Call
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer import Slot, TensorQuantizer
from fp8core.tensors.scaling import update_after_backward


@dataclass(frozen=True, slots=True, eq=False)
class LowPrecisionAttentionLink(AttentionLink):
    """Quantizes queries, keys and values, which backward reads as codes.

    ``casts`` are by the names of the plan's tensors; with ``"grad_output"`` among them backward
    computes in low precision, else in high precision, from the codes if ``reads_codes``, and if not
    from the tensors dequantized to the dtype of the activations. ``s_slot`` and
    ``dp_slot`` hold the delayed scales of the weights and of the gradients of logits; without them
    the scale of the weights is ``s_scale``, and that of the gradients follows from them.
    ``dequantize_out`` is None where the result is not quantized. ``gradient_state`` is None without
    delayed scales in backward. ``spec`` is how q, k and v are quantized, ``dtype`` that of the
    activations.
    """

    casts: Mapping[str, TensorQuantizer]
    dequantize: Callable[..., torch.Tensor]
    dequantize_out: Callable[..., torch.Tensor] | None
    s_slot: Slot | None
    s_scale: float
    dp_slot: Slot | None
    gradient_state: DelayedState | None
    spec: OperandSpec
    dtype: torch.dtype
    reads_codes: bool
    result = ""

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> AttentionProgram:
        """Return the program; the sizes of the batch come with the call."""
        return LowPrecisionAttentionProgram(self, needs_grad)


class _Result(NamedTuple):
    """How forward saved its result: queries came in ``size``; ``is_turned`` is None for the result
    as the kernel gave it, else whether the next link's codes are those of its transpose."""

    size: torch.Size
    is_turned: bool | None


class LowPrecisionAttentionProgram(AttentionProgram):
    """Attends to quantized tensors; saves their codes and scales.

    The result is saved as the next link quantized it, if that has one scale as the queries have:
    the same codes then serve backward of both.
    """

    __slots__ = ()

    _link: LowPrecisionAttentionLink

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request for the gradient of the result, if backward quantizes it.

        The cast will record an amax, so the update of the scales after backward is ordered first.
        """
        link = self._link
        cast = link.casts.get("grad_output")
        if cast is None:
            return None
        if link.gradient_state is not None:
            update_after_backward(link.gradient_state, call.backward_pass)
        return QuantizeRequest(
            cast,
            link.dtype,
            columnwise=False,
            is_gradient=True,
            cast=cast.cast_to(rowwise=True, columnwise=False),
        )

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Quantize, and compute the rows of the result from the codes."""
        link = self._link
        q = self._in_layout(x, link.shape.head_dim, call)
        params = link.read(params, call, x.dtype)
        check_memory(link.fallback, link.shape, q, params[0], call)
        operands = [
            _quantized(link.casts[name], tensor)
            for name, tensor in zip("qkv", (q, *params[:2]), strict=True)
        ]
        slot, keywords = link.s_slot, dict(link.keywords(params, call))
        if slot is None:
            scale = x.new_full((1,), link.s_scale, dtype=torch.float32)
        else:
            scale = slot.scale.clone()  # of this forward, also after the autocast has ended
            keywords["s_amax_out"] = slot.amax
        y, stats, max_logit = link.run(*operands, **keywords, s_scale=scale)
        if max_logit is not None:
            hand_out(max_logit, call)
        result: Operand | None
        rows = self._values_of(y.reshape(x.shape[0], link.shape.columns(0)), operands[2])
        handed = rows if out is None else out(rows)
        if True not in self._needs_grad:
            return handed, (), None
        codes = [part for operand in operands for part in operand[:2]]
        result, is_turned = _shared_codes(handed, out, link.spec)
        if result is None:
            result = Operand(y.reshape(rows.shape))
        saved = (*codes, *params[2:], *result[:2], stats, scale, *saved_tensors(call))
        return handed, saved, _Result(x.shape, is_turned)

    def _values_of(self, result: torch.Tensor, values: Operand) -> torch.Tensor:
        """Return the rows of the result, dequantized if they are codes by the scale of ``values``.

        Dropout multiplies the weights that it keeps, so that the scale is that much larger.
        """
        link = self._link
        if link.dequantize_out is None:
            return result
        scale_inv, dropout = values.scale_inv, link.shape.dropout
        assert scale_inv is not None
        if dropout:
            scale_inv = scale_inv / (1 - dropout)
        return link.dequantize_out(Operand(result, scale_inv))

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients from the codes."""
        *codes, result, result_scale, stats, scale = saved[:-NUM_SAVED]
        call = of_forward(call, saved)
        operands, more = [Operand(*codes[at : at + 2]) for at in (0, 2, 4)], codes[6:]  # type: ignore[arg-type]  # present
        link, shape = self._link, self._link.shape
        size, is_turned = context
        assert result is not None
        if is_turned is None:
            rows = self._values_of(result, operands[2])
        else:
            rows = link.dequantize(Operand(result, result_scale))
            rows = rows.t() if is_turned else rows
        params = (*operands[1:], *more)
        keywords: dict[str, Any] = dict(link.keywords(params, call))
        qkv: list[Any] = operands
        if "grad_output" in link.casts:
            grad = self._quantized_grad(grad, call)
            keywords["s_scale"] = scale
            if link.dp_slot is not None:
                keywords |= {"dp_scale": link.dp_slot.scale, "dp_amax_out": link.dp_slot.amax}
        else:
            grad = self._in_layout(grad, shape.head_dim_v, call)
            if not link.reads_codes:
                qkv = [_dequantized(link.dequantize, operand) for operand in operands]
        rows = self._in_layout(rows, shape.head_dim_v, call)
        results = self._run_backward(grad, *qkv, rows, stats, **keywords)
        return self._gradients(results, params, size, out)

    def _quantized_grad(self, grad: Any, call: Call) -> Operand:
        """Return the gradient of the result quantized, with its codes in the layout."""
        if not isinstance(grad, Handover):
            request = self.request_grad(call)
            assert request is not None
            grad = request(grad)
        operand = grad.take().rowwise
        assert isinstance(operand, Operand)
        codes = self._in_layout(operand.data, self._link.shape.head_dim_v, call)
        return operand._replace(data=codes)


def _shared_codes(handed: Any, out: Out, spec: OperandSpec) -> tuple[Operand | None, bool | None]:
    """Return the operand of the result that the next link holds for its own backward, and whether
    that is the transpose; None if it is not quantized by ``spec``."""
    if out is None or not isinstance(handed, Handover):
        return None, None
    plan = out.quantizer.plan
    if plan is None or out.padded is not None:
        return None, None
    if not all(_has_same_values(spec_of_next, spec) for spec_of_next in plan):
        return None, None
    rowwise, columnwise = handed.operands
    operand, is_turned = (rowwise, False) if columnwise is None else (columnwise, True)
    assert isinstance(operand, Operand)
    return operand, is_turned


def _has_same_values(spec: OperandSpec | None, like: OperandSpec) -> bool:
    """Return whether codes of both have the same values: of one format, with one scale a tensor."""
    return spec is not None and all(
        (compared.format, compared.block, compared.scale_format, compared.transform)
        == (like.format, (0, 0), like.scale_format, None)
        for compared in (spec, like)
    )


def _quantized(quantizer: TensorQuantizer, x: torch.Tensor) -> Operand:
    """Return ``x [..., heads, d]`` quantized, with its codes in its shape."""
    operand: Operand = quantizer(x.flatten(0, -2), columnwise=False).rowwise
    return operand._replace(data=operand.data.reshape(x.shape))


def _dequantized(run: Callable[..., torch.Tensor], operand: Operand) -> torch.Tensor:
    """Return the values of an operand whose codes have any shape."""
    shape = operand.data.shape
    return run(operand._replace(data=operand.data.flatten(0, -2))).view(shape)
