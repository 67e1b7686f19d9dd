"""What Ascend does not do is refused by name before anything reaches CANN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core_backends.ascend.attention_mask import Mask
from fp8core_backends.ascend.operators import (
    activations,
    arguments,
    casts,
    fused_attention,
    grouped_products,
    library,
    products,
)
from tests.backends.ascend.softcann.device import Call

BF16 = torch.bfloat16


def linear(chosen: recipe.Recipe, dtype: torch.dtype = BF16) -> None:
    layer = te.Linear(128, 128, params_dtype=dtype, device="npu")
    with te.autocast(recipe=chosen):
        layer(torch.ones(128, 128, dtype=dtype, device="npu"))


def mixed(role: recipe.QuantizerRole) -> OperandSpec:
    if role.tensor_type == "weight":
        return OperandSpec("e4m3", (0, 0), 448.0)
    return OperandSpec("hif8", (0, 0), 15.0)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (recipe.NVFP4BlockScaling(), "it has no NVFP4"),
        (recipe.Float8BlockScaling(), r"use Float8BlockScaling\(use_f32_scales=True\)"),
        (
            recipe.Float8BlockScaling(use_f32_scales=True),
            r"use Float8BlockScaling\(x_wgrad_block_scaling_dim=2\)",
        ),
        (recipe.Float8CurrentScaling(use_power_2_scales=True), "not rounded to powers of two"),
        (recipe.MXFP8BlockScaling(enable_2d_quantization=True), "leave enable_2d_quantization"),
        (recipe.MXFP8BlockScaling(fp8_format="hif8"), "HiFloat8 has one scale a tensor"),
        (recipe.Float8RowwiseScaling(fp8_format="hif8"), "HiFloat8 has one scale a tensor"),
        (recipe.CustomRecipe(qfactory=mixed), "HiFloat8 goes with HiFloat8 alone"),
    ],
    ids=["nvfp4", "block-pow2", "block-wgrad", "pow2", "mx-square", "mx-hif8", "row-hif8", "mixed"],
)
def test_recipe_is_refused_with_what_would_work(
    chosen: recipe.Recipe, reason: str, calls: list[Call]
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        linear(chosen)
    assert not [call for call in calls if "Quant" in call.name]


def test_older_soc_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "device_name", lambda device: "Ascend910B3")
    with pytest.raises(UnsupportedError, match=r"Ascend910B3 has no FP8 product.*'reference'"):
        linear(recipe.Float8CurrentScaling(fp8_format="e5m2"))  # a recipe that nobody resolved yet


def ones(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(sizes, dtype=dtype, device="npu")


def codes(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.uint8, device="npu")


ONE = (1,)
FLOAT = torch.float32


def matmul(
    *,
    x1: tuple[int, int] = (64, 128),
    x2: tuple[int, int] = (128, 32),
    scale1: tuple[int, ...] = ONE,
    scale2: tuple[int, ...] = ONE,
    scale_dtype: torch.dtype = FLOAT,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    dtype: torch.dtype = BF16,
    groups: arguments.Groups | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    scales = (ones(*scale1, dtype=scale_dtype), ones(*scale2, dtype=scale_dtype))
    products.quant_matmul(codes(*x1), codes(*x2), scales, formats, dtype, groups=groups, bias=bias)


def grouped(
    *,
    x1: torch.Tensor | None = None,
    x2: tuple[int, ...] = (2, 128, 32),
    scale1: tuple[int, ...] = (2,),
    scale2: tuple[int, ...] = (2,),
    ends: torch.dtype = torch.int64,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    dtype: torch.dtype = BF16,
    groups: arguments.Groups | None = None,
    has_terms: bool = False,
) -> None:
    grouped_products.grouped_quant_matmul(
        codes(64, 128) if x1 is None else x1,
        codes(*x2),
        (ones(*scale1, dtype=FLOAT), ones(*scale2, dtype=FLOAT)),
        torch.tensor([32, 64]).to("npu", ends),
        formats,
        dtype,
        groups=groups,
        has_terms=has_terms,
    )


def add_grouped(
    formats: tuple[str, str] = ("hif8", "hif8"), out: torch.Tensor | None = None
) -> None:
    grouped_products.add_quant_gmm_(
        ones(2, 64, 32, dtype=FLOAT) if out is None else out,
        codes(128, 64).t(),
        codes(128, 32),
        (ones(2, dtype=FLOAT), ones(2, dtype=FLOAT)),
        torch.tensor([32, 128]).npu(),
        formats,
    )


def attend(
    mode: int = 0,
    query_ends: list[int] | None = None,
    key_ends: list[int] | None = None,
    *,
    layout: str = "TND",
    dtype: torch.dtype = BF16,
) -> None:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if mode else None
    given = Mask(mode, mask, query_ends=query_ends, key_ends=key_ends)
    q = ones(8, 2, 32, dtype=dtype)
    fused_attention.fusion_attention(q, q, q, heads=2, layout=layout, scale=1.0, mask=given)


VIOLATIONS: dict[str, tuple[Callable[[], object], str]] = {
    "float32 input": (
        lambda: casts.dynamic_quant(ones(4, 8, dtype=FLOAT), "e4m3", 448.0, "pertensor"),
        "x is torch.float32",
    ),
    "three dimensions": (
        lambda: casts.dynamic_quant(ones(2, 4, 8), "e4m3", 448.0, "pertensor"),
        "has 3 dimensions",
    ),
    "empty input": (lambda: casts.mx_quant(ones(0, 64), "e4m3", -1), "is empty"),
    "transposed input": (lambda: casts.block_quant(ones(8, 4).t(), "e4m3", 1), "strides"),
    "unknown mode": (
        lambda: casts.dynamic_quant(ones(4, 8), "e4m3", 448.0, "perblock"),  # type: ignore[arg-type]
        "quant_mode 'perblock'",
    ),
    "target of e4m3": (
        lambda: casts.dynamic_quant(ones(4, 8), "e4m3", 240.0, "pertensor"),
        "target 240.0 of e4m3, expected 448",
    ),
    "target of hif8": (
        lambda: casts.dynamic_quant(ones(4, 8), "hif8", 16.0, "pertensor"),
        "target 16.0 of hif8",
    ),
    "mx in hif8": (lambda: casts.mx_quant(ones(4, 64), "hif8", -1), "format 'hif8'"),
    "mx in fp4": (lambda: casts.mx_quant_both(ones(4, 64), "e2m1"), "format 'e2m1'"),
    "blocks of 64 rows": (
        lambda: casts.block_quant(ones(64, 128), "e4m3", 64),  # type: ignore[arg-type]
        "blocks of 64 rows",
    ),
    "scale in bfloat16": (
        lambda: casts.quant_max(ones(4, 8), ones(1), "e4m3"),
        "scale is torch.bfloat16",
    ),
    "hif8 times e4m3": (lambda: matmul(formats=("hif8", "e4m3")), "hif8 goes with hif8 alone"),
    "int8 result": (lambda: matmul(dtype=torch.int8), "output_dtype torch.int8"),
    "k mismatch": (lambda: matmul(x2=(64, 32)), r"\[64, 128\] times \[64, 32\]"),
    "empty operand": (lambda: matmul(x1=(0, 128)), "an operand is empty"),
    "float16 scale": (lambda: matmul(scale_dtype=torch.float16), "scale of x1 is torch.float16"),
    "scale of wrong length": (lambda: matmul(scale1=(63,)), r"\[63\], expected float32 \[64\]"),
    "bfloat16 bias": (lambda: matmul(bias=ones(32)), "bias is torch.bfloat16"),
    "bias with blocks": (
        lambda: matmul(
            scale1=(64, 1), scale2=(1, 1), groups=arguments.BLOCK_GROUPS, bias=ones(32, dtype=FLOAT)
        ),
        "a bias does not go with blocks",
    ),
    "block scales the other way round": (
        lambda: matmul(
            x1=(64, 256), x2=(256, 32), scale1=(64, 2), scale2=(1, 2), groups=arguments.BLOCK_GROUPS
        ),
        "scale of x2",
    ),
    "mx scales as float32": (
        lambda: matmul(scale1=(64, 2, 2), scale2=(2, 32, 2), groups=arguments.MX_GROUPS),
        "exponents torch.float32",
    ),
    "adding e4m3 in place": (
        lambda: products.add_quant_matmul_(
            ones(64, 32, dtype=FLOAT),
            codes(128, 64).t(),
            codes(128, 32),
            (ones(1, dtype=FLOAT), ones(1, dtype=FLOAT)),
            ("e4m3", "e4m3"),
        ),
        "takes MX or tensorwise hif8",
    ),
    "adding to bfloat16": (
        lambda: products.add_quant_matmul_(
            ones(64, 32),
            codes(128, 64).t(),
            codes(128, 32),
            (ones(1, dtype=FLOAT), ones(1, dtype=FLOAT)),
            ("hif8", "hif8"),
        ),
        "out is torch.bfloat16",
    ),
    "adding a product of operands the wrong way round": (
        lambda: products.add_quant_matmul_(
            ones(64, 32, dtype=FLOAT),
            codes(64, 128),
            codes(128, 32),
            (ones(1, dtype=FLOAT), ones(1, dtype=FLOAT)),
            ("hif8", "hif8"),
        ),
        r"strides \(128, 1\) and \(32, 1\), expected x1 transposed, x2 not",
    ),
    "groups of rows with x1 transposed": (
        lambda: grouped(x1=codes(128, 64).t()),
        r"strides \(1, 64\) of x1, expected contiguous",
    ),
    "groups of rows with one weight": (
        lambda: grouped(x2=(1, 128, 32), scale2=(1,)),
        "1 weights, 2 groups",
    ),
    "groups of rows with a matrix": (lambda: grouped(x2=(128, 32)), r"times \[128, 32\]"),
    "groups of rows with scales of another length": (
        lambda: grouped(scale1=(3,)),
        r"scale of x1 is torch.float32 \[3\], expected float32 \[2\]",
    ),
    "groups of rows with ends in int32": (
        lambda: grouped(ends=torch.int32),
        "ends of groups torch.int32",
    ),
    "groups of rows of 128 x 128 blocks": (
        lambda: grouped(scale1=(1, 1), scale2=(2, 1, 1), groups=arguments.SQUARE_GROUPS),
        r"groups of \(128, 128, 128\)",
    ),
    "groups of rows of hif8 and e5m2": (
        lambda: grouped(formats=("hif8", "e5m2")),
        "hif8 goes with hif8 alone",
    ),
    "groups of rows in int8": (lambda: grouped(dtype=torch.int8), "output_dtype torch.int8"),
    "groups of terms with x1 contiguous": (
        lambda: grouped(x2=(128, 32), has_terms=True),
        "expected x1 transposed, x2 not",
    ),
    "groups of terms in blocks": (
        lambda: grouped(
            x1=codes(128, 64).t(), x2=(128, 32), groups=arguments.BLOCK_GROUPS, has_terms=True
        ),
        "along the terms",
    ),
    "adding groups of e4m3 in place": (
        lambda: add_grouped(("e4m3", "e4m3")),
        "takes MX or tensorwise hif8",
    ),
    "adding groups to bfloat16": (
        lambda: add_grouped(out=ones(2, 64, 32)),
        "out is torch.bfloat16",
    ),
    "adding groups to another size": (
        lambda: add_grouped(out=ones(2, 32, 64, dtype=FLOAT)),
        r"out is torch.float32 \[2, 32, 64\]",
    ),
    "packed sequences without their ends": (attend, "no ends of sequences in TND"),
    "packed sequences that leave tokens": (
        lambda: attend(0, [3, 7], [3, 8]),
        r"sequences end at \[3, 7\] of 8 tokens",
    ),
    "an empty packed sequence": (lambda: attend(0, [3, 3, 8], [3, 4, 8]), "sequences end at"),
    "packed sequences without keys": (
        lambda: attend(0, [3, 8], [8]),
        "other sequences of keys than queries",
    ),
    "queries that see no key": (
        lambda: attend(fused_attention.CAUSAL_BOTTOM_RIGHT, [5, 8], [3, 8]),
        "queries before the first key",
    ),
    "ends of sequences of a batch": (
        lambda: attend(0, [8], [8], layout="SBH"),
        "ends of sequences in SBH",
    ),
    "float32 attention": (lambda: attend(0, [8], [8], dtype=FLOAT), "expected bfloat16 or float16"),
    "empty swiglu": (lambda: activations.swiglu(ones(0, 8)), "is empty"),
    "strided swiglu": (lambda: activations.swiglu(ones(8, 4).t()), "strides"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violated_constraint_is_an_error_before_the_call(name: str, calls: list[Call]) -> None:
    violate, complaint = VIOLATIONS[name]
    with pytest.raises(OperandError, match=complaint):
        violate()
    reached = ("Quant", "Grouped", "Swi", "Attention")
    assert not [call for call in calls if any(word in call.name for word in reached)]
