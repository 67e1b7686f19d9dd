"""What each operator computes, by its document in CANN's operator repositories, in float32.

Arguments are those of ``aclnnXGetWorkspaceSize``, in its order. The last ones are the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import en_dtypes
import numpy as np
import torch

from tests.backends.ascend.softcann.device import Described, formula

LARGEST = {35: 57344.0, 36: 448.0, 34: 32768.0}  # by CANN's dtype
T = Described
Optional = Described | None


# --- values ---


def decode(x: T) -> torch.Tensor:
    """The values of a tensor in float32; float64 stays."""
    if x.dtype == "hifloat8":
        return torch.from_numpy(x.values.contiguous().numpy().view(en_dtypes.hifloat8).astype("f4"))
    if x.dtype == "float8_e8m0":
        return torch.exp2(x.values.float() - 127).masked_fill(x.values == 255, torch.nan)
    return x.values if x.values.dtype == torch.float64 else x.values.float()


def store(to: T, values: torch.Tensor) -> None:
    """Write values in the dtype of ``to``: 8-bit floats saturate."""
    if to.dtype == "hifloat8":
        bounded = values.float().clamp(-32768.0, 32768.0).contiguous().numpy()
        with np.errstate(all="ignore"):
            codes = bounded.astype(en_dtypes.hifloat8).view(np.uint8)
        values = torch.from_numpy(codes)
    elif to.dtype in ("float8_e4m3fn", "float8_e5m2"):
        largest = torch.finfo(to.values.dtype).max
        values = values.float().clamp(-largest, largest)
    to.values.copy_(values.reshape(to.shape).to(to.values.dtype))


def amax(x: torch.Tensor, dim: Any = None) -> torch.Tensor:
    magnitudes = torch.where(x.isnan(), 0.0, x.abs())
    return magnitudes.amax() if dim is None else magnitudes.amax(dim)


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, and 0 where both are 0."""
    return torch.where(scale == 0, torch.zeros_like(x), x / scale)


# --- casts ---


def scale_and_divide(x: T, dtype: int, mode: str, y: T, scale: T, *, largest: float = 0.0) -> None:
    """scale = amax * (1 / largest), y = x / scale."""
    values = decode(x)
    dims = {"pertensor": None, "pertoken": -1, "perchannel": -2}
    dim = dims[mode]
    largest = largest if dtype == 34 and largest else LARGEST[dtype]
    factor = amax(values, dim) * (torch.tensor(1.0) / torch.tensor(largest))
    scale.values.copy_(factor.reshape(scale.shape))
    store(y, divide(values, (factor if dim is None else factor.unsqueeze(dim)).expand_as(values)))


