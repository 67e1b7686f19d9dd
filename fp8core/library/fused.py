"""The optional operations of a backend as operators: fusions with quantization, and add_norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.backend_api import AddNormDesc, FusedDesc, NormDesc
from fp8core.library import shapes
from fp8core.library.encoding import decode
from fp8core.library.operators import bound, define, empty, flat, given, settle_all, with_amax
from fp8core.library.shapes import Shape

__all__ = ["_add_norm", "_fused"]


def _fused_shapes(text: str, arguments: Sequence[torch.Tensor | None]) -> list[Shape]:
    _, desc, transposes = decode(text)
    assert isinstance(desc, FusedDesc)
    x = arguments[-1] if desc.op == "activation_backward_quantize" else arguments[0]
    assert x is not None
    if isinstance(desc.producer, NormDesc):
        first, *rest = shapes.norm_shapes(desc.producer, x.shape)
    else:
        first, rest = shapes.activation_shape(desc.producer, x.shape), []
    sums = [Shape((first.size[1],), torch.float32)] if desc.sums else []
    return [*shapes.quantize_shapes(desc.quantize, first.size, 0, transposes), *rest, *sums]


@define(
    "(str operation, Tensor?[] arguments, Tensor? scale, Tensor? amax, Tensor? rng) -> Tensor[]",
    lambda text, arguments, scale, amax, rng: empty(
        with_amax(_fused_shapes(text, arguments), amax), arguments[0].device
    ),
)
def _fused(
    text: str,
    arguments: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    rng: torch.Tensor | None,
) -> list[torch.Tensor]:
    _, desc, transposes = decode(text)
    assert isinstance(desc, FusedDesc)
    assert arguments[0] is not None
    run = bound(text, arguments[0].device)
    new = None if amax is None else amax.clone()
    made, *rest = run(*arguments, **given(scale=scale, amax_out=new, rng=rng))
    quantized = flat(made, shapes.hands_both_as_one(desc.quantize, transposes))
    return settle_all([*quantized, *rest, new], with_amax(_fused_shapes(text, arguments), amax))


def _add_norm_shapes(text: str, x: torch.Tensor) -> list[Shape]:
    desc = decode(text).desc
    assert isinstance(desc, AddNormDesc)
    return [
        Shape((x.shape[0], x.shape[1]), desc.norm.dtype),
        *shapes.norm_shapes(desc.norm, x.shape),
    ]


@define(
    "(str operation, Tensor x, Tensor residual, Tensor weight, Tensor? bias) -> Tensor[]",
    lambda text, x, residual, weight, bias: empty(_add_norm_shapes(text, x), x.device),
)
def _add_norm(
    text: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    run = bound(text, x.device)
    made = run(x, residual, weight, *(() if bias is None else (bias,)))
    return settle_all(made, _add_norm_shapes(text, x))
