"""Products of groups in one call of torch_npu, where its operator has them; else one call a group.

The operator takes one tensor of weights. Weights that lie one after the other in memory are one as
they are; others are copied into one, in their eight bits.

Source: aclnnGroupedMatmulV4, V5 and aclnnQuantGroupedMatmulInplaceAdd of CANN's ops-transformer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fp8core.backend_api import GroupedGemmDesc, Operand, OperandSpec, split_groups
from fp8core_backends.ascend.gemm import dense, gemm, is_transposed, store
from fp8core_backends.ascend.kinds import Kind, groups_of, kind_of
from fp8core_backends.ascend.operators import grouped_products

_MAX_GROUPS = 1024
_MAX_INNER = 2**21 - 1
"""The longest row of an operand."""
_VECTORS = (Kind.TENSOR, Kind.ROW)
_PAIR = 64
"""Terms whose two exponents lie side by side."""


def grouped_gemm(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Operand | Sequence[Operand],
    group_offsets: torch.Tensor,
    *,
    bias: Sequence[torch.Tensor] | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return one product a group; see the backend API."""
    bounds = group_offsets.tolist()  # on the CPU
    if desc.contract_groups:
        assert isinstance(b, Operand)
        outs = None if out is None else list(out)
        fits = _has_grouped_terms(desc, a, b, bounds)
        return (_terms if fits else _terms_apart)(desc, a, b, bounds, outs)
    assert not isinstance(b, Operand)
    assert out is None or isinstance(out, torch.Tensor)
    if bias is None and _has_grouped_rows(desc, a, b, bounds):
        return _rows(desc, a, b, bounds, out)
    return _rows_apart(desc, a, b, bounds, bias, out)


def _fits(bounds: Sequence[int], *sizes: int) -> bool:
    return 1 < len(bounds) <= _MAX_GROUPS + 1 and 0 not in sizes and max(sizes) <= _MAX_INNER


def _kinds(desc: GroupedGemmDesc) -> tuple[Kind, Kind]:
    assert desc.a is not None
    assert desc.b is not None
    return kind_of(desc.a), kind_of(desc.b)


# --- groups of rows: fprop and dgrad ---


def _has_grouped_rows(
    desc: GroupedGemmDesc, a: Operand, b: Sequence[Operand], bounds: Sequence[int]
) -> bool:
    """Whether the operator has the product of ``a``'s groups of rows with one weight each."""
    kinds = _kinds(desc)
    if len(b) != len(bounds) - 1 or not _fits(bounds, bounds[-1], *b[0].data.shape):
        return False
    if kinds[0] is Kind.TENSOR and len(b) == a.data.shape[0]:
        return False  # one scale a group would be taken for one a row
    is_of_vectors = all(kind in _VECTORS for kind in kinds)
    return is_of_vectors or kinds in ((Kind.BLOCK, Kind.SQUARE), (Kind.MX, Kind.MX))