@formula("aclnnDynamicQuantV4")
def dynamic_quant_v4(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, _symmetric, mode, largest, y, scale, _offset = arguments
    scale_and_divide(x, dtype, mode, y, scale, largest=largest)


@formula("aclnnDynamicQuantV3")
def dynamic_quant_v3(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, _symmetric, mode, y, scale, _offset = arguments
    scale_and_divide(x, dtype, mode, y, scale)


@formula("aclnnDynamicQuantV2")
def dynamic_quant_v2(*arguments: Any) -> None:
    x, _smooth, _groups, dtype, y, scale, _offset = arguments
    scale_and_divide(x, dtype, "pertoken", y, scale)


@formula("aclnnQuantMax")
def quant_max(x: T, scale: T, rounding: str, dtype: int, y: T, largest: T) -> None:
    """y = x * scale, and the amax of x."""
    assert rounding == ("round" if dtype == 34 else "rint"), "no document gives hybrid rounding"
    values = decode(x)
    store(y, values * scale.values)
    store(largest, amax(values))


@formula("aclnnDynamicBlockQuantV2")
def dynamic_block_quant(*arguments: Any) -> None:
    """scale = amax / largest of each block, y = x / scale."""
    x, _least, _rounding, dtype, rows, cols, largest, y, scale = arguments
    values = decode(x)
    m, k = values.shape
    padded = torch.nn.functional.pad(values, (0, -k % cols, 0, -m % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    factors = amax(blocks, (1, 3)) / (largest or LARGEST[dtype])
    scale.values.copy_(factors)
    store(y, divide(values, spread(factors, (rows, cols), values.shape)))


def spread(factors: torch.Tensor, block: tuple[int, int], shape: Any) -> torch.Tensor:
    rows = factors.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def mx_quant(x: T, axis: int, dtype: int, algorithm: int, y: T, scale: T) -> None:
    """Blocks of 32 along ``axis``; algorithm 1 rounds the exponent of amax / largest up. A block
    with inf or NaN has the exponent 255, which is NaN, and the codes 0."""
    assert algorithm == 1, "only the rule of rounding up is used"
    values = decode(x).movedim(axis, -1)
    size = values.shape[-1]
    blocks = torch.nn.functional.pad(values, (0, -size % 32)).unflatten(-1, (-1, 32))
    is_bad = ~blocks.isfinite().all(-1)
    blocks = blocks.masked_fill(is_bad[..., None], 0.0)
    mantissa, exponent = torch.frexp(amax(blocks, -1) / LARGEST[dtype])  # mantissa in [1/2, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(mantissa == 0, -127, exponent)
    exponent = exponent.masked_fill(is_bad, 128)
    factors = torch.exp2(-exponent.float())
    scaled = (blocks * factors[..., None]).flatten(-2)[..., :size]
    store(y, scaled.movedim(-1, axis))
    codes = torch.nn.functional.pad(exponent + 127, (0, exponent.shape[-1] % 2))
    pairs = codes.unflatten(-1, (-1, 2))  # [..., ceil(size / 64), 2]
    scale.values.copy_((pairs if axis == -1 else pairs.movedim(-2, -3)).to(torch.uint8))


@formula("aclnnDynamicMxQuantV3")
def dynamic_mx_quant(*arguments: Any) -> None:
    x, axis, _rounding, dtype, _block, algorithm, _largest, _low, y, scale = arguments
    mx_quant(x, axis if axis < 0 else axis - x.values.dim(), dtype, algorithm, y, scale)


@formula("aclnnDynamicMxQuantWithDualAxisV2")
def dynamic_mx_quant_with_dual_axis(*arguments: Any) -> None:
    x, _rounding, dtype, algorithm, _largest, row, row_scale, column, column_scale = arguments
    mx_quant(x, -1, dtype, algorithm, row, row_scale)
    mx_quant(x, -2, dtype, algorithm, column, column_scale)


# --- products ---


def product(x1: T, x2: T, scale1: Optional, scale2: T, groups: int) -> torch.Tensor:
    """x1 [m, k] times x2 [k, n], each times its scales."""
    a, b = decode(x1), decode(x2)
    if scale2.dtype == "float8_e8m0":
        assert scale1 is not None
        rows = decode(scale1).flatten(-2)  # [m, k / 32]
        cols = decode(scale2).movedim(-1, -2).flatten(0, 1)  # [k / 32, n]
        return (a * spread(rows, (1, 32), a.shape)) @ (b * spread(cols, (32, 1), b.shape))
    if scale2.values.dim() == 2 and groups:
        assert scale1 is not None
        m, n, k = (groups >> 32) & 0xFFFF, (groups >> 16) & 0xFFFF, groups & 0xFFFF
        scaled = a * spread(scale1.values, (m, k), a.shape)
        return scaled @ (b * spread(scale2.values, (k, n), b.shape))
    result = (a @ b) * scale2.values
    if scale1 is None:
        return result
    return result * (scale1.values if scale1.values.numel() == 1 else scale1.values[:, None])


@formula("aclnnQuantMatmulV5")
def quant_matmul(*arguments: Any) -> None:
    x1, x2, scale1, scale2, *_, bias, _transposed1, _transposed2, groups, out = arguments
    result = product(x1, x2, scale1, scale2, groups)
    store(out, result if bias is None else result + decode(bias))


@formula("aclnnQuantBatchMatmulInplaceAdd")
def quant_matmul_inplace_add(*arguments: Any) -> None:
    x1, x2, scale1, scale2, to, _transposed1, _transposed2, groups = arguments
    to.values.add_(product(x1, x2, scale1, scale2, groups))


def parts_of(bounds: T, step: int) -> list[tuple[slice, slice]]:
    """For each group that ends at ``bounds``, where it lies along k, and where its scales of
    blocks of ``step`` do: group ``i`` from ``start // step + i`` on."""
    parts, start = [], 0
    for group, end in enumerate(bounds.values.tolist()):
        assert end >= start
        first = start // step + group if step else group
        count = -(-(end - start) // step) if step else 1
        parts.append((slice(start, end), slice(first, first + count)))
        start = end
    return parts


def narrowed(x: T, at: slice) -> T:
    return Described(x.values[at], x.dtype)


def one_of(scale: T, at: int) -> torch.Tensor:
    """The scale, or the scales of the rows, of a group."""
    return scale.values[at].reshape(-1)


def product_of_rows(x: T, weight: T, scales: tuple[T, T], group: int, rows: slice) -> torch.Tensor:
    """x [m, k] of a group times its weight [k, n]."""
    first, second = scales
    part, matrix = narrowed(x, rows), Described(weight.values[group], weight.dtype)
    if second.dtype == "float8_e8m0":
        of_matrix = Described(second.values[group], second.dtype)
        return product(part, matrix, narrowed(first, rows), of_matrix, 0)
    if second.values.dim() == 3:  # blocks of 128
        a = decode(part) * spread(first.values[rows], (1, 128), part.shape)
        return a @ (decode(matrix) * spread(second.values[group], (128, 128), matrix.shape))
    is_per_row = first.shape == (x.shape[0],)
    factor = first.values[rows, None] if is_per_row else one_of(first, group)
    return (decode(part) @ decode(matrix)) * one_of(second, group) * factor


def product_of_terms(
    x: T, weight: T, scales: tuple[T, T], group: int, at: tuple[slice, slice]
) -> torch.Tensor:
    """x [m, k of a group] times weight [k of a group, n]; x is a transposed view."""
    first, second = scales
    a, b = decode(x)[:, at[0]], decode(weight)[at[0]]
    if second.dtype == "float8_e8m0":
        rows, cols = (decode(narrowed(scale, at[1])) for scale in scales)  # [k / 64, size, 2]
        left = rows.permute(1, 0, 2).flatten(1)
        right = cols.permute(0, 2, 1).flatten(0, 1)
        return (a * spread(left, (1, 32), a.shape)) @ (b * spread(right, (32, 1), b.shape))
    return (a @ b) * one_of(first, group)[:, None] * one_of(second, group)


@formula("aclnnGroupedMatmulV4")
def grouped_matmul(*arguments: Any) -> None:
    """Quantized: one tensor each. Rows, or for group type 2 terms, belong to groups."""
    (x,), (weight,), bias, (scale,), *_, (x_scale,), bounds = arguments[:9]
    _split, kind, list_type, activation, (out,), *_ = arguments[12:]
    assert (list_type, activation, bias or None) == (0, 0, None)
    scales = (x_scale, scale)
    if kind == 0:
        assert weight.values.dim() == 3
        for group, (rows, _) in enumerate(parts_of(bounds, 0)):
            result = product_of_rows(x, weight, scales, group, rows)
            store(narrowed(out, rows), result)
        return
    assert kind == 2
    assert x.is_transposed or 1 in x.shape
    step = 64 if scale.dtype == "float8_e8m0" else 0
    for group, at in enumerate(parts_of(bounds, step)):
        if at[0].start != at[0].stop:  # whether an empty group is written is not documented
            store(narrowed(out, group), product_of_terms(x, weight, scales, group, at))


@formula("aclnnQuantGroupedMatmulInplaceAdd")
def grouped_matmul_inplace_add(*arguments: Any) -> None:
    x1, x2, scale1, scale2, bounds, to, list_type, groups = arguments
    assert (list_type, groups) == (0, 0)
    step = 64 if scale2.dtype == "float8_e8m0" else 0
    x = Described(x1.values, x1.dtype)
    for group, at in enumerate(parts_of(bounds, step)):
        to.values[group] += product_of_terms(x, x2, (scale1, scale2), group, at)


# --- norms and activations ---


@formula("aclnnRmsNorm")
def rms_norm(x: T, gamma: T, eps: float, y: T, rstd: T) -> None:
    values = decode(x)
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    store(rstd, factor)
    store(y, values * factor * decode(gamma))


@formula("aclnnRmsNormGrad")
def rms_norm_grad(grad: T, x: T, rstd: T, gamma: T, grad_x: T, grad_gamma: T) -> None:
    g, factor = decode(grad), rstd.values.reshape(*x.shape[:-1], 1)
    normed = decode(x) * factor
    store(grad_gamma, (g * normed).reshape(-1, x.shape[-1]).sum(0))
    g = g * decode(gamma)
    store(grad_x, factor * (g - normed * (g * normed).mean(-1, keepdim=True)))


@formula("aclnnSwiGlu")
def swiglu(x: T, dim: int, y: T) -> None:
    a, b = decode(x).chunk(2, dim)
    store(y, a * torch.sigmoid(a) * b)


@formula("aclnnSwiGluGrad")
def swiglu_grad(grad: T, x: T, dim: int, grad_x: T) -> None:
    a, b = decode(x).chunk(2, dim)
    g, s = decode(grad), torch.sigmoid(a)
    store(grad_x, torch.cat([g * b * (s + a * s * (1 - s)), g * a * s], dim))


def _gelu_form(approximate: Any) -> str:
    return "tanh" if approximate in (1, "tanh") else "none"


@formula("aclnnGeluV2")
def gelu(x: T, approximate: int, y: T) -> None:
    store(y, torch.nn.functional.gelu(decode(x), approximate=_gelu_form(approximate)))


@formula("aclnnGeluBackwardV2")
def gelu_backward(grad: T, x: T, approximate: str, grad_x: T) -> None:
    form = _gelu_form(approximate)
    store(grad_x, torch.ops.aten.gelu_backward(decode(grad), decode(x), approximate=form))


@formula("aclnnGeGluV3")
def geglu(x: T, dim: int, approximate: int, is_left: int, y: T, activated: T) -> None:
    assert is_left
    a, b = decode(x).chunk(2, dim)
    value = torch.nn.functional.gelu(a, approximate=_gelu_form(approximate))
    store(activated, value)
    store(y, value * b)


@formula("aclnnGeGluV3Backward")
def geglu_backward(*arguments: Any) -> None:
    grad, x, activated, dim, approximate, is_left, grad_x = arguments
    assert is_left
    a, b = decode(x).chunk(2, dim)
    g, form = decode(grad), _gelu_form(approximate)
    grad_a = torch.ops.aten.gelu_backward(g * b, a, approximate=form)
    store(grad_x, torch.cat([grad_a, g * decode(activated)], dim))


@formula("aclnnFastGelu")
def fast_gelu(x: T, y: T) -> None:
    store(y, decode(x) * torch.sigmoid(1.702 * decode(x)))


@formula("aclnnFastGeluBackward")
def fast_gelu_backward(grad: T, x: T, grad_x: T) -> None:
    values = decode(x)
    s = torch.sigmoid(1.702 * values)
    store(grad_x, decode(grad) * (s + 1.702 * values * s * (1 - s)))


@formula("aclnnSilu")
def silu(x: T, y: T) -> None:
    store(y, decode(x) * torch.sigmoid(decode(x)))


@formula("aclnnSiluBackward")
def silu_backward(grad: T, x: T, grad_x: T) -> None:
    s = torch.sigmoid(decode(x))
    store(grad_x, decode(grad) * (s + decode(x) * s * (1 - s)))


@formula("aclnnRelu")
def relu(x: T, y: T) -> None:
    store(y, torch.relu(decode(x)))


@formula("aclnnThresholdBackward")
def threshold_backward(grad: T, x: T, threshold: Any, grad_x: T) -> None:
    store(grad_x, torch.ops.aten.threshold_backward(decode(grad), decode(x), threshold))


@formula("aclnnLayerNorm")
def layer_norm(*arguments: Any) -> None:
    x, _shape, weight, bias, eps, y, mean, rstd = arguments
    values = decode(x)
    center = values.mean(-1, keepdim=True)
    values = values - center
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    store(mean, center)
    store(rstd, factor)
    result = values * factor * decode(weight)
    store(y, result if bias is None else result + decode(bias))


@formula("aclnnLayerNormBackward")
def layer_norm_backward(*arguments: Any) -> None:
    grad, x, _shape, mean, rstd, weight, _bias, asked, grad_x, grad_weight, grad_bias = arguments
    assert asked == [True, True, True]
    g, factor = decode(grad), rstd.values.reshape(-1, 1)
    normed = (decode(x) - mean.values.reshape(-1, 1)) * factor
    store(grad_weight, (g * normed).sum(0))
    store(grad_bias, g.sum(0))
    g = g * decode(weight)
    inner = g - normed * (g * normed).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)
    store(grad_x, factor * inner)


# --- attention ---


def heads_first(x: T, layout: str, heads: int) -> torch.Tensor:
    """The values as ``[b, heads, s, d]``."""
    values = decode(x)
    if layout == "SBH":
        return values.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    assert layout == "BSND"
    return values.permute(0, 2, 1, 3)


def put_heads(to: T, values: torch.Tensor, layout: str) -> None:
    """Write ``[b, heads, s, d]`` in the layout."""
    store(to, values.permute(2, 0, 1, 3).flatten(-2) if layout == "SBH" else values.transpose(1, 2))


def excluded(mode: int, mask: Optional, sizes: tuple[int, int], band: tuple[int, int]) -> Any:
    """Which keys each query does not look at, or None: what ``sparse_mode`` and the mask say."""
    queries, keys = sizes
    if mode == 0 and mask is None:
        return None
    assert mask is not None
    if mode in (0, 1):
        return mask.values
    assert torch.equal(mask.values, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    if mode != 2:
        distance = distance - (keys - queries)
    before, after = band if mode == 4 else (queries + keys, 0)
    return (distance > after) | (distance < -before)


def weights_of(q: torch.Tensor, k: torch.Tensor, scale: float, out: Any) -> torch.Tensor:
    """The logits ``[b, heads, queries, keys]``, those of excluded keys far below all others."""
    logits = scale * (q @ k.transpose(-1, -2))
    return logits if out is None else logits.masked_fill(out, -1e38)


def sequences(x: T, ends: list[int] | None) -> list[T]:
    """The tokens ``[1, s, heads, d]`` of each sequence of TND."""
    assert ends is not None
    assert ends[-1] == x.shape[0]
    bounds = [0, *ends]
    return [
        Described(x.values[None, start:end], x.dtype) for start, end in itertools.pairwise(bounds)
    ]


def statistics(x: T, of_queries: list[T], heads: int) -> list[T]:
    """The statistics ``[1, heads, s, 8]`` of each sequence, which follow one another in memory."""
    sizes = [heads * one.shape[1] for one in of_queries]
    parts = x.values.view(-1, 8).split(sizes)
    return [Described(part.view(1, heads, -1, 8), x.dtype) for part in parts]


@formula("aclnnFlashAttentionScoreV4")
def flash_attention(*arguments: Any) -> None:
    query, key, value, _pse, _drop, _padding, mask = arguments[:7]
    _prefix, ends, key_ends = arguments[13:16]
    scale, keep, before, after, heads, layout, _inner, mode = arguments[18:26]
    largest, total, _softmax, out = arguments[-4:]
    assert keep == 1.0
    given = {"mask": mask, "scale": scale, "band": (before, after), "heads": heads, "mode": mode}
    if layout != "TND":
        attend((query, key, value), (largest, total, out), layout=layout, **given)
        return
    inputs = (sequences(query, ends), sequences(key, key_ends), sequences(value, key_ends))
    stats = (statistics(one, inputs[0], heads) for one in (largest, total))
    for one in zip(*inputs, *stats, sequences(out, ends), strict=True):
        assert mode != 3 or one[0].shape[1] <= one[1].shape[1]  # as the document asks for TND
        attend(one[:3], one[3:], layout="BSND", **given)


def attend(
    inputs: Any,
    results: Any,
    *,
    mask: Optional,
    scale: float,
    band: tuple[int, int],
    heads: int,
    layout: str,
    mode: int,
) -> None:
    query, key, value = inputs
    largest, total, out = results
    q = heads_first(query, layout, heads)
    groups = key.shape[-1] // q.shape[-1] if layout == "SBH" else key.shape[2]
    k, v = (
        heads_first(x, layout, groups).repeat_interleave(heads // groups, 1) for x in (key, value)
    )
    sizes = (q.shape[2], k.shape[2])
    logits = weights_of(q, k, scale, excluded(mode, mask, sizes, band))
    top = logits.amax(-1, keepdim=True)
    exponentials = torch.exp(logits - top)
    sums = exponentials.sum(-1, keepdim=True)
    largest.values.copy_(top.expand(*top.shape[:-1], 8))
    total.values.copy_(sums.expand(*sums.shape[:-1], 8))
    put_heads(out, (exponentials / sums) @ v, layout)


@formula("aclnnFlashAttentionScoreGradV4")
def flash_attention_grad(*arguments: Any) -> None:
    query, key, value, grad, _pse, _drop, _padding, mask = arguments[:8]
    largest, total, _softmax, result = arguments[8:12]
    _prefix, ends, key_ends = arguments[20:23]
    scale, keep, before, after, heads, layout, _layout, _inner, mode = arguments[25:34]
    grad_q, grad_k, grad_v = arguments[-7:-4]
    assert keep == 1.0
    given = {"mask": mask, "scale": scale, "band": (before, after), "heads": heads, "mode": mode}
    if layout != "TND":
        inputs = (query, key, value, grad, result, largest, total)
        attend_grad(inputs, (grad_q, grad_k, grad_v), layout=layout, **given)
        return
    of_queries = [sequences(one, ends) for one in (query, grad, result, grad_q)]
    of_keys = [sequences(one, key_ends) for one in (key, value, grad_k, grad_v)]
    stats = (statistics(one, of_queries[0], heads) for one in (largest, total))
    for q, g, o, to_q, k, v, to_k, to_v, top, sums in zip(
        *of_queries, *of_keys, *stats, strict=True
    ):
        attend_grad((q, k, v, g, o, top, sums), (to_q, to_k, to_v), layout="BSND", **given)


def attend_grad(
    inputs: Any,
    results: Any,
    *,
    mask: Optional,
    scale: float,
    band: tuple[int, int],
    heads: int,
    layout: str,
    mode: int,
) -> None:
    query, key, value, grad, result, largest, total = inputs
    grad_q, grad_k, grad_v = results
    q, g, o = (heads_first(x, layout, heads) for x in (query, grad, result))
    groups = key.shape[-1] // q.shape[-1] if layout == "SBH" else key.shape[2]
    k, v = (
        heads_first(x, layout, groups).repeat_interleave(heads // groups, 1) for x in (key, value)
    )
    sizes = (q.shape[2], k.shape[2])
    logits = weights_of(q, k, scale, excluded(mode, mask, sizes, band))
    weights = torch.exp(logits - largest.values[..., :1]) / total.values[..., :1]
    slopes = weights * (g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True))
    put_heads(grad_q, scale * (slopes @ k), layout)
    for to, found in (
        (grad_k, scale * (slopes.transpose(-1, -2) @ q)),
        (grad_v, weights.transpose(-1, -2) @ g),
    ):
        put_heads(to, found.unflatten(1, (groups, -1)).sum(2), layout)


def turned(x: torch.Tensor, mode: int) -> torch.Tensor:
    if mode == 1:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@formula("aclnnRotaryPositionEmbedding")
def rotary(x: T, cos: T, sin: T, mode: int, y: T) -> None:
    store(y, decode(x) * decode(cos) + turned(decode(x), mode) * decode(sin))


@formula("aclnnRotaryPositionEmbeddingGrad")
def rotary_grad(*arguments: Any) -> None:
    grad, cos, sin, _x, mode, grad_x, *_ = arguments
    g = decode(grad)
    store(grad_x, g * decode(cos) - turned(g * decode(sin), mode))


# --- torch's own operators ---


def _plain(x: T) -> torch.Tensor:
    return decode(x) if x.dtype in ("hifloat8", "float8_e8m0") else x.values


def _elementwise(name: str, compute: Callable[..., torch.Tensor]) -> None:
    """Register ``name`` as ``compute`` of its inputs; the result comes last."""

    @formula(name)
    def run(*arguments: Any) -> None:
        *inputs, out = arguments
        given = [_plain(one) if isinstance(one, Described) else one for one in inputs]
        store(out, compute(*given))


for _name, _compute in {
    "Abs": torch.abs,
    "BitwiseOrScalar": lambda x, s: x | s,
    "LeftShifts": lambda x, s: x << s,
    "BitwiseAndTensor": torch.bitwise_and,
    "BitwiseOrTensor": torch.bitwise_or,
    "Max": torch.max,
    "NeTensor": torch.ne,
    "NeScalar": lambda x, s: x != s,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseAndScalar": lambda x, s: x & s,
    "Clamp": lambda x, low, high: x.clamp(low, high),
    "ClampMin": lambda x, low: x.clamp(low),
    "Div": torch.div,
    "Divs": lambda x, s: x / s,
    "EqScalar": lambda x, s: x == s,
    "EqTensor": torch.eq,
    "Exp2": torch.exp2,
    "GtScalar": lambda x, s: x > s,
    "GtTensor": torch.gt,
    "IsFinite": torch.isfinite,
    "IsInf": torch.isinf,
    "LogicalAnd": torch.logical_and,
    "LogicalNot": torch.logical_not,
    "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum,
    "Mul": torch.mul,
    "Muls": lambda x, s: x * s,
    "Cos": torch.cos,
    "Sin": torch.sin,
    "Log": torch.log,
    "LtScalar": lambda x, s: x < s,
    "GeScalar": lambda x, s: x >= s,
    "Neg": torch.neg,
    "PowTensorScalar": lambda x, s: x**s,
    "Reciprocal": torch.reciprocal,
    "RemainderTensorScalar": torch.remainder,
    "Rsqrt": torch.rsqrt,
    "SWhere": lambda condition, x, y: torch.where(condition, x, y),
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Add": lambda x, y, alpha: x + alpha * y,
    "Sub": lambda x, y, alpha: x - alpha * y,
    "Adds": lambda x, s, alpha: x + alpha * s,
    "Subs": lambda x, s, alpha: x - alpha * s,
    "Rsubs": lambda x, s, alpha: s - alpha * x,
    "ConstantPadNd": lambda x, sizes, value: torch.nn.functional.pad(x, sizes, value=value),
}.items():
    _elementwise(f"aclnn{_name}", _compute)


@formula("aclnnArange")
def arange(start: Any, end: Any, step: Any, out: T) -> None:
    store(out, torch.arange(start, end, step))


@formula("aclnnInplaceMaskedFillScalar")
def masked_fill(to: T, mask: T, value: Any) -> None:
    to.values.masked_fill_(mask.values, value)


@formula("aclnnCast")
def cast(x: T, dtype: int, y: T) -> None:
    store(y, _plain(x))


@formula("aclnnInplaceCopy")
def inplace_copy(to: T, x: T) -> None:
    if to.values.dtype.itemsize == 1 and to.values.dtype == x.values.dtype:
        to.values.view(torch.uint8).copy_(x.values.view(torch.uint8))
    else:
        store(to, _plain(x))


@formula("aclnnCat")
def cat(parts: list[T], dim: int, out: T) -> None:
    present = [part.values for part in parts if part.values.numel()]
    if present:
        out.values.copy_(torch.cat(present, dim))


@formula("aclnnStack")
def stack(parts: list[T], dim: int, out: T) -> None:
    out.values.copy_(torch.stack([part.values for part in parts], dim))


@formula("aclnnMatmul", "aclnnMm")
def matmul(a: T, b: T, out: T, cube_math: int) -> None:
    store(out, decode(a) @ decode(b))


@formula("aclnnAddmm")
def addmm(*arguments: Any) -> None:
    x, a, b, beta, alpha, out, _cube_math = arguments
    store(out, beta * decode(x) + alpha * (decode(a) @ decode(b)))


@formula("aclnnInplaceAdd")
def inplace_add(to: T, x: T, alpha: Any) -> None:
    to.values.add_(x.values, alpha=alpha)


@formula("aclnnInplaceAdds")
def inplace_adds(to: T, x: Any, alpha: Any) -> None:
    to.values.add_(x, alpha=alpha)


@formula("aclnnInplaceMul")
def inplace_mul(to: T, x: T) -> None:
    to.values.mul_(x.values)


@formula("aclnnInplaceBitwiseAndScalar")
def inplace_and(to: T, x: Any) -> None:
    to.values.bitwise_and_(x)


@formula("aclnnInplaceBitwiseOrTensor")
def inplace_or(to: T, x: T) -> None:
    to.values.bitwise_or_(x.values)


@formula("aclnnInplaceMuls")
def inplace_muls(to: T, x: Any) -> None:
    to.values.mul_(x)


@formula("aclnnInplaceDiv")
def inplace_div(to: T, x: T) -> None:
    to.values.div_(x.values)


@formula("aclnnInplaceFillScalar")
def inplace_fill(to: T, value: Any) -> None:
    to.values.fill_(value)


@formula("aclnnInplaceZero")
def inplace_zero(to: T) -> None:
    to.values.zero_()


@formula("aclnnInplaceNormal")
def inplace_normal(to: T, mean: float, deviation: float, seed: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(seed + offset)
    to.values.copy_(torch.randn(to.shape, generator=generator) * deviation + mean)


@formula("aclnnInplaceOne")
def inplace_one(to: T) -> None:
    to.values.fill_(1)


@formula("aclnnAmax")
def reduce_amax(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, x.values.amax(dims, keepdim=bool(keep)))


@formula("aclnnAminmax")
def aminmax(x: T, dims: list[int], keep: int, low: T, high: T) -> None:
    store(low, x.values.amin(dims, keepdim=bool(keep)))
    store(high, x.values.amax(dims, keepdim=bool(keep)))


@formula("aclnnForeachCopy")
def foreach_copy(sources: list[T], to: list[T]) -> None:
    for source, one in zip(sources, to, strict=True):
        store(one, _plain(source))


@formula("aclnnIndexSelect")
def index_select(x: T, dim: int, index: T, out: T) -> None:
    store(out, x.values.index_select(dim, index.values))


@formula("aclnnInplaceIndexCopy")
def index_copy(to: T, dim: int, index: T, source: T) -> None:
    to.values.index_copy_(dim, index.values, source.values)


@formula("aclnnIndexPutImpl")
def index_put(to: T, indices: list[T], values: T, accumulates: int, is_unsafe: int) -> None:
    assert not accumulates
    to.values[tuple(index.values for index in indices)] = values.values


@formula("aclnnAll")
def reduce_all(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, torch.all(x.values, dims or None, keepdim=bool(keep)))


@formula("aclnnAny")
def reduce_any(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, torch.any(x.values, dims or None, keepdim=bool(keep)))


@formula("aclnnReduceSum")
def reduce_sum(x: T, dims: list[int], keep: int, dtype: int, out: T) -> None:
    wide = _plain(x).to(out.values.dtype)
    wide = wide.float() if wide.is_floating_point() and wide.dtype != torch.float64 else wide
    store(out, wide.sum(dims, keepdim=bool(keep)) if dims else wide.sum())


@formula("aclnnMean", "aclnnMeanV2")
def mean(x: T, dims: list[int], keep: int, dtype: int, out: T) -> None:
    store(out, decode(x).mean(dims or None, keepdim=bool(keep)))


@formula("aclnnRepeatInterleaveIntWithDim")
def repeat_interleave(x: T, count: int, dim: int, size: int, out: T) -> None:
    store(out, x.values.repeat_interleave(count, dim))
