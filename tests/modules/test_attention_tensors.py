"""Attention and rotary embedding of tensors that are not plain: DTensors, and those that torch's
tracer records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import fp8core as te
from fp8core import OperandError, UnsupportedError
from tests.device import DEVICE

HEADS, SIZE = 4, 8
Scatter = Callable[..., DTensor]


@pytest.fixture
def scatter(group_of_one: None) -> Scatter:
    """Make a DTensor on a mesh of one rank."""
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (1,))
    return lambda x, placement=None: DTensor.from_local(x, mesh, [placement or Replicate()])


def heads() -> torch.Tensor:
    return torch.randn(6, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(1))


def mask() -> torch.Tensor:
    return torch.zeros(1, 1, 6, 6, dtype=torch.bool)


def test_a_dtensor_among_queries_keys_and_values_is_named(scatter: Scatter) -> None:
    for which in ["query_layer", "key_layer", "value_layer"]:
        given: dict[str, Any] = dict.fromkeys(("query_layer", "key_layer", "value_layer"), heads())
        given[which] = scatter(heads(), Shard(2))
        with pytest.raises(
            OperandError, match=rf"{which} \[6, 2, 4, 8\] is a DTensor.*to_local\(\)"
        ):
            te.DotProductAttention(HEADS, SIZE)(**given)


def test_other_tensors_of_a_call_are_named(scatter: Scatter) -> None:
    q = heads()
    bias = {"core_attention_bias_type": "post_scale_bias"}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("attention_mask", {"attn_mask_type": "arbitrary"}, {"attention_mask": scatter(mask())}),
        ("core_attention_bias", {}, {"core_attention_bias": scatter(mask().float()), **bias}),
        (
            "alibi_slopes",
            {},
            {"alibi_slopes": scatter(torch.ones(4)), "core_attention_bias_type": "alibi"},
        ),
    ]
    for name, options, given in cases:
        with pytest.raises(OperandError, match=f"{name} .*is a DTensor"):
            te.DotProductAttention(HEADS, SIZE, **options)(q, q, q, **given)


def test_rotary_names_its_dtensors(scatter: Scatter) -> None:
    q, freqs = heads(), te.RotaryPositionEmbedding(SIZE)(6)
    for t, angles, name in ((scatter(q), freqs, "t"), (q, scatter(freqs), "freqs")):
        with pytest.raises(OperandError, match=f"{name} .*is a DTensor"):
            te.apply_rotary_pos_emb(t, angles)


def test_a_dtensor_for_a_layer_of_plain_parameters_is_named(scatter: Scatter) -> None:
    for make in [te.TransformerLayer, te.MultiheadAttention, te.Linear]:
        sizes = {
            te.TransformerLayer: (32, 64, 4),
            te.MultiheadAttention: (32, 4),
            te.Linear: (32, 32),
        }
        layer = make(*sizes[make]).eval()
        with pytest.raises(OperandError, match="is a DTensor"):
            layer(scatter(torch.randn(6, 2, 32)))


def test_the_local_part_is_taken(scatter: Scatter) -> None:
    layer, q = te.DotProductAttention(HEADS, SIZE), heads()
    local = scatter(q, Shard(2)).to_local()
    assert torch.equal(layer(local, local, local), layer(q, q, q))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_call_computes_the_same(mode: str) -> None:
    q, lengths = heads(), torch.tensor([0, 6, 10], dtype=torch.int32)
    freqs = te.RotaryPositionEmbedding(SIZE)(6)
    padded = torch.arange(6) >= torch.tensor([[6], [4]])
    causal, padding = (
        te.DotProductAttention(HEADS, SIZE, attn_mask_type=name) for name in ("causal", "padding")
    )
    calls: list[tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
        (lambda x: causal(x, x, x), (q,)),
        (lambda x, ends: padding(x, x, x, cu_seqlens_q=ends, cu_seqlens_kv=ends), (q, lengths)),
        (lambda x, hidden: padding(x, x, x, hidden), (q, padded[:, None, None])),
        (lambda x, angles: te.apply_rotary_pos_emb(x, angles), (q, freqs)),
    ]
    for call, given in calls:
        traced = make_fx(call, tracing_mode=mode)(*given)
        assert any("aten" in str(node.target) for node in traced.graph.nodes)
        other = (given[0].flip(0), *given[1:])
        torch.testing.assert_close(traced(*other), call(*other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [None, "current", "block", "mxfp8"])
def test_a_traced_layer_has_its_gradients(name: str | None) -> None:
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    chosen = None if name is None else te.recipe.by_name(name)

    def grad(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with te.autocast(enabled=name is not None, recipe=chosen):
            y = layer(x)
        (found,) = torch.autograd.grad(y.square().sum(), x)
        return found

    grad(torch.randn(32, 2, 32))  # what the layers remember of a call is not traced
    traced = make_fx(grad)(torch.randn(32, 2, 32))
    other = torch.randn(32, 2, 32)
    torch.testing.assert_close(traced(other), grad(other))


def test_delayed_scales_are_refused_where_torch_traces() -> None:
    layer = te.Linear(32, 32)
    with (
        te.autocast(recipe=te.recipe.DelayedScaling()),
        pytest.raises(UnsupportedError, match="delayed scaling is not offered"),
    ):
        make_fx(lambda x: layer(x))(torch.randn(32, 32))
