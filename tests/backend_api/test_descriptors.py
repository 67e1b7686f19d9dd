"""Descriptors print what they are: two that differ never print alike."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from typing import Any

import pytest
import torch

from fp8core import formats
from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    AdamDesc,
    AddNormDesc,
    AmaxDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    AttentionPartBackwardDesc,
    CachedAttentionDesc,
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
    OperandSpec,
    PackedRotaryDesc,
    PagedAttentionDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    RouteDesc,
    RouterBackwardDesc,
    RouterDesc,
    ScaleUpdateDesc,
    SingleQueryDesc,
)
from fp8core.conformance.catalogue import catalogue
from fp8core.errors import RecipeError

BF16, F16 = torch.bfloat16, torch.float16
SPEC = OperandSpec("e4m3", (0, 0), 448.0)
BYTES = OperandSpec("e4m3", (1, 16), 448.0, scale_format="e4m3")
FOUR_OVER_SIX = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", four_over_six="MSE")
NORM = NormDesc("rmsnorm", BF16, BF16, 1e-5)
CAST = QuantizeDesc(BF16, SPEC, BYTES)
OF_ATTENTION = (BF16, "sbhd", 8, 2, 64, 128, 0.125)
ATTENTION = AttentionDesc(*OF_ATTENTION)
EXAMPLES: tuple[Any, ...] = (
    SPEC,
    BYTES,
    CAST,
    DequantizeDesc(SPEC),
    GemmDesc(SPEC, BYTES, BF16),
    GroupedGemmDesc(SPEC, BYTES, BF16),
    AmaxDesc(CAST),
    QuantizeByAmaxDesc.of(CAST),
    ScaleUpdateDesc("max"),
    NORM,
    NormBackwardDesc(NORM),
    ActivationDesc("clamped_swiglu", BF16, BF16, (7.0, 1.702, 1.0)),
    ActivationBackwardDesc("clamped_swiglu", BF16, BF16, (7.0, 1.702, 1.0)),
    ColumnSumsDesc(BF16),
    RotaryDesc(BF16, "sbhd"),
    PackedRotaryDesc(BF16, "sbhd"),
    FusedDesc(NORM, CAST),
    AddNormDesc(NORM),
    ATTENTION,
    AttentionBackwardDesc(ATTENTION),
    AttentionPartBackwardDesc(ATTENTION),
    CachedAttentionDesc(*OF_ATTENTION),
    PagedAttentionDesc(*OF_ATTENTION, kv=SPEC),
    SingleQueryDesc(*OF_ATTENTION),
    RouteDesc(torch.int32, "mask"),
    DispatchDesc(BF16),
    CombineDesc(BF16),
    CombineBackwardDesc(BF16),
    RouterDesc(BF16, 2, "softmax"),
    RouterBackwardDesc(BF16, 2, "softmax"),
    CrossEntropyDesc(BF16),
    CrossEntropyBackwardDesc(BF16),
    AdamDesc(BF16, BF16),
)
OTHERS: dict[str, Any] = {
    "format": "e5m2",
    "padded": 32,
    "block": (1, 128),
    "target": 15.0,
    "scale_format": "e8m0",
    "amax_epsilon": 1e-6,
    "transform": "hadamard16",
    "four_over_six": "MAE",
    "scale_max": 256.0,
    "algorithm": "most_recent",
    "layout": "thd",
    "kind": "layernorm",
    "eps": 1.1e-5,
    "name": "swiglu",
    "params": (7.0, 1.702, 0.5),
    "heads": 16,
    "groups": 8,
    "head_dim": 32,
    "head_dim_v": 64,
    "scale": 0.125001,
    "window": (-1, 0),
    "bias": "alibi",
    "softcap": 50.0,
    "softmax": "learnable",
    "dropout": 0.1,
    "qkv": SPEC,
    "s": SPEC,
    "out": SPEC,
    "grad_output": SPEC,
    "dp": SPEC,
    "topk": 3,
    "score_function": "sigmoid",
    "num_groups": 4,
    "group_topk": 2,
    "scaling_factor": 2.5,
    "label_smoothing": 0.1,
    "ignore_index": -1,
    "state_dtype": BF16,
    "master": "float32",
    "producer": ActivationDesc("gelu", BF16, BF16),
}


def other(value: Any, name: str) -> list[Any]:
    """Return values that a field may have instead: of one that is a dataclass, each of its own."""
    if name in OTHERS:
        return [OTHERS[name]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, torch.dtype):
        return [F16]
    assert dataclasses.is_dataclass(value), name
    nested = [dataclasses.replace(value, **{name: one}) for name, one in legal_changes(value)]
    is_optional = isinstance(value, OperandSpec)
    return [*nested, None] if is_optional else nested


def legal_changes(value: Any) -> list[tuple[str, Any]]:
    """Return each field of a dataclass with what it may have instead; of a spec, what is legal."""
    found = []
    for field in dataclasses.fields(value):
        for changed in other(getattr(value, field.name), field.name):
            with contextlib.suppress(RecipeError):
                dataclasses.replace(value, **{field.name: changed})
                found.append((field.name, changed))
    return found


def test_every_field_of_a_spec_is_changed() -> None:
    changed = {name for spec in (SPEC, BYTES, FOUR_OVER_SIX) for name, _ in legal_changes(spec)}
    assert changed == {field.name for field in dataclasses.fields(OperandSpec)}


@pytest.mark.parametrize(
    "desc", EXAMPLES, ids=[f"{type(desc).__name__}-{at}" for at, desc in enumerate(EXAMPLES)]
)
def test_another_value_of_a_field_prints_another_text(desc: Any) -> None:
    alike = []
    for name, value in legal_changes(desc):
        if value is None and isinstance(desc, DequantizeDesc):
            continue
        changed = dataclasses.replace(desc, **{name: value})
        assert changed != desc
        if str(changed) == str(desc):
            alike.append((name, value))
    assert alike == []


def test_every_descriptor_is_among_the_examples() -> None:
    assert {type(example) for example in EXAMPLES} == {
        OperandSpec,
        AttentionPartBackwardDesc,
        CachedAttentionDesc,
        GroupedGemmDesc,
        PackedRotaryDesc,
        PagedAttentionDesc,
        SingleQueryDesc,
        *typing.get_args(OpDesc),
    }


def test_no_two_descriptors_of_the_catalogue_print_alike() -> None:
    texts = [str(entry.desc) for entry in catalogue()]
    assert len(set(texts)) == len(texts)


def test_the_largest_value_is_no_target_to_mention() -> None:
    for name in ("e4m3", "e5m2", "e2m1"):
        spec = OperandSpec(name, (1, 0), formats.by_name(name).max)
        assert str(spec) == f"{name} block=(1,0)"


def test_texts_stay_readable() -> None:
    spec = dataclasses.replace(SPEC, target=15.0, cast_first=False, amax_epsilon=0.5)
    assert str(spec) == "e4m3 block=(0,0) target=15.0 amax_epsilon=0.5 cast_first=False"
    desc = GroupedGemmDesc(SPEC, None, BF16, contract_groups=True, fast_accumulation=True)
    assert str(desc) == (
        "GroupedGemmDesc(a=e4m3 block=(0,0), b=None, out=bfloat16, fast_accumulation, "
        "contract_groups)"
    )
    assert str(NORM) == "NormDesc(rmsnorm bfloat16 -> bfloat16, eps=1e-05)"
    assert str(ActivationDesc("gelu", BF16, F16)) == "ActivationDesc(gelu bfloat16 -> float16)"
