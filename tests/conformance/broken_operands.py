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
from fp8core_backends.reference.activation import activation, activation_backward
from fp8core_backends.reference.gemm import gemm, grouped_gemm
from fp8core_backends.reference.norm import norm, norm_backward
from fp8core_backends.reference.quantize import dequantize, quantize
from tests.conformance.broken import Sound, operands


class Product(Sound):
    """Computes products with ``product``."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        made = gemm(desc, a, b, **given)
        return self.product(made, a, b)

    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        raise NotImplementedError


class LosesRowsOfMany(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[4096:] = 0
        return made


class LosesColumnsOfMany(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[:, 2048:] = 0
        return made


class LosesRowsBeyond16Bits(Product):
    def product(self, made: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        made[65535:] = 0
        return made


class LosesTermsOfMany(Sound):
    """Ends a sum after 2048 terms."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        if a.data.shape[1] > 2048:
            a = a._replace(data=a.data.clone())
            a.data[:, 2048:] = 0
        return gemm(desc, a, b, **given)


class LosesTermsBeyond16Bits(Sound):
    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        if a.data.shape[1] > 65535:
            a = a._replace(data=a.data.clone())
            a.data[:, 65535:] = 0
        return gemm(desc, a, b, **given)


class TakesAFewGroups(Sound):
    """Has room for 32 weights."""

    def grouped_gemm(
        self, desc: GroupedGemmDesc, a: Operand, b: Any, *rest: Any, **given: Any
    ) -> Any:
        if not desc.contract_groups:
            b = [b[group % 32] for group in range(len(b))]
        return grouped_gemm(desc, a, b, *rest, **given)


class ScalesAFewGroups(Sound):
    """Has room for 32 amaxes."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        if not groups or len(groups[0]) <= 33:
            return made

        def spoil(one: Operand) -> Operand:
            scale_inv = one.scale_inv.clone()
            scale_inv[32:] = 0
            return one._replace(scale_inv=scale_inv)

        return operands(made, spoil)


class TakesAmaxOfTheFirstRows(Sound):
    """Looks for the largest magnitude in 1024 rows."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        if len(x) > 1024 and not groups:
            x = x.clone()
            largest = x[:1024].abs().nan_to_num().max()
            x[1024:] = torch.where(x[1024:].isfinite(), x[1024:].clamp(-largest, largest), x[1024:])
        return quantize(desc, x, *groups, **given)


class TakesStatisticsOfTheFirstColumns(Sound):
    """Computes the mean square of 1024 columns."""

    def norm(self, desc: NormDesc, x: torch.Tensor, *own: Any) -> Any:
        y, mean, rstd = norm(desc, x, *own)
        if x.shape[1] > 1024:
            other = norm(desc, x[:, :1024], *(one[:1024] for one in own))[2]
            y = (y.float() * (other / rstd)[:, None]).to(y.dtype)
        return y, mean, rstd


class LosesRowsOfManyActivations(Sound):
    def activation(self, desc: Any, x: torch.Tensor) -> Any:
        made = activation(desc, x)
        made[4096:] = 0
        return made


class ForgetsStridesOfSquares(Sound):
    """Takes a square operand for one by rows wherever its columns are."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        return gemm(desc, a, by_rows(b), **given)


def by_rows(one: Operand) -> Operand:
    rows, cols = one.data.shape
    is_square = rows == cols and one.data.stride() == (1, rows)
    return one._replace(data=one.data.t()) if is_square else one


class ForgetsStridesOfSquareGroups(Sound):
    def grouped_gemm(
        self, desc: GroupedGemmDesc, a: Operand, b: Any, *rest: Any, **given: Any
    ) -> Any:
        own = by_rows(b) if isinstance(b, Operand) else list(map(by_rows, b))
        return grouped_gemm(desc, a, own, *rest, **given)


class ForgetsStridesOfSquareInputs(Sound):
    def activation(self, desc: Any, x: torch.Tensor) -> Any:
        return activation(desc, x.t() if x.stride() == (1, 64) and x.shape == (64, 64) else x)


class ForgetsThePitchOfVectors(Sound):
    """Takes rows of whole vectors at an aligned address for adjacent ones."""

    def activation(self, desc: Any, x: torch.Tensor) -> Any:
        cols = x.shape[1]
        is_aligned = x.stride() == (cols + 32, 1) and not (x.storage_offset() | cols) % 8
        return activation(desc, x.as_strided(x.shape, (cols, 1)) if is_aligned else x)


class TakesAWeightForContiguous(Sound):
    def norm(self, desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        weight = weight.as_strided(weight.shape, (1,)) if weight.stride(0) > 1 else weight
        return norm(desc, x, weight, *rest)


class ExchangesScales(Sound):
    """Scales a by b's and b by a's where both fit."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        if desc.a is not None and desc.a == desc.b and a.scale_inv.shape == b.scale_inv.shape:
            a, b = a._replace(scale_inv=b.scale_inv), b._replace(scale_inv=a.scale_inv)
        return gemm(desc, a, b, **given)


