"""Attention called like the last time runs as it did then; any other call as without a past."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.errors import Fp8CoreError
from fp8core.modules import attention
from tests.device import DEVICE

torch.set_num_threads(1)
HEADS, SIZE, LENGTH = 2, 16, 8


def make(**options: Any) -> fp8core.DotProductAttention:
    options = {"attn_mask_type": "causal", "qkv_format": "bshd", "attention_dropout": 0.0} | options
    return fp8core.DotProductAttention(HEADS, SIZE, **options)


def inputs(seed: int = 0, length: int = LENGTH, batch: int = LENGTH) -> list[torch.Tensor]:
    """Return queries, keys and values; as many sequences as tokens, so that layouts may differ.

    They are in 16 bits, as a GPU's attention takes no others.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, HEADS, SIZE)
    drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
    return [one.bfloat16().requires_grad_() for one in drawn]


def remember(layer: Any) -> None:
    """Call ``layer``, which then remembers how: an error would be nothing to compare with."""
    out = layer(*inputs())
    assert layer._bindings.repeat is not None
    out.sum().backward()


def results(layer: Any, given: list[torch.Tensor], **arguments: Any) -> list[Any]:
    """Return the output and the gradients, or the error."""
    try:
        out = layer(*given, **arguments)
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            return [out]
        wanted = [one for one in given if one.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out) / 3)]
    except Fp8CoreError as error:
        return [type(error), str(error)]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
        else:
            assert one == other


@pytest.mark.parametrize("name", [None, "fp8_dpa"])
def test_a_call_like_the_last_one_is_not_checked_again(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = None if name is None else recipe.Float8CurrentScaling(fp8_dpa=True)
    layer, fresh = make(), make()
    with fp8core.autocast(enabled=name is not None, recipe=chosen):
        remember(layer)
        expected = results(fresh, inputs(1))
        with monkeypatch.context() as patch:
            patch.setattr(attention, "checked_qkv", None)
            assert_same(results(layer, inputs(1)), expected)
    assert_same(results(layer, inputs(1)), results(make(), inputs(1)))


def packed() -> list[torch.Tensor]:
    whole = torch.randn(LENGTH, LENGTH, 3 * HEADS, SIZE).bfloat16()
    return [part.detach().requires_grad_() for part in whole.split(HEADS, dim=2)]


def test_other_tensors_are_looked_at() -> None:
    for given in [
        lambda: inputs(1, length=4),
        lambda: inputs(1, batch=2),
        packed,
        lambda: [one.detach() for one in inputs(1)],
        lambda: [one.detach().double().requires_grad_() for one in inputs(1)],
        lambda: [one.detach().half().requires_grad_() for one in inputs(1)],
        lambda: [inputs(1)[0], *[one.detach() for one in inputs(1)[1:]]],
        lambda: [one.detach()[..., :8].requires_grad_() for one in inputs(1)],
        lambda: [inputs(1)[0]] * 3,
    ]:
        layer, tensors = make(), given()
        remember(layer)
        assert_same(results(layer, tensors), results(make(), tensors))
        assert_same(results(layer, inputs()), results(make(), inputs()))


BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)).bfloat16()
MASK = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6)) > 0.5


def test_other_arguments_are_looked_at() -> None:
    for arguments in [
        {"qkv_format": "sbhd"},
        {"qkv_format": "thd"},
        {"attn_mask_type": "no_mask"},
        {"attn_mask_type": "no mask"},
        {"window_size": (2, 0)},
        {"softcap": 0.5},
        {"bottom_right_diagonal": True},
        {"checkpoint_core_attention": True},
        {"core_attention_bias_type": "alibi"},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
        {"core_attention_bias": BIAS},
        {"attn_mask_type": "arbitrary", "attention_mask": MASK},
        {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)},
        {"fp8_output": True},
        {"num_splits": 2},
        {"score_mod": print},
        {"qkv_layer": torch.ones(LENGTH, LENGTH, 3, HEADS, SIZE).bfloat16()},
    ]:
        layer = make()
        remember(layer)
        for _ in range(2):
            assert_same(
                results(layer, inputs(1), **arguments), results(make(), inputs(1), **arguments)
            )
        assert_same(results(layer, inputs(1)), results(make(), inputs(1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_mask_type", "no_mask"),
        ("softmax_scale", 1.0),
        ("softcap", 0.5),
        ("window_size", (1, 0)),
        ("qkv_format", "sbhd"),
        ("return_max_logit", True),
    ],
)
def test_an_attribute_that_was_changed_counts(name: str, value: object) -> None:
    layer, other = make(), make()
    remember(layer)
    setattr(layer, name, value)
    setattr(other, name, value)
    ours, theirs = results(layer, inputs(1)), results(other, inputs(1))
    if name == "return_max_logit":
        ours, theirs = list(ours[0]), list(theirs[0])
    assert_same(ours, theirs)


def test_calls_with_more_than_queries_keys_and_values_are_not_remembered() -> None:
    for option in ["softmax_type", "attention_dropout", "return_max_logit"]:
        value: Any = {"softmax_type": "learnable", "attention_dropout": 0.5}.get(option, True)
        layer = make(**{option: value})
        for _ in range(2):
            layer(*inputs())
        assert layer._bindings.repeat is None, option


def test_modes_and_contexts_are_looked_at() -> None:
    layer = make()
    remember(layer)
    with torch.no_grad():
        assert_same(results(layer, inputs(1)), results(make(), inputs(1)))
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        assert_same(results(layer, inputs(1)), results(make(), inputs(1)))
    chosen = recipe.Float8CurrentScaling(fp8_dpa=True)
    with fp8core.autocast(recipe=chosen):
        assert_same(results(layer, inputs(1)), results(make(), inputs(1)))
    again = copy.deepcopy(layer)
    assert again._bindings.repeat is None
    assert_same(results(again, inputs(1)), results(make(), inputs(1)))
