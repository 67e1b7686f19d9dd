"""Backends that compute as the reference does, but for one fault each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import (
    ActivationBackwardDesc,
    AddNormDesc,
    FusedDesc,
    GemmDesc,
    NormBackwardDesc,
    OpDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.conformance.calls import OpCall
from fp8core.conformance.laws.fused import add_pair, pair
from fp8core_backends.reference.backend import ReferenceBackend
from fp8core_backends.reference.gemm import gemm
from fp8core_backends.reference.layers import column_sums, norm_backward
from fp8core_backends.reference.quantize import quantize

Run = Callable[..., Any]
CAUGHT_BY: dict[type[Sound], str] = {}
"""Each fault, and the test of the kit whose name says what it is."""


class Sound(ReferenceBackend):
    """The reference, and every fusion made of its pair: what the others would be without faults."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if type(desc) is FusedDesc:
            if desc.quantize.chunked:
                return "no fusion in chunks"
            cast = replace(desc.quantize, sums=False, split=False)
            return self.unsupported(desc.producer, device) or self.unsupported(cast, device)
        if type(desc) is AddNormDesc:
            return self.unsupported(desc.norm, device)
        return super().unsupported(desc, device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        if not isinstance(desc, FusedDesc | AddNormDesc):
            return super().bind(desc, device)
        make = pair if isinstance(desc, FusedDesc) else add_pair
        return lambda *arguments, **keywords: make(self.part, OpCall(desc, arguments, keywords))

    def part(self, desc: OpDesc, *arguments: Any, **keywords: Any) -> Any:
        return self.bind(desc, torch.device("cpu"))(*arguments, **keywords)


def caught_by(law: str) -> Callable[[type[Sound]], type[Sound]]:
    """Name the test of the kit that catches a fault."""

    def note(broken: type[Sound]) -> type[Sound]:
        CAUGHT_BY[broken] = law
        return broken

    return note


def fault(op: str, law: str) -> Callable[[Run], Run]:
    """Have a backend compute ``op`` with the function, and name the test that catches it."""

    def note(run: Run) -> Run:
        members = {op: staticmethod(run), "__module__": run.__module__, "__doc__": run.__doc__}
        CAUGHT_BY[type(run.__name__, (Sound,), members)] = law
        return run

    return note


class Chunked:
    """A rowwise operand in chunks of 128 rows; columnwise codes come with their chunk."""

    def __init__(self, spec: OperandSpec, made: Quantized) -> None:
        self.rows = made.rowwise.data.shape[0]
        self._spec, self._row, self._column = spec, made.rowwise, made.columnwise
        self._codes = made.columnwise.data.clone()
        made.columnwise.data.fill_(0x55)

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
        for start in range(0, self.rows, 128):
            end = min(start + 128, self.rows)
            self._column.data[:, start:end] = self._codes[:, start:end]
            scales, block = self._row.scale_inv, self._spec.block[0]
            if block:
                scales = scales[start // block : -(-end // block)]
            yield start, end, Operand(self._row.data[start:end], scales)


def is_dense_cast(desc: OpDesc) -> bool:
    """Whether it is a cast in both orientations to codes with float32 scales, not in groups."""
    if type(desc) is not QuantizeDesc or None in (desc.rowwise, desc.columnwise):
        return False
    return not desc.grouped and desc.rowwise.scale_format == "float32"


class GivesChunks(Sound):
    """Sound, and offers what is optional of a cast with float32 scales too."""

    chunks = Chunked

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, dtype=torch.float32)

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if not is_dense_cast(desc):
            return super().unsupported(desc, device)
        return super().unsupported(replace(desc, sums=False, chunked=False), device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        if not is_dense_cast(desc):
            return super().bind(desc, device)
        run = super().bind(replace(desc, sums=False, chunked=False), device)

        def whole(x: torch.Tensor, **given: Any) -> Any:
            made = run(x, **given)
            if desc.chunked and len(x) >= 256:
                made = made._replace(rowwise=self.chunks(desc.rowwise, made))
            return (made, self.sums(x)) if desc.sums else made

        return whole


@caught_by("law3_quantize_and_sum_equals_the_call_and_sums")
class SumsWithoutTheLastRow(GivesChunks):
    """Its sums beside a cast stop before the last row, which is no whole tile."""

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return super().sums(x[:-1])


@caught_by("law3_quantize_chunked_equals_the_whole")
class LeavesOutTheLastChunk(GivesChunks):
    class chunks(Chunked):
        def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
            yield from list(super().__iter__())[:-1]


class FusedChunks:
    """The gradient of an activation, computed and cast 128 rows at a time as it is read."""

    def __init__(self, run: Run, made: Quantized, sums: torch.Tensor, tensors: Any, given: Any):
        self._run, self._column, self._sums = run, made.columnwise, sums
        self._tensors, self._given = tensors, given
        self.rows = len(tensors[1])

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
        grad, x = self._tensors
        for start in range(0, self.rows, 128):
            end = min(start + 128, self.rows)
            part = grad[start:end] if isinstance(grad, torch.Tensor) else grad.rows_of(start, end)
            (row, column), *sums = self._run(part, x[start:end], **self._given)
            self._column.data[:, start:end] = column.data
            if self._column.scale_inv.shape[1] == 1:
                self._column.scale_inv.copy_(column.scale_inv)
            else:
                self._column.scale_inv[:, start // 128 : start // 128 + 1] = column.scale_inv
            for total in sums:
                self._sums += total
            yield start, end, row


class GivesFusedChunks(GivesChunks):
    """Sound, and computes the gradient of an activation in chunks where each has its scales."""

    fused_chunks = FusedChunks

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if type(desc) is not FusedDesc or not desc.quantize.chunked:
            return super().unsupported(desc, device)
        cast = replace(desc.quantize, chunked=False)
        if type(desc.producer) is not ActivationBackwardDesc or not is_dense_cast(cast):
            return "no chunks"
        is_whole = cast.rowwise.block == (0, 0) and cast.rowwise.delayed
        if cast.rowwise != cast.columnwise or not (is_whole or cast.rowwise.block == (1, 128)):
            return "no chunks"
        return super().unsupported(replace(desc, quantize=cast), device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        if type(desc) is not FusedDesc or not desc.quantize.chunked:
            return super().bind(desc, device)
        summed = replace(desc.quantize, chunked=False)
        run = super().bind(replace(desc, quantize=summed), device)
        cast = replace(summed, sums=False)

        def run_chunked(grad_output: Any, x: torch.Tensor, **given: Any) -> Any:
            rows, cols = x.shape
            if rows < 256:
                if not isinstance(grad_output, torch.Tensor):
                    grad_output = grad_output.rows_of(0, rows)
                return run(grad_output, x, **given)
            empty = torch.zeros(rows, cols, dtype=cast.dtype, device=x.device)
            scale = {name: value for name, value in given.items() if name == "scale"}
            made = self.part(cast, empty, **scale)
            made.columnwise.data.fill_(0x55)
            sums = torch.zeros(cols, device=x.device)
            tensors = grad_output, x
            chunks = made._replace(rowwise=self.fused_chunks(run, made, sums, tensors, given))
            return (chunks, sums) if summed.sums else (chunks,)

        return run_chunked


@caught_by("law6_fused_chunks_equal_the_call")
class LeavesOutTheLastFusedChunk(GivesFusedChunks):
    class fused_chunks(FusedChunks):
        def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
            yield from list(super().__iter__())[:-1]


@caught_by("law6_fused_halves_equal_two_casts")
class SwapsHalves(Sound):
    """Hands the cast of the second half over as that of the first."""

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)
        if type(desc) is not FusedDesc or not desc.quantize.split:
            return run

        def swapped(*arguments: Any, **keywords: Any) -> Any:
            halves, *rest = run(*arguments, **keywords)
            return halves[::-1], *rest

        return swapped


@caught_by("law7_kernels_are_named_by_texts")
class NumbersItsKernels(GivesChunks):
    """Its casts name the kernels that they do not run by numbers."""

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)
        if is_dense_cast(desc):
            run.other_kernels = (1, 2)  # type: ignore[attr-defined]
        return run


@caught_by("law4_a_prepared_update_equals_the_calls")
class UpdatesOnce(Sound):
    """An update that is prepared does nothing from the second step on."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        plain = replace(desc, prepared=False) if isinstance(desc, ScaleUpdateDesc) else desc
        return super().unsupported(plain, device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)

        def prepare(*states: Any) -> Callable[[], None]:
            steps = iter([states])

            def update() -> None:
                for tensors in steps:
                    run(*tensors)

            return update

        return prepare if isinstance(desc, ScaleUpdateDesc) and desc.prepared else run


def operands(made: Quantized, change: Callable[[Operand], Operand]) -> Quantized:
    return Quantized(*(None if one is None else change(one) for one in made))


@fault("quantize", "law1_quantize_scales_equal_the_reference")
def wrong_scale(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    made = quantize(desc, x, *groups, **given)
    return operands(made, lambda one: one._replace(scale_inv=one.scale_inv * 2))


@fault("quantize", "law3_quantize_padded_equals_the_cast_of_padded_rows")
def pads_the_rowwise_operand(desc: QuantizeDesc, x: torch.Tensor, *rest: Any, **given: Any) -> Any:
    if not (desc.padded and x.shape[0] % desc.padded) or rest:
        return quantize(desc, x, *rest, **given)
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % desc.padded))
    return quantize(replace(desc, padded=0), whole, **given)


@fault("gemm", "law4_gemm_adds_the_bias")
def dropped_bias(desc: GemmDesc, a: Operand, b: Operand, *, bias: Any = None, **out: Any) -> Any:
    return gemm(desc, a, b, **out)


@fault("quantize", "law3_quantize_columnwise_is_the_operand_of_the_transpose")
def swapped_orientation(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Hands out the columnwise operand as the rowwise one: shapes show it unless x is square."""
    made = quantize(desc, x, *groups, **given)
    both = made.rowwise is not None and made.columnwise is not None
    swap = both and x.shape[0] == x.shape[1] and not groups
    return Quantized(made.columnwise, made.rowwise) if swap else made


@caught_by("law4_gemm_parts_have_the_bits_of_the_whole")
class EnlargesParts(Sound):
    """Parts of its products are larger than the same rows of the whole."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        has_parts = type(desc) is GemmDesc and not desc.accumulate
        return super().unsupported(replace(desc, part=False) if has_parts else desc, device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)

        def gemm_part(
            rows: int, a: Operand, b: Operand, *, bias: Any = None, out: torch.Tensor
        ) -> torch.Tensor:
            return out.copy_(run(a, b, bias=bias) * 1.01)

        return gemm_part if isinstance(desc, GemmDesc) and desc.part else run


@caught_by("law4_a_norm_adds_gradients_as_the_pair")
class AddsGradientsOfAResidualTwice(Sound):
    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        plain = replace(desc, added=False) if isinstance(desc, NormBackwardDesc) else desc
        return super().unsupported(plain, device)

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)

        def run_added(*arguments: Any, added: Any) -> Any:
            grad_x, *rest = run(*arguments)
            return grad_x + 2 * added, *rest

        return run_added if isinstance(desc, NormBackwardDesc) and desc.added else run


@fault("quantize", "law5_inputs_are_not_written")
def writes_an_input(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Turns -0 into +0 where it lies."""
    return quantize(desc, x.masked_fill_(x == 0, 0.0), *groups, **given)


def scaled(spec: OperandSpec, x: torch.Tensor, operand: Operand) -> torch.Tensor | None:
    """The values that the codes of a tensorwise operand were rounded from."""
    is_tensorwise = spec.scale_format == "float32" and spec.block == (0, 0)
    return x.float() * (1 / operand.scale_inv) if is_tensorwise else None


class Rewritten(Sound):
    """Changes the codes of tensorwise operands; ``rewrite`` sees codes and unrounded values."""

    def rewrite(
        self, element: formats.FormatSpec, codes: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        kept = []
        for spec, own, one in ((desc.rowwise, x, made[0]), (desc.columnwise, x.t(), made[1])):
            values = None if one is None or groups else scaled(spec, own, one)
            if values is not None:
                element = formats.by_name(spec.format)
                one = one._replace(data=self.rewrite(element, one.data, values))
            kept.append(one)
        return Quantized(*kept)


@caught_by("law1_quantize_rounds_to_the_nearest_ties_to_even")
class Truncates(Rewritten):
    """Rounds towards zero; one code down is one value nearer to it."""

    def rewrite(
        self, element: formats.FormatSpec, codes: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        is_away = element.decode(codes).abs() > values.abs()
        return torch.where(is_away, codes - 1, codes)


@caught_by("law1_quantize_saturates_beyond_the_range")
class SaturatesToNan(Rewritten):
    """Makes NaN of what is beyond the range, as a cast without saturation does."""

    def rewrite(
        self, element: formats.FormatSpec, codes: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return codes.masked_fill(values.abs() > element.max, 0x7F)


@fault("quantize", "law1_quantize_keeps_nan_in_its_place")
def loses_nan(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    return quantize(desc, torch.where(x.isnan(), 0.0, x), *groups, **given)


@fault("quantize", "law1_quantize_stops_blocks_at_group_boundaries")
def ignores_group_boundaries(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Takes one amax over all groups, and hands it out for each."""
    made = quantize(desc, x, *groups, **given)
    specs = (desc.rowwise, desc.columnwise)
    if not groups or any(spec is not None and spec.block != (0, 0) for spec in specs):
        return made
    dense = quantize(replace(desc, grouped=False), x, **{k: v[:1] for k, v in given.items()})
    return Quantized(
        *(
            None if own is None else Operand(whole.data, whole.scale_inv.expand_as(own[1]))
            for own, whole in zip(made, dense, strict=True)
        )
    )


@fault("quantize", "law1_quantize_counts_nan_and_inf")
def counts_nothing(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    return quantize(desc, x, *groups, **{**given, "nonfinite_out": None})


@fault("quantize", "law1_quantize_counts_nan_and_inf")
def counts_instead_of_casting(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Casts zeros for what it counts."""
    made = quantize(desc, x, *groups, **given)
    if given.get("nonfinite_out") is None:
        return made
    return quantize(desc, x.nan_to_num(0.0, 0.0, 0.0), *groups, **given | {"amax_out": None})


@fault("quantize", "law1_quantize_counts_nan_and_inf")
def counts_each_orientation(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Counts where it makes an operand, so twice where it makes two."""
    if None not in (desc.rowwise, desc.columnwise) and not groups:
        quantize(replace(desc, columnwise=None), x, **{**given, "amax_out": None})
    return quantize(desc, x, *groups, **given)


@fault("quantize", "law1_quantize_counts_nan_and_inf")
def sets_the_count(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Forgets what was counted before."""
    if given.get("nonfinite_out") is not None:
        given["nonfinite_out"].zero_()
    return quantize(desc, x, *groups, **given)


@fault("quantize", "law1_quantize_counts_nan_and_inf_of_groups")
def counts_behind_the_last_group(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    count = given.pop("nonfinite_out", None)
    if count is not None:
        count += (~x.isfinite()).sum()
    return quantize(desc, x, *groups, **given)


@fault("gemm", "law4_gemm_accumulates_into_out")
def drops_accumulation(desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
    return gemm(replace(desc, accumulate=False), a, b, **given)


@fault("norm_backward", "law7_no_result_depends_on_uninitialised_memory")
def reads_uninitialised_memory(desc: Any, grad: torch.Tensor, *saved: Any) -> Any:
    """Adds the gradient of the weight to a buffer that nobody has cleared."""
    grad_x, grad_weight, grad_bias = norm_backward(desc, grad, *saved)
    total = torch.empty_like(grad_weight)
    return grad_x, total + grad_weight, grad_bias


@fault("column_sums", "law4_column_sums_are_within_the_bound")
def rounds_sums(desc: Any, x: torch.Tensor) -> Any:
    """Rounds the gradient of a bias to the dtype of the activations."""
    return column_sums(desc, x).to(torch.bfloat16).float()


@fault("column_sums", "law4_column_sums_pass_on_nan_and_inf")
def loses_nan_in_sums(desc: Any, x: torch.Tensor) -> Any:
    """Leaves out what is not finite, so that a step that should be skipped is taken."""
    return column_sums(desc, x.nan_to_num(0.0, 0.0, 0.0))


@caught_by("law7_unknown_descriptors_are_denied")
class ClaimsEverything(Sound):
    """Supports whatever it is asked about, so what it has never heard of, too."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        return None


@fault("grouped_gemm", "law7_what_is_declared_runs")
def refuses_when_run(desc: Any, *arguments: Any, **given: Any) -> Any:
    """Says that it supports grouped products, and gives up when one comes."""
    raise NotImplementedError("groups are not implemented")


@caught_by("law6_fused_equals_its_unfused_pair")
class FusedRoundsTwice(Sound):
    """Rounds what the norm makes to the activations' dtype before the cast, whatever the plan."""

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        if not isinstance(desc, FusedDesc) or desc.op != "norm_quantize":
            return super().bind(desc, device)

        def rounded(part: OpDesc, x: torch.Tensor, *rest: Any, **given: Any) -> Any:
            if part == desc.quantize:
                x = x.to(torch.bfloat16).to(x.dtype)
            return self.part(part, x, *rest, **given)

        def run(*arguments: Any, **keywords: Any) -> Any:
            return pair(rounded, OpCall(desc, arguments, keywords))

        return run