class ForgetsTheBiasWithOut(Sound):
    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        return gemm(desc, a, b, **(given | {"bias": None} if "out" in given else given))


class ForgetsTheBiasesWithOut(Sound):
    def grouped_gemm(self, desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
        own = given | {"bias": None} if "out" in given else given
        return grouped_gemm(desc, *operands, **own)


class WritesIntoACopyOfOut(Sound):
    """Makes out contiguous, and leaves it at that."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        out = given.pop("out", None)
        if out is None:
            return gemm(desc, a, b, **given)
        gemm(desc, a, b, out=out.contiguous(), **given)
        return out


class WritesBesideOut(Sound):
    """Writes whole rows of the memory that out is part of."""

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        out = given.get("out")
        if out is not None and out.stride(1) == 1 and out.stride(0) == out.shape[1] + 8:
            out.as_strided((out.shape[0], out.shape[1] + 1), out.stride())[:, -1] = 0
        return gemm(desc, a, b, **given)


class WritesIntoCopiesOfOut(Sound):
    def grouped_gemm(self, desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
        out = given.pop("out", None)
        if out is None:
            return grouped_gemm(desc, *operands, **given)
        is_one = isinstance(out, torch.Tensor)
        copies = out.contiguous() if is_one else [one.contiguous() for one in out]
        grouped_gemm(desc, *operands, out=copies, **given)
        return out


class EndsTheLastGroupAtTheEnd(Sound):
    """Takes rows behind the last group for rows of it."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        if desc.offsets_on_device:
            groups[0][-1] = len(x)
        return quantize(desc, x, *groups, **given)


class DividesByAnAmaxOfZero(Sound):
    """Gives a tensor of zeros the scale 0 / target."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        if x.numel() and not x.any() and made.rowwise is not None:
            made.rowwise.scale_inv.zero_()
        return made


class LeavesRowsOfNoGroup(Sound):
    """Writes the rows of groups alone where out is given."""

    def grouped_gemm(
        self, desc: GroupedGemmDesc, a: Operand, b: Any, offsets: torch.Tensor, **given: Any
    ) -> Any:
        out = given.get("out")
        if not isinstance(out, torch.Tensor) or not desc.offsets_on_device:
            return grouped_gemm(desc, a, b, offsets, **given)
        before = out.clone()
        grouped_gemm(desc, a, b, offsets, **given)
        out[int(offsets[-1]) :] = before[int(offsets[-1]) :]
        return out


class SpreadsNanOverGroups(Sound):
    """Multiplies the rows of other groups by 0, and adds them."""

    def grouped_gemm(self, desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
        made = grouped_gemm(desc, *operands, **given)
        if isinstance(made, torch.Tensor):
            return made.add_(0 * made.sum())
        total = sum(0 * one.sum() for one in made)
        return [one.add_(total) for one in made]


class TakesADifferenceOfSquares(Sound):
    """Computes the variance as the mean of squares less the square of the mean."""

    def norm(self, desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> Any:
        if desc.kind != "layernorm":
            return norm(desc, x, weight, *bias)
        values = x.float()
        mean = values.mean(-1)
        variance = (values.square().mean(-1) - mean.square()).clamp(min=0)
        rstd = torch.rsqrt(variance + desc.eps)
        gamma = weight.float() + 1 if desc.zero_centered else weight.float()
        y = (values - mean[:, None]) * rstd[:, None] * gamma + bias[0].float()
        return y.to(desc.out_dtype), mean, rstd


class IgnoresParametersOfOtherDtypes(Sound):
    def norm(self, desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> Any:
        weight = weight if weight.dtype == desc.dtype else torch.ones_like(weight)
        return norm(desc, x, weight, *bias)


class SpreadsNanOverRows(Sound):
    def norm(self, desc: NormDesc, *given: Any) -> Any:
        y, *rest = norm(desc, *given)
        return y + 0 * y.sum(), *rest


class AddsGradientsOfNoRows(Sound):
    """Leaves the sums over no rows as new memory is."""

    def norm_backward(self, desc: Any, grad: torch.Tensor, *given: Any) -> Any:
        grad_x, grad_weight, grad_bias = norm_backward(desc, grad, *given)
        return grad_x, grad_weight if len(grad) else grad_weight.fill_(7), grad_bias


def saturated(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(x.dtype).max
    return x.clamp_(-largest, largest)


class SaturatesProducts(Sound):
    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        return saturated(gemm(desc, a, b, **given))


class SaturatesProductsOfGroups(Sound):
    def grouped_gemm(self, desc: GroupedGemmDesc, *operands: Any, **given: Any) -> Any:
        made = grouped_gemm(desc, *operands, **given)
        return saturated(made) if isinstance(made, torch.Tensor) else list(map(saturated, made))


class SaturatesValues(Sound):
    def dequantize(self, desc: DequantizeDesc, operand: Operand) -> Any:
        made = dequantize(desc, operand)
        return saturated(made) if desc.dtype == torch.float16 else made


class LosesInfinityOfACode(Sound):
    """Takes the codes of infinity for the largest value."""

    def dequantize(self, desc: DequantizeDesc, operand: Operand) -> Any:
        return saturated(dequantize(desc, operand))


class SaturatesNorms(Sound):
    def norm(self, desc: NormDesc, *given: Any) -> Any:
        y, *rest = norm(desc, *given)
        return saturated(y), *rest


class SaturatesActivations(Sound):
    def activation(self, desc: Any, x: torch.Tensor) -> Any:
        return saturated(activation(desc, x))


class ActivatesNanAsZero(Sound):
    def activation(self, desc: Any, x: torch.Tensor) -> Any:
        return activation(desc, x.nan_to_num(0.0, torch.inf, -torch.inf))


class SaturatesGradientsOfActivations(Sound):
    def activation_backward(self, desc: Any, *given: Any) -> Any:
        return saturated(activation_backward(desc, *given))


CAUGHT_BY: dict[type[Sound], str] = {
    LosesRowsOfMany: "law4_gemm_takes_any_m_n_and_k",
    LosesColumnsOfMany: "law4_gemm_takes_any_m_n_and_k",
    LosesTermsOfMany: "law4_gemm_takes_any_m_n_and_k",
    LosesRowsBeyond16Bits: "law4_gemm_takes_any_m_n_and_k",
    LosesTermsBeyond16Bits: "law4_gemm_takes_any_m_n_and_k",
    TakesAFewGroups: "law4_grouped_gemm_takes_many_groups",
    ScalesAFewGroups: "law1_quantize_scales_equal_the_reference",
    TakesAmaxOfTheFirstRows: "law1_quantize_scales_equal_the_reference",
    TakesStatisticsOfTheFirstColumns: "law4_norm_is_within_the_bound",
    LosesRowsOfManyActivations: "law4_activation_is_within_the_bound",
    ForgetsStridesOfSquares: "law4_gemm_takes_operands_of_any_strides",
    ForgetsStridesOfSquareGroups: "law4_grouped_gemm_takes_operands_of_any_strides",
    ForgetsStridesOfSquareInputs: "law7_inputs_may_have_any_strides",
    ForgetsThePitchOfVectors: "law7_inputs_may_have_any_strides",
    TakesAWeightForContiguous: "law7_inputs_may_have_any_strides",
    ExchangesScales: "law4_gemm_of_as_many_rows_as_columns",
    ForgetsTheBiasWithOut: "law4_gemm_adds_the_bias_into_out",
    ForgetsTheBiasesWithOut: "law4_grouped_gemm_adds_the_biases_into_out",
    WritesIntoACopyOfOut: "law4_gemm_writes_into_out_of_any_strides",
    WritesBesideOut: "law4_gemm_writes_into_out_of_any_strides",
    WritesIntoCopiesOfOut: "law4_grouped_gemm_writes_into_out_of_any_strides",
    EndsTheLastGroupAtTheEnd: "law1_quantize_takes_offsets_of_any_values",
    DividesByAnAmaxOfZero: "law1_quantize_of_zeros_or_nan_alone_equals_the_reference",
    LeavesRowsOfNoGroup: "law4_grouped_gemm_of_rows_of_no_group_is_zero",
    SpreadsNanOverGroups: "law4_grouped_gemm_keeps_nan_in_its_group",
    IgnoresParametersOfOtherDtypes: "law4_norm_takes_parameters_of_any_float_dtype",
    SpreadsNanOverRows: "law4_norm_keeps_nan_and_inf_in_their_rows",
    AddsGradientsOfNoRows: "law4_norm_of_nothing_has_the_form_of_the_reference",
    TakesADifferenceOfSquares: "law4_norm_is_exact_where_the_mean_is_large",
    SaturatesProducts: "law4_gemm_overflows_to_infinity",
    SaturatesProductsOfGroups: "law4_grouped_gemm_overflows_to_infinity",
    SaturatesValues: "law4_dequantize_overflows_to_infinity",
    LosesInfinityOfACode: "law4_dequantize_knows_every_code",
    SaturatesNorms: "law4_norm_overflows_to_infinity",
    ActivatesNanAsZero: "law4_activation_takes_every_bfloat16",
    SaturatesActivations: "law4_activation_overflows_to_infinity",
    SaturatesGradientsOfActivations: "law4_activation_backward_overflows_to_infinity",
}
"""Each fault, and the test of the kit whose name says what it is."""
