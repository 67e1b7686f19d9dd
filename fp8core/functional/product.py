"""Products of quantized and plain tensors: ``gemm`` and ``grouped_gemm``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from fp8core.chain.differentiable import refuse_transform
from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.run import is_under_torch_autocast
from fp8core.chain.shape import LinkShape
from fp8core.chain.unwrap import made_readable, unwrap
from fp8core.context.autocast import active
from fp8core.dispatch import table
from fp8core.errors import OperandError, UnsupportedError
from fp8core.functional.product_nodes import Gemm, GroupedGemm, Settings, apply, spec_of
from fp8core.functional.quantize import dequantize
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.run import run_layer
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import FLOATS
from fp8core.torch_ops.operators import constant_in_graph


class FunctionalLinear(LowPrecisionModule):
    """A linear without parameters, which come with the call; its links stay bound between calls."""

    kind = "linear"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(None)
        self.use_bias = shape.bias_dtype is not None
        self._shape = shape

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (self._shape,)


_layer_of = functools.lru_cache(maxsize=1024)(FunctionalLinear)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x w^T + bias`` in the precision of the active ``autocast``, as a Linear layer does.

    Tensors that are stored as the recipe casts are multiplied without another cast; all other
    tensors are quantized. Outside of autocast quantized tensors are multiplied by :func:`gemm`.

    Args:
        x: ``[..., k]``, quantized or plain.
        weight: ``[n, k]``, quantized or plain.
        bias: ``[n]``, or None.

    Raises:
        OperandError: a tensor does not fit.
        UnsupportedError: the recipe has delayed scales, for whose state there is no layer.
    """
    for role, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and (role != "bias" or tensor is not None):
            raise OperandError(f"linear: {role} is {type(tensor).__name__}; expected a tensor.")
    if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])):
        bias_shape = "none" if bias is None else list(bias.shape)
        raise OperandError(
            f"linear: weight is {list(weight.shape)}, bias {bias_shape}; expected [n, k] and [n]."
        )
    settings = active(None)
    recipe = settings.quantize
    if recipe is None:
        if isinstance(x, QuantizedTensor) or isinstance(weight, QuantizedTensor):
            return gemm(x, weight, bias=bias)
    else:
        plan = plan_of(LinearPlan, recipe, LayerRole("linear"), x.dtype)
        if plan.delayed is not None:
            raise UnsupportedError(
                f"linear under {type(recipe).__name__}: delayed scales belong to a layer. Use "
                f"fp8core.Linear, or a recipe without state, such as Float8CurrentScaling."
            )
    n, k = weight.shape
    shape = LinearShape(k, n, weight.dtype, None if bias is None else bias.dtype)
    params = [weight] if bias is None else [weight, bias]
    return run_layer(_layer_of(shape), x, params, like=weight, columns=k)[0]


def checked(owner: str, role: str, x: Any) -> torch.Tensor:
    """Return ``x`` as a QuantizedTensor, or a plain tensor whose memory a backend can read.

    Raises:
        OperandError: it is neither.
    """
    name = f"{owner}: {role}"
    if isinstance(x, QuantizedTensor):
        return x
    if not isinstance(x, torch.Tensor):
        raise OperandError(f"{name} is {type(x).__name__}; expected a tensor.")
    refuse_transform(x, name, "Use torch.nn.functional.linear on dequantized tensors.")
    plain = unwrap(x, name)
    if plain.dtype not in FLOATS:
        raise OperandError(f"{name} is {plain.dtype}; expected float32, bfloat16 or float16.")
    return made_readable(plain, plain.device, name)


