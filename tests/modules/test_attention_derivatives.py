"""Dropout that repeats, recompute, derivatives of any order, and graphs of DotProductAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, UnsupportedError
from tests.modules.attention_calls import (
    HEADS,
    cu,
    equal,
    grads,
    layer,
    qkv,
)

# torch.func.jvp compiles decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def test_dropout_repeats_with_the_seed_and_rests_in_evaluation() -> None:
    q, k, v = qkv(40, 2, dtype=torch.float32)
    attend = layer(attention_dropout=0.5)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v))
    equal([outs[0]], [outs[1]])
    assert not torch.equal(outs[0], outs[2])
    equal([attend.eval()(q, k, v)], [layer()(q, k, v)])


def test_dropout_keeps_the_mean_and_the_gradient_is_that_of_what_was_kept() -> None:
    q, k, v = qkv(6, 2)
    attend = layer(attention_dropout=0.4, attn_mask_type="no_mask")
    torch.manual_seed(3)
    many = attend(*(part.detach().repeat(1, 600, 1, 1) for part in (q, k, v)))
    mean = many.unflatten(1, (600, 2)).mean(1)
    torch.testing.assert_close(mean, attend.eval()(q, k, v), atol=0.25, rtol=0)
    attend.train()

    def fixed(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attend(*inputs)

    assert torch.autograd.gradcheck(fixed, (q, k, v))


@pytest.mark.parametrize("way", ["argument", "reentrant", "not reentrant"])
def test_recompute_repeats_dropout(way: str) -> None:
    q, k, v = qkv(6, 2)
    attend = layer(attention_dropout=0.5)
    torch.manual_seed(1)
    want = attend(q, k, v)
    torch.manual_seed(1)
    if way == "argument":
        out = attend(q, k, v, checkpoint_core_attention=True)
    else:
        out = fp8core.checkpoint(attend, q, k, v, use_reentrant=way == "reentrant")
    torch.rand(7)
    weights = torch.randn_like(out)
    for x in (q, k, v):
        x.grad = None
    out.backward(weights)
    got = [x.grad for x in (q, k, v)]
    equal([out, *got], [want, *torch.autograd.grad(want, [q, k, v], weights)])


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bottom right": {"attn_mask_type": "causal_bottom_right"},
    "window": {"attn_mask_type": "no_mask", "window_size": (1, 2)},
    "softcap": {"softcap": 2.0},
    "sink": {"softmax_type": "learnable"},
    "off by one": {"softmax_type": "off-by-one", "attn_mask_type": "no_mask"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_of_any_order(name: str) -> None:
    torch.manual_seed(0)
    attend = DotProductAttention(2, 3, 1, **OPTIONS[name]).double()
    q, k, v = (
        torch.randn(length, 1, heads, 3, dtype=torch.float64, requires_grad=True)
        for length, heads in ((3, 2), (4, 1), (4, 1))
    )
    offset = () if attend.softmax_offset is None else (attend.softmax_offset,)
    assert torch.autograd.gradcheck(lambda *given: attend(*given[:3]), (q, k, v, *offset))
    assert torch.autograd.gradgradcheck(lambda *given: attend(*given[:3]), (q, k, v, *offset))


def test_second_derivatives_of_a_query_that_sees_nothing() -> None:
    q, k, v = qkv(3, 1)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    mask[:, :, 1] = True
    attend = layer(attn_mask_type="arbitrary")
    call: Callable[..., Any] = lambda *given: attend(*given, attention_mask=mask)  # noqa: E731  one expression
    assert torch.autograd.gradgradcheck(call, (q, k, v))


def test_lengths_may_differ_in_a_vmap() -> None:
    q, k, v = (x.detach() for x in qkv(5, 2))
    attend, lengths = layer(attn_mask_type="padding"), [cu([5, 2]), cu([1, 4])]

    def run(one: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = attend(q, k, v, cu_seqlens_q=one, cu_seqlens_kv=one)
        return y

    expected = torch.stack([run(one) for one in lengths])
    torch.testing.assert_close(torch.vmap(run)(torch.stack(lengths)), expected)


def test_transforms_of_torch_func() -> None:
    q, k, v = (x.detach() for x in qkv(5, 2))
    attend = layer()
    want = attend(q, k, v)
    tangents = [torch.randn_like(x) for x in (q, k, v)]
    _, derivative = torch.func.jvp(attend, (q, k, v), tuple(tangents))
    step = [x + 1e-6 * t for x, t in zip((q, k, v), tangents, strict=True)]
    torch.testing.assert_close(derivative, (attend(*step) - want) / 1e-6, atol=1e-4, rtol=1e-4)
    stacked = [torch.stack((x, 2 * x)) for x in (q, k, v)]
    torch.testing.assert_close(torch.func.vmap(attend)(*stacked)[0], want)
    grad = torch.func.grad(lambda x: attend(x, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(attend(leaf, k, v).sum(), leaf)[0])


def test_transform_is_refused_where_it_cannot_be_right() -> None:
    for option in [{"attention_dropout": 0.1}, {"return_max_logit": True}]:
        q, k, v = (x.detach() for x in qkv(5, 2))
        with pytest.raises(UnsupportedError, match=r"vmap is not offered with"):
            torch.func.vmap(layer(**option))(*[x[None] for x in (q, k, v)])


LENGTHS = {"cu_seqlens_q": cu([3, 2]), "cu_seqlens_kv": cu([3, 2])}


COMPILED: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "causal": ({}, (5, 2), {}),
    "batch first": ({"qkv_format": "bshd", "window_size": (2, 0)}, (2, 5), {}),
    "padding": ({"attn_mask_type": "padding_causal"}, (5, 2), LENGTHS),
    "padding mask": (
        {"attn_mask_type": "padding"},
        (5, 2),
        {"attention_mask": (torch.arange(5) >= torch.tensor([[3], [5]]))[:, None, None]},
    ),
    "thd": ({"qkv_format": "thd", "attn_mask_type": "padding"}, (5,), LENGTHS),
    "thd with lengths": (
        {"qkv_format": "thd", "attn_mask_type": "padding"},
        (5,),
        {**LENGTHS, "max_seqlen_q": 3, "max_seqlen_kv": 3},
    ),
    "bias": (
        {"attn_mask_type": "no_mask"},
        (5, 2),
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.randn(1, HEADS, 5, 5, requires_grad=True),
        },
    ),
    "alibi": ({}, (5, 2), {"core_attention_bias_type": "alibi"}),
    "arbitrary": (
        {"attn_mask_type": "arbitrary"},
        (5, 2),
        {"attention_mask": torch.rand(2, 1, 5, 5) < 0.4},
    ),
    "sink": ({"softmax_type": "learnable"}, (5, 2), {}),
    "dropout": ({"attention_dropout": 0.4}, (5, 2), {}),
    "recompute": ({}, (5, 2), {"checkpoint_core_attention": True}),
    "ignored mask": ({}, (5, 2), {"attention_mask": torch.ones(1, dtype=torch.bool)}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layer_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    options, tokens, call = COMPILED[name]
    q, k, v = qkv(*tokens, dtype=torch.float32)
    attend = layer(**options)
    leaves = [q, k, v, *attend.parameters()]
    leaves += [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for run in (attend, compiled):
        torch.manual_seed(2)
        out = run(q, k, v, **call)
        results.append([out, *grads(out, *leaves)])
    equal(*results)


# torch 2.11 looks at the output of a checkpoint as it goes on behind the break of the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_recompute_with_dropout_is_left_out_of_the_graph() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(5, 2, dtype=torch.float32)
    attend = layer(attention_dropout=0.4)
    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager")):
        torch.manual_seed(2)
        out = run(q, k, v, checkpoint_core_attention=True)
        results.append([out, *grads(out, q, k, v)])
    equal(*results)


def test_layers_of_one_shape_share_a_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    q, k, v = qkv(5, 2, dtype=torch.float32)
    model = torch.nn.ModuleDict({name: layer() for name in ("a", "b", "c")})
    fp8core.prepare(model)
    run = torch.compile(lambda m, *given: m(*given), fullgraph=True, backend=counter)
    for one in model.values():
        run(one, q, k, v)
    assert counter.frame_count == 1