def _rows(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Sequence[Operand],
    bounds: Sequence[int],
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[m_g, k] x [n, k]`` of each group, stacked to ``[m, n]``."""
    assert desc.a is not None
    assert desc.b is not None
    assert a.scale_inv is not None
    rows_scale = _paired(a.scale_inv) if kind_of(desc.a) is Kind.MX else dense(a.scale_inv)
    if kind_of(desc.a) in _VECTORS:
        rows_scale = rows_scale.reshape(-1)
    weight, weight_scale = _weights(desc.b, b)
    product = grouped_products.grouped_quant_matmul(
        a.data.contiguous(),
        weight,
        (rows_scale, weight_scale),
        _ends(bounds, a.data.device),
        (desc.a.format, desc.b.format),
        desc.out_dtype if out is None else torch.float32,
        groups=groups_of(desc.a, desc.b),
    )
    return store(desc, product, out)


def _weights(spec: OperandSpec, b: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights as ``[g, k, n]`` and their scales, both transposed views or neither."""
    turned = all(is_transposed(weight.data) for weight in b)  # [k, n] in memory
    codes = _stacked([weight.data.t() if turned else weight.data.contiguous() for weight in b])
    scales = []
    for weight in b:
        assert weight.scale_inv is not None
        if kind_of(spec) in _VECTORS:
            scales.append(weight.scale_inv.reshape(-1))
            continue
        scale = _paired(weight.scale_inv) if kind_of(spec) is Kind.MX else weight.scale_inv
        scales.append(scale.transpose(0, 1) if turned else scale)
    scale = torch.stack(scales)
    if kind_of(spec) is Kind.TENSOR:
        scale = scale.reshape(-1)
    if turned:
        return codes, scale
    is_matrix = kind_of(spec) not in _VECTORS
    return codes.transpose(1, 2), scale.transpose(1, 2) if is_matrix else scale


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return contiguous matrices of one shape as ``[g, ...]``: a view where they lie in a row."""
    whole = _joined_view(parts)
    return torch.stack(tuple(parts)) if whole is None else whole


def _joined_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one view ``[g, rows, cols]`` of contiguous matrices that follow one another in one
    piece of memory, else None."""
    first = parts[0]
    size = first.numel()
    is_joined = all(
        part.shape == first.shape
        and part.dtype == first.dtype
        and part.is_contiguous()
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + at * size
        for at, part in enumerate(parts)
    )
    if not is_joined:
        return None
    return first.as_strided((len(parts), *first.shape), (size, first.shape[1], 1))


def _paired(exponents: torch.Tensor) -> torch.Tensor:
    """Return exponents ``[rows, k / 32]`` as ``[rows, k / 64, 2]``; k is a multiple of 64."""
    return dense(exponents).view(exponents.shape[0], -1, 2)


def _ends(bounds: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where each group ends, int64 ``[g]`` on the device."""
    ends = torch.tensor(bounds[1:], dtype=torch.int64, device="cpu", pin_memory=True)
    return ends.to(device, non_blocking=True)  # whose memory stays until it is copied


def _rows_apart(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Sequence[Operand],
    bounds: Sequence[int],
    bias: Sequence[torch.Tensor] | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    parts = split_groups(desc.a, a, bounds, 0)
    biases: Sequence[torch.Tensor | None] = [None] * len(parts) if bias is None else bias
    steps = zip(parts, b, biases, strict=True)
    if out is None:
        return torch.cat([gemm(desc, part, weight, bias=add) for part, weight, add in steps])
    for (start, end), (part, weight, add) in zip(itertools.pairwise(bounds), steps, strict=True):
        gemm(desc, part, weight, bias=add, out=out[start:end])
    return out


# --- groups of terms: wgrad ---


def _has_grouped_terms(
    desc: GroupedGemmDesc, a: Operand, b: Operand, bounds: Sequence[int]
) -> bool:
    """Whether the operator has the products whose terms are in groups: of transposed views."""
    kinds = _kinds(desc)
    if not _fits(bounds, *a.data.shape, b.data.shape[0]):
        return False
    if not (is_transposed(a.data) and is_transposed(b.data)):
        return False
    if kinds == (Kind.MX, Kind.MX):
        return all(bound % _PAIR == 0 for bound in bounds)
    return kinds in ((Kind.TENSOR, Kind.TENSOR), (Kind.ROW, Kind.ROW))


def _terms(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Operand,
    bounds: Sequence[int],
    outs: list[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Return ``[m, k_g] x [n, k_g]`` of each group, ``[m, n]``."""
    assert desc.a is not None
    assert desc.b is not None
    scales = tuple(_scales_of_terms(kind_of(desc.a), operand, bounds) for operand in (a, b))
    operands = (a.data, b.data.t(), (scales[0], scales[1]), _ends(bounds, a.data.device))
    formats = (desc.a.format, desc.b.format)
    groups = groups_of(desc.a, desc.b)
    whole = None if outs is None else _target(desc, outs)
    if whole is not None and outs is not None:
        grouped_products.add_quant_gmm_(whole, *operands, formats, groups=groups)
        return outs
    dtype = desc.out_dtype if outs is None else torch.float32
    products = grouped_products.grouped_quant_matmul(
        *operands, formats, dtype, groups=groups, has_terms=True
    )
    results = list(products.unbind(0))
    for result, (start, end) in zip(results, itertools.pairwise(bounds), strict=True):
        if start == end:  # the operator need not write it
            result.zero_()
    if outs is None:
        return results
    return [store(desc, result, out) for result, out in zip(results, outs, strict=True)]


def _target(desc: GroupedGemmDesc, outs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the float32 ``[g, m, n]`` that the operator can add to, None if it cannot."""
    assert desc.a is not None
    is_added = desc.accumulate and outs[0].dtype == torch.float32
    takes_sum = kind_of(desc.a) is Kind.MX or (
        kind_of(desc.a) is Kind.TENSOR and desc.a.format == "hif8"
    )
    return _joined_view(outs) if is_added and takes_sum else None


def _scales_of_terms(kind: Kind, operand: Operand, bounds: Sequence[int]) -> torch.Tensor:
    """Return the scales of an operand ``[rows, k]`` whose groups are along k, as the operator
    takes them: ``[g]``, ``[g, rows]``, or exponents ``[k / 64 + g, rows, 2]``, of which each group
    leaves one row unused."""
    scale = operand.scale_inv
    assert scale is not None
    if kind is Kind.TENSOR:
        return scale.reshape(-1)
    if kind is Kind.ROW:
        return scale.t().contiguous()
    pairs = _paired(scale).transpose(0, 1)  # [k / 64, rows, 2]
    unused = pairs.new_zeros(1, *pairs.shape[1:])
    parts = [
        part
        for start, end in itertools.pairwise(bounds)
        for part in (pairs[start // _PAIR : end // _PAIR], unused)
    ]
    return torch.cat(parts)


def _terms_apart(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Operand,
    bounds: Sequence[int],
    outs: list[torch.Tensor] | None,
) -> list[torch.Tensor]:
    parts = (split_groups(spec, x, bounds, 1) for spec, x in ((desc.a, a), (desc.b, b)))
    targets: Sequence[torch.Tensor | None] = [None] * (len(bounds) - 1) if outs is None else outs
    return [
        gemm(desc, first, second, out=to)  # [m, k_g] x [n, k_g] -> [m, n]
        for first, second, to in zip(*parts, targets, strict=True)
    ]
