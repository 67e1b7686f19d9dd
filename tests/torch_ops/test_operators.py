"""``torch.ops.fp8core``: each operator is what torch expects, and says the same as its backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core import backend_api, errors
from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    AdamDesc,
    AddNormDesc,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    BackendSpec,
    ColumnSumsDesc,
    CombineBackwardDesc,
    CombineDesc,
    CrossEntropyBackwardDesc,
    CrossEntropyDesc,
    DequantizeDesc,
    DispatchDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    OperandSpec,
    PackedRotaryDesc,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    RotaryDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    ScaleUpdateDesc,
    bind_method,
    variant_of,
)
from fp8core.backend_api.record import RECORDS
from fp8core.conformance import laws, subject
from fp8core.dispatch import plugins, table
from fp8core.torch_ops.encoding import Operation, decode, encode
from fp8core.torch_ops.operators import OPERATORS, call_of
from tests.backend_api.test_descriptors import EXAMPLES
from tests.pairs import turns

CPU = torch.device("cpu")
BF16 = torch.bfloat16
OPS = torch.ops.fp8core
CURRENT = OperandSpec("e4m3", (0, 0), 448.0)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
BLOCK = OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
SQUARE = OperandSpec("e4m3", (128, 128), 448.0)
MX = OperandSpec("e4m3", (1, 32), 448.0, "e8m0")
FP4 = OperandSpec("e2m1", (1, 16), 6.0, "e4m3")
STOCHASTIC = OperandSpec("e2m1", (1, 16), 6.0, "e4m3", stochastic=True)
HADAMARD = OperandSpec("e2m1", (1, 16), 6.0, "e4m3", transform="hadamard16")
NORM = NormDesc("layernorm", BF16, BF16, 1e-5)
RMS = NormDesc("rmsnorm", BF16, torch.float32, 1e-5, True)
SWIGLU = ActivationDesc("swiglu", BF16, BF16)
BACKWARD = ActivationBackwardDesc("swiglu", BF16, BF16)
NORM_BACKWARD = NormBackwardDesc(NORM)
RMS_BACKWARD = NormBackwardDesc(RMS)
ROTARY = RotaryDesc(BF16, "sbhd")


class Fusing:
    """A backend with every fusion, made of the reference's pairs; hands out transposed copies."""

    def __init__(self) -> None:
        registry = plugins.load()
        self._reference: Any = registry.instance(registry.backends["reference"])

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        variant = variant_of(desc)
        return None if variant in ("counted", "added", "split") else variant

    def alignment(self, desc: GemmDesc) -> Any:
        return self._reference.alignment(desc)

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        return bind_method(self, desc)

    def quantize(self, desc: QuantizeDesc, *arguments: Any, **keywords: Any) -> Quantized:
        made = self._reference.quantize(desc, *arguments, **keywords)
        if made.columnwise is None:
            return made
        copied = (None if part is None else part.contiguous() for part in made.columnwise)
        return Quantized(made.rowwise, Operand(*copied))

    def fused(self, desc: FusedDesc, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        made = getattr(self._reference, desc.producer.op)(desc.producer, *arguments)
        first, *rest = made if isinstance(made, tuple) else (made,)
        sums = [first.float().sum(0)] if desc.quantize.sums else []
        cast = replace(desc.quantize, sums=False, split=False)
        if not desc.quantize.split:
            return (self.quantize(cast, first, **keywords), *rest, *sums)
        halves = [
            self.quantize(cast, half, **{name: pair[at] for name, pair in keywords.items()})
            for at, half in enumerate(first.chunk(2, dim=1))
        ]
        return (self.beside(halves) if self.is_beside else tuple(halves), *rest, *sums)

    is_beside = False

    def beside(self, halves: list[Quantized]) -> tuple[Quantized, ...]:
        """The same with the codes of both in one memory, as a kernel writes them."""
        self.written: list[torch.Tensor] = []
        sides: list[list[Operand | None]] = []
        for name, dim in (("rowwise", 1), ("columnwise", 0)):
            operands = [getattr(half, name) for half in halves]
            if operands[0] is None:
                sides.append([None, None])
                continue
            self.written.append(torch.cat([each.data for each in operands], dim))
            codes = self.written[-1].chunk(2, dim)
            pairs = zip(operands, codes, strict=True)
            sides.append([each._replace(data=data) for each, data in pairs])
        return tuple(Quantized(*pair) for pair in zip(*sides, strict=True))

    def norm_backward(self, desc: NormBackwardDesc, *arguments: Any, added: Any = None) -> Any:
        plain = replace(desc, added=False)
        grad_x, *rest = self._reference.norm_backward(plain, *arguments)
        return grad_x + added if desc.added else grad_x, *rest

    norm_quantize = activation_quantize = activation_backward_quantize = fused
    norm_backward_quantize = fused

    def add_norm(self, desc: AddNormDesc, x: Any, residual: Any, *parameters: Any) -> Any:
        total = x + residual
        return (total, *self._reference.norm(desc.norm, total, *parameters))


@pytest.fixture
def fusing() -> Iterator[str]:
    registry = plugins.load()
    registry.backends["fusing"] = BackendSpec(
        "fusing", ("cpu",), "", transposes=True, api_version=backend_api.API_VERSION
    )
    registry._instances["fusing"] = Fusing()
    yield "fusing"
    plugins.reload()


def text(desc: OpDesc, backend: str = "reference", transposes: bool = False) -> str:
    return encode(Operation(backend, desc, transposes))


def quantized(spec: OperandSpec | None, x: torch.Tensor) -> list[torch.Tensor]:
    if spec is None:
        return [x]
    made = table.resolve(QuantizeDesc(x.dtype, spec, None), CPU).run(x)
    return [part for part in made.rowwise if part is not None]


def rand(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def quantize_case(
    rowwise: OperandSpec | None, columnwise: OperandSpec | None, offsets: list[int] | None = None
) -> tuple[Any, ...]:
    spec = rowwise or columnwise
    assert spec is not None
    desc = QuantizeDesc(BF16, rowwise, columnwise, grouped=offsets is not None)
    groups = 1 if offsets is None else len(offsets) - 1
    return (
        OPS.quantize,
        text(desc),
        rand(64, 48 if spec.block[1] != 32 else 64),
        None if offsets is None else torch.tensor(offsets),
        torch.rand(groups) + 1 if spec.delayed else None,
        torch.zeros(groups) if spec.delayed else None,
        torch.tensor([3, 4]) if spec.stochastic else None,
    )


def amax_case(
    rowwise: OperandSpec, columnwise: OperandSpec, offsets: list[int] | None = None
) -> tuple[Any, ...]:
    cast = QuantizeDesc(BF16, rowwise, columnwise, grouped=offsets is not None)
    groups = None if offsets is None else torch.tensor(offsets)
    return OPS.amax, text(AmaxDesc(cast)), rand(64, 48), groups


def by_amax_case(
    rowwise: OperandSpec, columnwise: OperandSpec, offsets: list[int] | None = None
) -> tuple[Any, ...]:
    operator, found, x, groups = amax_case(rowwise, columnwise, offsets)
    desc = QuantizeByAmaxDesc(BF16, rowwise, columnwise, grouped=offsets is not None)
    amax = operator(found, x, groups)
    return OPS.quantize, text(desc), x, groups, None, None, None, None, amax


def gemm_case(spec: OperandSpec | None, **more: Any) -> tuple[Any, ...]:
    a, b = quantized(spec, rand(8, 64)), quantized(spec, rand(16, 64))
    return text(GemmDesc(spec, spec, BF16, **more)), a, b


def grouped_case(contract: bool, **more: Any) -> tuple[Any, ...]:
    desc = GroupedGemmDesc(CURRENT, CURRENT, BF16, contract_groups=contract, **more)
    offsets = torch.tensor([0, 5, 5, 12])
    spec = QuantizeDesc(BF16, *((None, CURRENT) if contract else (CURRENT, None)), grouped=True)
    run = call_of(Operation("reference", spec))
    flat: list[list[torch.Tensor]] = []
    for columns in (8, 16):
        made = run(rand(12, columns), offsets)
        operand = made.columnwise if contract else made.rowwise
        flat.append([part for part in operand if part is not None])
    weights = [part for _ in range(3) for part in quantized(CURRENT, rand(16, 8))]
    return text(desc), flat[0], flat[1] if contract else weights, offsets


ATTENTION = AttentionDesc(
    BF16, "bshd", 4, 2, 8, 16, 0.3, bias="post_scale", softmax="learnable", max_logit=True
)
ATTENTION_BACKWARD = AttentionBackwardDesc(ATTENTION, bias_grad=True)
PACKED_ATTENTION = AttentionDesc(BF16, "thd", 4, 2, 8, 16, 0.3, (3, 2), padding=True)


def case(desc: OpDesc) -> tuple[Any, ...]:
    """The operator of an operation, and its arguments for the kit's call."""
    call = laws.arguments(subject.find("reference"), desc)
    flat = OPERATORS[desc.op].flat(call.arguments, call.keywords)
    return getattr(OPS, desc.op), text(desc), *flat


ROUTER = RouterDesc(BF16, 3, "sigmoid", scaling_factor=2.5)

CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "quantize_current": lambda: quantize_case(CURRENT, CURRENT),
    "quantize_block": lambda: quantize_case(BLOCK, BLOCK),
    "quantize_mx": lambda: quantize_case(MX, MX),
    "quantize_columnwise": lambda: quantize_case(None, MX),
    "quantize_fp4": lambda: quantize_case(FP4, HADAMARD),
    "quantize_stochastic": lambda: quantize_case(STOCHASTIC, None),
    "quantize_delayed": lambda: quantize_case(DELAYED, DELAYED),
    "quantize_grouped": lambda: quantize_case(BLOCK, BLOCK, [0, 10, 10, 64]),
    "quantize_grouped_square": lambda: quantize_case(SQUARE, SQUARE, [0, 10, 64]),
    "quantize_grouped_delayed": lambda: quantize_case(DELAYED, DELAYED, [0, 64]),
    "dequantize": lambda: (
        OPS.dequantize,
        text(DequantizeDesc(FP4, BF16)),
        quantized(FP4, rand(8, 32)),
    ),
    "quantize_by_amax": lambda: by_amax_case(ROWWISE, ROWWISE),
    "quantize_by_amax_fp4": lambda: by_amax_case(FP4, HADAMARD),
    "quantize_by_amax_grouped": lambda: by_amax_case(ROWWISE, CURRENT, [0, 10, 10, 64]),
    "amax": lambda: amax_case(CURRENT, CURRENT),
    "amax_rowwise": lambda: amax_case(ROWWISE, ROWWISE),
    "amax_fp4": lambda: amax_case(FP4, HADAMARD),
    "amax_grouped": lambda: amax_case(ROWWISE, ROWWISE, [0, 10, 10, 64]),
    "gemm": lambda: (OPS.gemm, *gemm_case(MX), rand(16)),
    "gemm_high_precision": lambda: (OPS.gemm, *gemm_case(None), None),
    "gemm_out": lambda: (OPS.gemm_out, *gemm_case(FP4, accumulate=True), None, rand(8, 16)),
    "grouped_gemm": lambda: (OPS.grouped_gemm, *grouped_case(False), [rand(16)] * 3),
    "grouped_gemm_contracting": lambda: (OPS.grouped_gemm, *grouped_case(True), []),
    "grouped_gemm_out": lambda: (
        OPS.grouped_gemm_out,
        *grouped_case(True, accumulate=True),
        [],
        [rand(8, 16) for _ in range(3)],
    ),
    "scale_update": lambda: (
        OPS.scale_update,
        text(ScaleUpdateDesc("max")),
        [torch.rand(3, 2), torch.rand(3, 4)],
        [torch.ones(2), torch.ones(4)],
        [torch.ones(2), torch.ones(4)],
        [torch.zeros(1, dtype=torch.int64) for _ in range(2)],
    ),
    "norm": lambda: (OPS.norm, text(NORM), rand(4, 8), rand(8), rand(8)),
    "norm_rms": lambda: (OPS.norm, text(RMS), rand(4, 8), rand(8), None),
    "norm_backward": lambda: (
        OPS.norm_backward,
        text(NormBackwardDesc(NORM)),
        rand(4, 8),
        rand(4, 8),
        rand(8),
        torch.rand(4),
        torch.rand(4),
    ),
    "activation": lambda: (OPS.activation, text(SWIGLU), rand(4, 8)),
    "activation_backward": lambda: (
        OPS.activation_backward,
        text(ActivationBackwardDesc("swiglu", BF16, torch.float32)),
        rand(4, 4),
        rand(4, 8),
    ),
    "column_sums": lambda: (OPS.column_sums, text(ColumnSumsDesc(BF16)), rand(8, 4)),
    "rotary": lambda: (
        OPS.rotary,
        text(ROTARY),
        rand(4, 2, 3, 8),
        torch.rand(5, 1, 1, 6),
        None,
        None,
    ),
    "rotary_of_sequences": lambda: (
        OPS.rotary,
        text(RotaryDesc(BF16, "thd", inverse=True)),
        rand(4, 3, 8),
        torch.rand(9, 1, 1, 6),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([0, 1, 4], dtype=torch.int32),
    ),
    "rotary_of_all_heads": lambda: (
        OPS.rotary,
        text(PackedRotaryDesc(BF16, "sbhd")),
        rand(4, 2, 3, 8),
        torch.rand(5, 1, 1, 6),
        None,
        None,
        rand(4, 2, 1, 8),
        rand(4, 2, 1, 8),
    ),
    "attention": lambda: case(ATTENTION),
    "attention_thd": lambda: case(PACKED_ATTENTION),
    "attention_backward": lambda: case(ATTENTION_BACKWARD),
    "attention_backward_thd": lambda: case(AttentionBackwardDesc(PACKED_ATTENTION)),
    "route": lambda: case(RouteDesc(torch.int32, "mask")),
    "route_of_experts": lambda: case(RouteDesc(torch.int64, "experts")),
    "dispatch_rows": lambda: case(DispatchDesc(BF16)),
    "combine_rows": lambda: case(CombineDesc(BF16)),
    "combine_rows_backward": lambda: case(CombineBackwardDesc(BF16)),
    "router": lambda: case(ROUTER),
    "router_of_all": lambda: case(RouterDesc(BF16, 3, "softmax", of_all=True)),
    "router_backward": lambda: case(RouterBackwardDesc(BF16, 3, "sigmoid")),
    "cross_entropy": lambda: case(CrossEntropyDesc(BF16)),
    "cross_entropy_backward": lambda: case(CrossEntropyBackwardDesc(BF16)),
    "adam": lambda: case(AdamDesc(BF16, BF16, master="remainder")),
    "drop": lambda: (OPS.drop, rand(8, 4), torch.tensor([3, 4]), 1, 0.5),
    "draw_seed": lambda: (OPS.draw_seed, 0),
    "angles": lambda: (OPS.angles, torch.rand(1, 5, 6, dtype=BF16), rand(1, 5, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_passes_opcheck(name: str) -> None:
    operator, *arguments = CASES[name]()
    # A seed is drawn anew by every call, so the traced result cannot equal the direct one.
    tests = ["test_schema", "test_faketensor"] if name == "draw_seed" else None
    more = {} if tests is None else {"test_utils": tests}
    torch.library.opcheck(operator.default, tuple(arguments), **more)


def test_every_operation_has_an_operator() -> None:
    assert {*backend_api.OPS, *backend_api.OPTIONAL_OPS} == OPERATORS.keys()


def test_schemas_are_those_of_saved_programs() -> None:
    """A program holds calls of operators: another schema, and it loads no more."""
    names = {record.name for record in RECORDS.values()}
    names |= {"angles", "drop", "draw_seed", "refuse", "gemm_out", "grouped_gemm_out"}
    schemas = [f"{getattr(OPS, name).default._schema}\n" for name in sorted(names)]
    assert Path(__file__).with_name("schemas.txt").read_text(encoding="utf-8") == "".join(schemas)


def test_an_unknown_keyword_is_refused() -> None:
    call = call_of(Operation("reference", NORM))
    with pytest.raises(TypeError, match="norm takes no biases"):
        call(rand(4, 8), rand(8), biases=rand(8))


@pytest.mark.parametrize("desc", EXAMPLES, ids=str)
def test_operation_is_read_back_equal(desc: OpDesc) -> None:
    operation = Operation("reference", desc, True)
    assert decode(encode(operation)) == operation


@pytest.mark.parametrize("sums", [False, True])
def test_a_fusion_of_a_text_before_version_6_has_its_sums(sums: bool) -> None:
    desc = FusedDesc(BACKWARD, QuantizeDesc(BF16, CURRENT, CURRENT, sums=sums))
    backend, fields, transposes = json.loads(encode(Operation("reference", desc)))
    older = fields["FusedDesc"]
    del older["quantize"]["QuantizeDesc"]["chunked"]
    older["sums"] = older["quantize"]["QuantizeDesc"].pop("sums")
    assert decode(json.dumps([backend, fields, transposes])).desc == desc


@pytest.mark.parametrize("text", ["", "[]", "__import__('os')", '["x",{"System":{}},false]'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(errors.RecipeError, match="is no operation"):
        decode(text)


def test_backend_that_is_not_installed_is_named() -> None:
    with pytest.raises(errors.RecipeError, match="a compiled graph asks for backend 'absent'"):
        OPS.activation(text(SWIGLU, "absent"), rand(2, 2))


@pytest.mark.parametrize(
    ("producer", "sums"),
    turns([NORM, RMS, SWIGLU, BACKWARD, RMS_BACKWARD, NORM_BACKWARD], [False, True]),
)
def test_fused_operation_and_its_operator_agree(fusing: str, producer: Any, sums: bool) -> None:
    desc = FusedDesc(producer, QuantizeDesc(BF16, DELAYED, DELAYED, sums=sums))
    statistics = [torch.rand(4), torch.rand(4)]
    parameters = {
        NORM: [rand(8), rand(8)],
        RMS: [rand(8)],
        NORM_BACKWARD: [rand(8), *statistics],
        RMS_BACKWARD: [rand(8), None, statistics[0]],
    }.get(producer, [])
    grads = {BACKWARD: [rand(4, 4)], NORM_BACKWARD: [rand(4, 8)], RMS_BACKWARD: [rand(4, 8)]}
    arguments = [*grads.get(producer, []), rand(4, 8), *parameters]
    scale, amax = torch.ones(1), torch.zeros(1)
    operator = (text(desc, fusing, True), arguments, scale, amax, None)
    torch.library.opcheck(OPS.fused.default, operator)
    want = Fusing().fused(desc, *arguments, scale=scale, amax_out=amax)
    recorded = torch.zeros(1)
    got = call_of(Operation(fusing, desc, True))(*arguments, scale=scale, amax_out=recorded)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(recorded, amax)


HALVES = [
    *((DELAYED, DELAYED), (CURRENT, CURRENT), (BLOCK, BLOCK), (SQUARE, SQUARE), (CURRENT, None)),
    *((None, DELAYED), (FP4, FP4), (CURRENT, BLOCK)),
]


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("transposes", [True, False])
@pytest.mark.parametrize(("rowwise", "columnwise"), HALVES, ids=str)
def test_halves_that_are_cast_apart_and_their_operator_agree(
    rowwise: OperandSpec | None,
    columnwise: OperandSpec | None,
    transposes: bool,
    is_beside: bool,
    fusing: str,
) -> None:
    backend = plugins.load().instance(plugins.load().backends[fusing])
    backend.is_beside = is_beside
    cast = QuantizeDesc(BF16, rowwise, columnwise, split=True, sums=is_beside)
    desc = FusedDesc(BACKWARD, cast)
    arguments = [rand(64, 96), rand(64, 192)]
    scales, amaxes = [torch.full((1,), n) for n in (2.0, 3.0)], [torch.zeros(1) for _ in range(2)]
    is_delayed = DELAYED in (rowwise, columnwise)
    slots = (scales, amaxes) if is_delayed else ([None, None], [None, None])
    (scale, second_scale), (amax, second_amax) = slots
    operator = (
        *(text(desc, fusing, transposes), arguments, scale, amax, None, None),
        *(second_scale, second_amax),
    )
    torch.library.opcheck(OPS.fused.default, operator)
    keywords: dict[str, Any] = {"scale": scales, "amax_out": amaxes} if is_delayed else {}
    want = backend.fused(desc, *arguments, **keywords)
    recorded = [torch.zeros(1) for _ in range(2)]
    if is_delayed:
        keywords["amax_out"] = recorded
    got = call_of(Operation(fusing, desc, transposes))(*arguments, **keywords)
    assert [type(half) for half in got[0]] == [Quantized, Quantized]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert recorded == amaxes


def test_codes_that_lie_side_by_side_are_not_copied(fusing: str) -> None:
    backend = plugins.load().instance(plugins.load().backends[fusing])
    backend.is_beside = True
    desc = FusedDesc(BACKWARD, QuantizeDesc(BF16, CURRENT, CURRENT, split=True))
    codes = OPS.fused(text(desc, fusing, True), [rand(64, 96), rand(64, 192)], None, None, None)
    rows, columns = backend.written
    assert codes[0].data_ptr() == rows.data_ptr()
    assert codes[2].data_ptr() == columns.data_ptr()
    first, second = call_of(Operation(fusing, desc, True))(rand(64, 96), rand(64, 192))[0]
    assert first.rowwise.data._base is second.rowwise.data._base is not None


@pytest.mark.parametrize("norm", [NORM, RMS])
def test_a_gradient_that_is_added_and_its_operator_agree(fusing: str, norm: NormDesc) -> None:
    desc = NormBackwardDesc(norm, added=True)
    mean = torch.rand(4) if norm is NORM else None
    arguments, added = [rand(4, 8), rand(4, 8), rand(8), mean, torch.rand(4)], rand(4, 8)
    torch.library.opcheck(OPS.norm_backward.default, (text(desc, fusing), *arguments, added))
    want = Fusing().norm_backward(desc, *arguments, added=added)
    got = call_of(Operation(fusing, desc))(*arguments, added=added)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [NORM, RMS])
def test_add_norm_and_its_operator_agree(fusing: str, norm: NormDesc) -> None:
    desc = AddNormDesc(norm)
    arguments = [rand(4, 8), rand(4, 8), rand(8)]
    torch.library.opcheck(OPS.add_norm.default, (text(desc, fusing), *arguments, None))
    want = Fusing().add_norm(desc, *arguments)
    got = call_of(Operation(fusing, desc))(*arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("spec", [CURRENT, BLOCK, MX, FP4])
def test_layout_of_a_backend_that_transposes(fusing: str, spec: OperandSpec) -> None:
    desc = QuantizeDesc(BF16, spec, spec)
    arguments = (text(desc, fusing, True), rand(64, 64), None, None, None, None)
    torch.library.opcheck(OPS.quantize.default, arguments)
    assert all(part.is_contiguous() for part in OPS.quantize(*arguments))
