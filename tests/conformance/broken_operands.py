"""Backends that are right for ordinary operands, and wrong for larger ones, for square or strided
ones, for an out of their own or beyond a range: one fault each."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import (
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormDesc,
    Operand,
    QuantizeDesc,
)
from fp8core_backends.reference.gemm import gemm, grouped_gemm
from fp8core_backends.reference.layers import activation, activation_backward, norm, norm_backward
from fp8core_backends.reference.quantize import dequantize, quantize
from tests.conformance.broken import Sound, caught_by, fault, operands


class Product(Sound):
    """Computes products with ``product``."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        made = gemm(desc, a, b, **given)
        return self.product(made, a, b)

    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        raise NotImplementedError


@caught_by("law4_gemm_takes_any_m_n_and_k")
class LosesRowsOfMany(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[4096:] = 0
        return made


@caught_by("law4_gemm_takes_any_m_n_and_k")
class LosesColumnsOfMany(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[:, 2048:] = 0
        return made


@caught_by("law4_gemm_takes_any_m_n_and_k")
class LosesRowsBeyond16Bits(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[65535:] = 0
        return made


@fault("gemm", "law4_gemm_takes_any_m_n_and_k")
def loses_terms_of_many(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    """Ends a sum after 2048 terms."""
    if a.data.shape[1] > 2048:
        a = a._replace(data=a.data.clone())
        a.data[:, 2048:] = 0
    return gemm(desc, a, b, **given)


@fault("gemm", "law4_gemm_takes_any_m_n_and_k")
def loses_terms_beyond16_bits(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    if a.data.shape[1] > 65535:
        a = a._replace(data=a.data.clone())
        a.data[:, 65535:] = 0
    return gemm(desc, a, b, **given)


@fault("grouped_gemm", "law4_grouped_gemm_takes_many_groups")
def takes_a_few_groups(desc: GroupedGemmDesc, a: Operand, b: Any, *rest: Any, **given: Any) -> Any:
    """Has room for 32 weights."""
    if not desc.contract_groups:
        b = [b[group % 32] for group in range(len(b))]
    return grouped_gemm(desc, a, b, *rest, **given)


@fault("quantize", "law1_quantize_scales_equal_the_reference")
def scales_a_few_groups(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Has room for 32 amaxes."""
    made = quantize(desc, x, *groups, **given)
    if not groups or len(groups[0]) <= 33:
        return made

    def spoil(one: Operand) -> Operand:
        scale_inv = one.scale_inv.clone()
        scale_inv[32:] = 0
        return one._replace(scale_inv=scale_inv)

    return operands(made, spoil)


@fault("quantize", "law1_quantize_scales_equal_the_reference")
def takes_amax_of_the_first_rows(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Looks for the largest magnitude in 1024 rows."""
    if len(x) > 1024 and not groups:
        x = x.clone()
        largest = x[:1024].abs().nan_to_num().max()
        x[1024:] = torch.where(x[1024:].isfinite(), x[1024:].clamp(-largest, largest), x[1024:])
    return quantize(desc, x, *groups, **given)


@fault("norm", "law4_norm_is_within_the_bound")
def takes_statistics_of_the_first_columns(desc: NormDesc, x: torch.Tensor, *own: Any) -> Any:
    """Computes the mean square of 1024 columns."""
    y, mean, rstd = norm(desc, x, *own)
    if x.shape[1] > 1024:
        other = norm(desc, x[:, :1024], *(one[:1024] for one in own))[2]
        y = (y.float() * (other / rstd)[:, None]).to(y.dtype)
    return y, mean, rstd


@fault("activation", "law4_activation_is_within_the_bound")
def loses_rows_of_many_activations(desc: Any, x: torch.Tensor) -> Any:
    made = activation(desc, x)
    made[4096:] = 0
    return made


@fault("gemm", "law4_gemm_takes_operands_of_any_strides")
def forgets_strides_of_squares(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    """Takes a square operand for one by rows wherever its columns are."""
    return gemm(desc, a, by_rows(b), **given)


def by_rows(one: Operand) -> Operand:
    rows, cols = one.data.shape
    is_square = rows == cols and one.data.stride() == (1, rows)
    return one._replace(data=one.data.t()) if is_square else one


@fault("grouped_gemm", "law4_grouped_gemm_takes_operands_of_any_strides")
def forgets_strides_of_square_groups(
    desc: GroupedGemmDesc, a: Operand, b: Any, *rest: Any, **given: Any
) -> Any:
    own = by_rows(b) if isinstance(b, Operand) else list(map(by_rows, b))
    return grouped_gemm(desc, a, own, *rest, **given)


@fault("activation", "law7_inputs_may_have_any_strides")
def forgets_strides_of_square_inputs(desc: Any, x: torch.Tensor) -> Any:
    return activation(desc, x.t() if x.stride() == (1, 64) and x.shape == (64, 64) else x)


@fault("activation", "law7_inputs_may_have_any_strides")
def forgets_the_pitch_of_vectors(desc: Any, x: torch.Tensor) -> Any:
    """Takes rows of whole vectors at an aligned address for adjacent ones."""
    cols = x.shape[1]
    is_aligned = x.stride() == (cols + 32, 1) and not (x.storage_offset() | cols) % 8
    return activation(desc, x.as_strided(x.shape, (cols, 1)) if is_aligned else x)


@fault("norm", "law7_inputs_may_have_any_strides")
def takes_a_weight_for_contiguous(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> Any:
    weight = weight.as_strided(weight.shape, (1,)) if weight.stride(0) > 1 else weight
    return norm(desc, x, weight, *rest)


@fault("gemm", "law4_gemm_of_as_many_rows_as_columns")
def exchanges_scales(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    """Scales a by b's and b by a's where both fit."""
    if desc.a is not None and desc.a == desc.b and a.scale_inv.shape == b.scale_inv.shape:
        a, b = a._replace(scale_inv=b.scale_inv), b._replace(scale_inv=a.scale_inv)
    return gemm(desc, a, b, **given)


@fault("gemm", "law4_gemm_adds_the_bias_into_out")
def forgets_the_bias_with_out(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    return gemm(desc, a, b, **(given | {"bias": None} if "out" in given else given))


@fault("grouped_gemm", "law4_grouped_gemm_adds_the_biases_into_out")
def forgets_the_biases_with_out(desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
    own = given | {"bias": None} if "out" in given else given
    return grouped_gemm(desc, *operands, **own)


@fault("gemm", "law4_gemm_writes_into_out_of_any_strides")
def writes_into_a_copy_of_out(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    """Makes out contiguous, and leaves it at that."""
    out = given.pop("out", None)
    if out is None:
        return gemm(desc, a, b, **given)
    gemm(desc, a, b, out=out.contiguous(), **given)
    return out


@fault("gemm", "law4_gemm_writes_into_out_of_any_strides")
def writes_beside_out(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    """Writes whole rows of the memory that out is part of."""
    out = given.get("out")
    if out is not None and out.stride(1) == 1 and out.stride(0) == out.shape[1] + 8:
        out.as_strided((out.shape[0], out.shape[1] + 1), out.stride())[:, -1] = 0
    return gemm(desc, a, b, **given)


@fault("grouped_gemm", "law4_grouped_gemm_writes_into_out_of_any_strides")
def writes_into_copies_of_out(desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
    out = given.pop("out", None)
    if out is None:
        return grouped_gemm(desc, *operands, **given)
    is_one = isinstance(out, torch.Tensor)
    copies = out.contiguous() if is_one else [one.contiguous() for one in out]
    grouped_gemm(desc, *operands, out=copies, **given)
    return out


@fault("quantize", "law1_quantize_takes_offsets_of_any_values")
def ends_the_last_group_at_the_end(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Takes rows behind the last group for rows of it."""
    if desc.offsets_on_device:
        groups[0][-1] = len(x)
    return quantize(desc, x, *groups, **given)


@fault("quantize", "law1_quantize_of_zeros_or_nan_alone_equals_the_reference")
def divides_by_an_amax_of_zero(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Gives a tensor of zeros the scale 0 / target."""
    made = quantize(desc, x, *groups, **given)
    if x.numel() and not x.any() and made.rowwise is not None:
        made.rowwise.scale_inv.zero_()
    return made


@fault("grouped_gemm", "law4_grouped_gemm_of_rows_of_no_group_is_zero")
def leaves_rows_of_no_group(
    desc: GroupedGemmDesc, a: Operand, b: Any, offsets: torch.Tensor, **given: Any
) -> Any:
    """Writes the rows of groups alone where out is given."""
    out = given.get("out")
    if not isinstance(out, torch.Tensor) or not desc.offsets_on_device:
        return grouped_gemm(desc, a, b, offsets, **given)
    before = out.clone()
    grouped_gemm(desc, a, b, offsets, **given)
    out[int(offsets[-1]) :] = before[int(offsets[-1]) :]
    return out


@fault("grouped_gemm", "law4_grouped_gemm_keeps_nan_in_its_group")
def spreads_nan_over_groups(desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
    """Multiplies the rows of other groups by 0, and adds them."""
    made = grouped_gemm(desc, *operands, **given)
    if isinstance(made, torch.Tensor):
        return made.add_(0 * made.sum())
    total = sum(0 * one.sum() for one in made)
    return [one.add_(total) for one in made]


@fault("norm", "law4_norm_is_exact_where_the_mean_is_large")
def takes_a_difference_of_squares(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *bias: Any
) -> Any:
    """Computes the variance as the mean of squares less the square of the mean."""
    if desc.kind != "layernorm":
        return norm(desc, x, weight, *bias)
    values = x.float()
    mean = values.mean(-1)
    variance = (values.square().mean(-1) - mean.square()).clamp(min=0)
    rstd = torch.rsqrt(variance + desc.eps)
    gamma = weight.float() + 1 if desc.zero_centered else weight.float()
    y = (values - mean[:, None]) * rstd[:, None] * gamma + bias[0].float()
    return y.to(desc.out_dtype), mean, rstd


@fault("norm", "law4_norm_takes_parameters_of_any_float_dtype")
def ignores_parameters_of_other_dtypes(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *bias: Any
) -> Any:
    weight = weight if weight.dtype == desc.dtype else torch.ones_like(weight)
    return norm(desc, x, weight, *bias)


@fault("norm", "law4_norm_keeps_nan_and_inf_in_their_rows")
def spreads_nan_over_rows(desc: NormDesc, *given: Any) -> Any:
    y, *rest = norm(desc, *given)
    return y + 0 * y.sum(), *rest


@fault("norm_backward", "law4_norm_of_nothing_has_the_form_of_the_reference")
def adds_gradients_of_no_rows(desc: Any, grad: torch.Tensor, *given: Any) -> Any:
    """Leaves the sums over no rows as new memory is."""
    grad_x, grad_weight, grad_bias = norm_backward(desc, grad, *given)
    return grad_x, grad_weight if len(grad) else grad_weight.fill_(7), grad_bias


def saturated(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(x.dtype).max
    return x.clamp_(-largest, largest)


@fault("gemm", "law4_gemm_overflows_to_infinity")
def saturates_products(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    return saturated(gemm(desc, a, b, **given))


@fault("grouped_gemm", "law4_grouped_gemm_overflows_to_infinity")
def saturates_products_of_groups(desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
    made = grouped_gemm(desc, *operands, **given)
    return saturated(made) if isinstance(made, torch.Tensor) else list(map(saturated, made))


@fault("dequantize", "law4_dequantize_overflows_to_infinity")
def saturates_values(desc: DequantizeDesc, operand: Operand) -> Any:
    made = dequantize(desc, operand)
    return saturated(made) if desc.dtype == torch.float16 else made


@fault("dequantize", "law4_dequantize_knows_every_code")
def loses_infinity_of_a_code(desc: DequantizeDesc, operand: Operand) -> Any:
    """Takes the codes of infinity for the largest value."""
    return saturated(dequantize(desc, operand))


@fault("norm", "law4_norm_overflows_to_infinity")
def saturates_norms(desc: NormDesc, *given: Any) -> Any:
    y, *rest = norm(desc, *given)
    return saturated(y), *rest


@fault("activation", "law4_activation_overflows_to_infinity")
def saturates_activations(desc: Any, x: torch.Tensor) -> Any:
    return saturated(activation(desc, x))


@fault("activation", "law4_activation_takes_every_bfloat16")
def activates_nan_as_zero(desc: Any, x: torch.Tensor) -> Any:
    return activation(desc, x.nan_to_num(0.0, torch.inf, -torch.inf))


@fault("activation_backward", "law4_activation_backward_overflows_to_infinity")
def saturates_gradients_of_activations(desc: Any, *given: Any) -> Any:
    return saturated(activation_backward(desc, *given))