def unbound(x: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors of the groups, of which there is at least one."""
    parts = x.unbind(0) if isinstance(x, torch.Tensor) else tuple(x)
    if not parts:
        raise OperandError("grouped_gemm: there is no group.")
    return parts


def checked_splits(m_splits: Sequence[int], a: torch.Tensor, groups: int) -> tuple[int, ...]:
    """Return the rows of each group, which add up to those of ``a``."""
    try:
        splits = tuple(map(operator.index, m_splits))
    except TypeError:
        raise OperandError(f"grouped_gemm: m_splits={m_splits!r}; expected integers.") from None
    if a.dim() != 2 or len(splits) != groups or min(splits) < 0 or sum(splits) != a.shape[0]:
        raise OperandError(
            f"grouped_gemm: m_splits={list(splits)} of {groups} matrices, and a is "
            f"{list(a.shape)}; expected a matrix, and one size a group that add up to its rows."
        )
    return splits


def check_pair(owner: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise unless ``a`` and ``b`` are on one device, plain in one dtype, or stored along k."""
    if a.device != b.device:
        raise OperandError(
            f"{owner}: a is on {a.device}, b on {b.device}. Move one of them; nothing is moved "
            f"silently."
        )
    both_plain = not isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor)
    if both_plain and a.dtype != b.dtype:
        raise OperandError(f"{owner}: a is {a.dtype}, b {b.dtype}. Convert one of them.")
    for role, operand in (("a", a), ("b", b)):
        if isinstance(operand, QuantizedTensor) and operand.plan.rowwise is None:
            raise OperandError(
                f"{owner}: {role} holds no rowwise operand, which is the one along k. Quantize it "
                f"with rowwise usage."
            )


def out_dtype_of(
    owner: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    """Return the dtype of the result: the one asked for, that of ``out``, or a plain side's."""
    if out_dtype is None and isinstance(out, torch.Tensor):
        out_dtype = out.dtype
    plain = b if isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor) else a
    dtype = out_dtype or plain.dtype
    if dtype not in FLOATS:
        raise OperandError(f"{owner}(out_dtype={dtype}): expected float32, bfloat16 or float16.")
    return dtype


def check_out(
    owner: str,
    out: torch.Tensor | None,
    size: tuple[int, ...],
    dtype: torch.dtype,
    a: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """Raise unless the result, of ``size`` and ``dtype``, can be written to ``out``."""
    if out is None:
        if accumulate:
            raise OperandError(f"{owner}(accumulate=True) needs out, to which it adds.")
        return
    if isinstance(out, QuantizedTensor) or unwrap(out, f"{owner}: out") is not out:
        raise OperandError(
            f"{owner}(out={type(out).__name__}): expected a plain tensor. Quantize the result by "
            f"a quantizer's update_quantized()."
        )
    actual, expected = (tuple(out.shape), out.dtype, out.device), (size, dtype, a.device)
    if actual != expected:
        raise OperandError(
            f"{owner}: out is {list(out.shape)} {out.dtype} on {out.device}, expected {list(size)} "
            f"{dtype} on {a.device}."
        )
    made_readable(out, out.device, f"{owner}: out")


def refuse_out_with_grad(
    owner: str, out: torch.Tensor | None, tensors: Sequence[torch.Tensor | None]
) -> None:
    """Raise if ``out`` is given where a gradient would be needed."""
    if out is None or not torch.is_grad_enabled():
        return
    if out.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(
            f"{owner}(out=...) is not differentiable: leave out away, or use torch.no_grad()."
        )


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``d[..., n] = a[..., k] @ b[n, k].T + bias[n]``.

    Two quantized tensors are multiplied as they are, by their rowwise operands. If one operand is
    plain, the quantized operand is dequantized to its dtype. In backward a quantized gradient meets
    columnwise operands in the same way, and everything else is computed from the dequantized
    tensors, in the widest dtype among those of both operands and of the gradient that is returned.

    Args:
        a, b: quantized or plain, float32, bfloat16 or float16.
        out_dtype: of the result; None takes that of ``out``, or that of ``a``.
        bias: ``[n]``, added in float32 before the one rounding.
        accumulate: add the product to ``out`` instead of writing it there.
        out: a plain tensor ``[..., n]`` for the result. ``out`` takes no part in differentiation.

    Raises:
        OperandError: sizes, dtypes or devices do not fit, or a quantized tensor holds no rowwise
            operand.
        UnsupportedError: no backend multiplies two tensors that are stored like these; or ``out``
            where a gradient is needed.
    """
    if torch.compiler.is_compiling():
        _allow_in_graph()
        return _captured_gemm(a, b, out_dtype, bias, accumulate, out)
    return _gemm(a, b, out_dtype, bias, accumulate=accumulate, out=out)


def _allow_in_graph() -> bool:
    torch.compiler.allow_in_graph(_captured_gemm)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return True


constant_in_graph(_allow_in_graph)


def _captured_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    accumulate: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Run :func:`gemm` by operators, which torch.compile records without reading this code."""
    with table.capturing():
        return _gemm(a, b, out_dtype, bias, accumulate=accumulate, out=out)


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    *,
    accumulate: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    a, b = checked("gemm", "a", a), checked("gemm", "b", b)
    if b.dim() != 2 or not a.dim() or a.shape[-1] != b.shape[1]:
        raise OperandError(
            f"gemm: a is {list(a.shape)}, b {list(b.shape)}; expected a [..., k] and b [n, k]."
        )
    check_pair("gemm", a, b)
    dtype = out_dtype_of("gemm", a, b, out_dtype, out)
    size = (*a.shape[:-1], b.shape[0])
    if bias is not None:
        bias = checked("gemm", "bias", dequantize(bias))
        if tuple(bias.shape) != (b.shape[0],) or bias.device != a.device:
            raise OperandError(
                f"gemm: bias is {list(bias.shape)} on {bias.device}, expected [{b.shape[0]}] on "
                f"{a.device}."
            )
    check_out("gemm", out, size, dtype, a, accumulate=accumulate)
    refuse_out_with_grad("gemm", out, (a, b, bias))
    settings = Settings(dtype, out, accumulate)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return apply(Gemm, settings, a, b, bias)
    return apply(Gemm, settings, a, b, bias)


def grouped_gemm(
    a: torch.Tensor,
    b: Sequence[torch.Tensor] | torch.Tensor,
    m_splits: Sequence[int],
    out_dtype: torch.dtype | None = None,
    bias: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``d[m, n]``: rows of ``a [m, k]``, group by group, times ``b[g] [n, k].T + bias[g]``.

    Tensors are quantized or plain, as in :func:`gemm`; all of ``b`` have one plan.

    Args:
        a: the rows of all groups, one after the other; rows of a quantized tensor share its scales
            across groups.
        b: a sequence of matrices, or one tensor ``[groups, n, k]``.
        m_splits: the number of rows of each group; their sum is that of ``a``.
        out_dtype, accumulate, out: as in :func:`gemm`.
        bias: a sequence of vectors, or one tensor ``[groups, n]``.

    Raises:
        OperandError: as in :func:`gemm`; or ``m_splits`` do not add up to the rows of ``a``.
        UnsupportedError: as in :func:`gemm`; or the sizes of groups do not fit a backend's kernels.
    """
    a = checked("grouped_gemm", "a", a)
    matrices = [checked("grouped_gemm", f"b[{at}]", matrix) for at, matrix in enumerate(unbound(b))]
    splits = checked_splits(m_splits, a, len(matrices))
    first = matrices[0]
    for at, matrix in enumerate(matrices):
        check_pair("grouped_gemm", a, matrix)
        is_uniform = matrix.shape == first.shape and spec_of(matrix) == spec_of(first)
        if (
            matrix.dim() != 2
            or matrix.shape[1] != a.shape[1]
            or not is_uniform
            or matrix.dtype != first.dtype
        ):
            raise OperandError(
                f"grouped_gemm: b[{at}] is {list(matrix.shape)} {matrix.dtype} {spec_of(matrix)}; "
                f"expected [n, {a.shape[1]}], all stored as b[0], {list(first.shape)} "
                f"{first.dtype} {spec_of(first)}."
            )
    dtype = out_dtype_of("grouped_gemm", a, first, out_dtype, out)
    biases = (
        []
        if bias is None
        else [checked("grouped_gemm", "bias", dequantize(tensor)) for tensor in unbound(bias)]
    )
    if biases and (
        len(biases) != len(matrices) or any(tuple(v.shape) != (first.shape[0],) for v in biases)
    ):
        raise OperandError(
            f"grouped_gemm: bias has the shapes {[list(v.shape) for v in biases]}; expected one "
            f"[{first.shape[0]}] for each of {len(matrices)} groups."
        )
    check_out("grouped_gemm", out, (a.shape[0], first.shape[0]), dtype, a, accumulate=accumulate)
    refuse_out_with_grad("grouped_gemm", out, (a, *matrices, *biases))
    settings = Settings(dtype, out, accumulate, splits)
    if is_under_torch_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return apply(GroupedGemm, settings, a, *matrices, *biases)
    return apply(GroupedGemm, settings, a, *matrices, *biases)
