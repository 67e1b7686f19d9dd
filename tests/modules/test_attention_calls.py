"""How DotProductAttention is called: layouts, lengths, recompute, graphs, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, OperandError, UnsupportedError
from fp8core.modules.bound import new_seed
from fp8core.reporting import _logged

# torch.func.jvp compiles decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

HEADS, GROUPS, SIZE = 4, 2, 8
Q_LENGTHS, KV_LENGTHS = [5, 0, 3], [2, 6, 4]


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(*tokens: int, dtype: torch.dtype = torch.float64, groups: int = GROUPS) -> Any:
    torch.manual_seed(0)
    sizes = ((HEADS, SIZE), (groups, SIZE), (groups, SIZE))
    return [torch.randn(*tokens, *size, dtype=dtype, requires_grad=True) for size in sizes]


def layer(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, SIZE, options.pop("num_gqa_groups", GROUPS), **options)


def grads(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True))


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_is_that_of_torch(is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 33, dtype=dtype)
    attend = layer(qkv_format="bshd", attn_mask_type="causal" if is_causal else "no_mask")
    heads_first = [x.double().transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=is_causal, enable_gqa=True
    )
    out = attend(q, k, v)
    rtol = 8 * torch.finfo(dtype).eps  # of the roundings of 33 weights and of the result
    torch.testing.assert_close(out.double(), want.transpose(1, 2).flatten(2), rtol=rtol, atol=rtol)
    wanted = torch.autograd.grad(want.sum(), [q, k, v])
    for got, expected in zip(torch.autograd.grad(out.sum(), [q, k, v]), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=4 * rtol, atol=4 * rtol)


@pytest.mark.parametrize("dim", [-3, -2])
def test_packed_projection_equals_its_parts(dim: int) -> None:
    packed = torch.randn(5, 2, *((3, HEADS) if dim == -3 else (HEADS, 3)), SIZE, requires_grad=True)
    attend = layer(num_gqa_groups=HEADS)
    out = attend(qkv_layer=packed, qkv_interleave_dim=dim)
    want = attend(*[x.contiguous() for x in packed.unbind(dim)])
    equal([out, *grads(out, packed)], [want, *grads(want, packed)])


@pytest.mark.parametrize("dim", [-3, -2])
def test_packed_keys_and_values_equal_their_parts(dim: int) -> None:
    q, k, v = qkv(5, 2)
    kv = torch.stack((k, v), dim + 1 if dim == -2 else dim).detach().requires_grad_()
    kv = torch.stack((k.detach(), v.detach()), dim).requires_grad_()
    attend = layer()
    out = attend(q, kv_layer=kv, qkv_interleave_dim=dim)
    equal([out], [attend(q, k, v)])
    assert grads(out, kv)[0].shape == kv.shape


def test_layouts_agree() -> None:
    q, k, v = qkv(6, 3)
    outs = [layer()(q, k, v)]
    batch_first = [x.transpose(0, 1) for x in (q, k, v)]
    outs.append(layer(qkv_format="bshd")(*batch_first).transpose(0, 1))
    tokens = [x.flatten(0, 1) for x in batch_first]
    packed = layer(qkv_format="thd", attn_mask_type="padding_causal")
    lengths = cu([6, 6, 6])
    outs.append(packed(*tokens, cu_seqlens_q=lengths, cu_seqlens_kv=lengths))
    outs[2] = outs[2].view(3, 6, -1).transpose(0, 1)
    wanted = grads(outs[0], q, k, v)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
        for got, want in zip(grads(out, q, k, v), wanted, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_mask_equals_lengths(mask_type: str) -> None:
    (q, _, _), (_, k, v) = qkv(5, 3), qkv(6, 3)
    masks = tuple(
        (torch.arange(longest) >= torch.tensor(lengths)[:, None])[:, None, None]
        for longest, lengths in ((5, Q_LENGTHS), (6, KV_LENGTHS))
    )
    attend = layer(attn_mask_type=mask_type, attention_type="cross")
    out = attend(q, k, v, attention_mask=masks)
    want = attend(q, k, v, cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS))
    equal([out, *grads(out, q, k, v)], [want, *grads(want, q, k, v)])


def test_one_padding_mask_is_that_of_queries_and_keys() -> None:
    q, k, v = qkv(6, 3)
    mask = (torch.arange(6) >= torch.tensor(KV_LENGTHS)[:, None])[:, None, None]
    attend = layer(attn_mask_type="padding")
    out = attend(q, k, v, attention_mask=mask)
    lengths = cu(KV_LENGTHS)
    equal([out], [attend(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)])
    assert not out[2:, 0].any()


def test_values_behind_the_end_have_no_effect() -> None:
    q, k, v = qkv(6, 3)
    lengths = cu(KV_LENGTHS)
    attend = layer(attn_mask_type="padding")
    results = []
    for value in (0.0, torch.nan):
        tensors = [x.detach().clone() for x in (q, k, v)]
        for x in tensors:
            x[2:, 0] = value
            x.requires_grad_()
        out = attend(*tensors, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        weights = torch.ones_like(out)
        weights[2:, 0] = value
        results.append([out, *torch.autograd.grad(out, tensors, weights)])
    equal(*results)


@pytest.mark.parametrize("tokens", [(0, 2), (3, 0)])
def test_nothing_to_attend_gives_nothing(tokens: tuple[int, int]) -> None:
    q, k, v = qkv(*tokens)
    out = layer()(q, k, v)
    assert out.shape == (*tokens, HEADS * SIZE)
    assert [g.shape for g in grads(out, q, k, v)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("recipe", [None, fp8core.recipe.Float8CurrentScaling(fp8_dpa=True)])
def test_lengths_written_before_backward_are_noticed(recipe: Any) -> None:
    q, k, v = qkv(6, 3, dtype=torch.float32)
    lengths = cu(KV_LENGTHS)
    with fp8core.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(attn_mask_type="padding")(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    lengths.zero_()
    with pytest.raises((RuntimeError, OperandError), match=r"in.?place"):
        out.sum().backward()


def test_no_keys_give_zeros() -> None:
    (q, _, _), (_, k, v) = qkv(3, 2), qkv(0, 2)
    out = layer(attn_mask_type="no_mask")(q, k, v)
    assert not out.any()
    assert not grads(out, q)[0].any()


def test_call_overrides_the_constructor() -> None:
    q, k, v = qkv(6, 3)
    plain = layer(qkv_format="bshd", attn_mask_type="no_mask")
    asked = {"attn_mask_type": "causal", "window_size": (2, 0), "softcap": 3.0}
    out = plain(*[x.transpose(0, 1) for x in (q, k, v)], **asked)
    equal([plain(q, k, v, qkv_format="sbhd", **asked)], [out.transpose(0, 1)])
    equal([layer(**asked)(q, k, v)], [out.transpose(0, 1)])


@pytest.mark.parametrize("name", ["padding,causal", "causal,padding"])
def test_other_spellings_of_a_mask_type(name: str) -> None:
    assert layer(attn_mask_type=name).attn_mask_type == "padding_causal"


def test_diagonal_of_a_window_is_at_the_bottom_right_unless_asked() -> None:
    (q, _, _), (_, k, v) = qkv(3, 2), qkv(6, 2)
    one, other, top = (
        layer(attn_mask_type="no_mask", window_size=(0, 0), bottom_right_diagonal=at)(q, k, v)
        for at in (None, True, False)
    )
    equal([one], [other])
    values = v.repeat_interleave(HEADS // GROUPS, 2).flatten(2)
    torch.testing.assert_close(one, values[3:])
    torch.testing.assert_close(top, values[:3])


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [0.5**n for n in range(1, 9)]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
    ],
)
def test_alibi_takes_the_slopes_of_the_paper(heads: int, slopes: list[float]) -> None:
    attend = DotProductAttention(heads, SIZE, attn_mask_type="causal")
    q, k, v = torch.randn(3, 5, 2, heads, SIZE)
    asked = {"core_attention_bias_type": "alibi"}
    equal([attend(q, k, v, **asked)], [attend(q, k, v, alibi_slopes=torch.tensor(slopes), **asked)])


def test_learned_offset_is_a_parameter() -> None:
    attend = layer(softmax_type="learnable")
    assert [name for name, _ in attend.named_parameters()] == ["softmax_offset"]
    assert attend.softmax_offset is not None
    assert torch.equal(attend.softmax_offset, torch.zeros(HEADS))
    assert not list(layer().parameters())


def test_ignored_mask_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(5, 2)
    _logged.clear()
    with caplog.at_level(logging.WARNING, "fp8core"):
        for _ in range(2):
            out = layer()(q, k, v, torch.ones(2, 1, 5, 5, dtype=torch.bool))
    equal([out], [layer()(q, k, v)])
    assert [record.message for record in caplog.records if "attention_mask" in record.message] == [
        "DotProductAttention ignores attention_mask where the mask type has no padding and is not "
        "'arbitrary'."
    ]


# Dropout and recompute


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
    mean = torch.stack([attend(q, k, v).detach() for _ in range(600)]).mean(0)
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


# Derivatives and graphs

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


@pytest.mark.parametrize("option", [{"attention_dropout": 0.1}, {"return_max_logit": True}])
def test_transform_is_refused_where_it_cannot_be_right(option: dict[str, Any]) -> None:
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


def test_compiled_layer_returns_the_largest_logits() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(5, 2, dtype=torch.float32)
    attend = layer(return_max_logit=True)
    out, largest = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    equal([out, largest], list(attend(q, k, v)))


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


def test_torch_autocast_decides_the_dtype() -> None:
    q, k, v = qkv(5, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer()(q, k, v)
    equal([out], [layer()(*[x.bfloat16() for x in (q, k, v)])])
    assert all(g.dtype == torch.float32 for g in grads(out, q, k, v))


def test_meta_gives_shapes() -> None:
    q, k, v = (torch.empty(5, 2, n, SIZE, device="meta") for n in (HEADS, GROUPS, GROUPS))
    out, largest = layer(return_max_logit=True, attention_dropout=0.1)(q, k, v)
    assert (out.shape, largest.shape, out.device.type) == ((5, 2, 32), (HEADS,), "meta")


def test_recipe_leaves_attention_in_high_precision() -> None:
    q, k, v = qkv(5, 2, dtype=torch.bfloat16)
    with fp8core.autocast(recipe=fp8core.recipe.DelayedScaling()):
        out = layer()(q, k, v)
    equal([out], [layer()(q, k, v)])


def test_explanation_names_who_runs_it_and_why_others_do_not() -> None:
    said = str(fp8core.explain(layer()))
    assert "attention: AttentionDesc(bfloat16, sbhd, 4 heads in 2 groups, d=8" in said
    assert "attention backward: AttentionBackwardDesc(" in said
    assert "cuda: runs on cuda, not on cpu" in said
    assert "holds" in said


# Refusals

CONSTRUCTED = {
    "heads are no multiple of the groups; expected one of 1, 2, 4": {"num_gqa_groups": 3},
    "no mask type": {"attn_mask_type": "causl"},
    r"Did you mean 'causal'": {"attn_mask_type": "causl"},
    r"qkv_format='hsbd'; expected one of 'sbhd', 'bshd', 'thd'": {"qkv_format": "hsbd"},
    "window_size=\\(1,\\); expected \\(left, right\\)": {"window_size": (1,)},
    "window_size=\\(-2, 0\\)": {"window_size": (-2, 0)},
    "Put the window into attention_mask": {"window_size": (2, 2), "attn_mask_type": "arbitrary"},
    "Ask for 'causal_bottom_right'": {"window_size": (-1, 0), "attn_mask_type": "padding"},
    "expected 0 <= p < 1": {"attention_dropout": 1.0},
    "softcap=-1.0; expected a finite number": {"softcap": -1.0},
    "softmax_scale=nan": {"softmax_scale": float("nan")},
    "softmax_scale='x'": {"softmax_scale": "x"},
    "attention_dropout='x'": {"attention_dropout": "x"},
    "softcap='x'": {"softcap": "x"},
    "attn_mask_type=\\['causal'\\]": {"attn_mask_type": ["causal"]},
    "softmax_type='sink'": {"softmax_type": "sink"},
    "attention_type='both'": {"attention_type": "both"},
    "num_attention_heads=4.: the 3 ranks of its group do not divide it": {"tp_size": 3},
    "tp_size=0.: expected an integer >= 1": {"tp_size": 0},
    "cp_group": {"cp_group": object()},
}
del CONSTRUCTED["no mask type"]


@pytest.mark.parametrize("message", CONSTRUCTED)
def test_constructor_refuses(message: str) -> None:
    with pytest.raises((OperandError, UnsupportedError), match=message):
        layer(**CONSTRUCTED[message])


MASK = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
INNER = MASK.clone()
INNER[0, ..., 1] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"query_layer \[4, 2, 3, 8\]; expected \[s, b, 4, 8\]": (
        {},
        {"query_layer": torch.randn(4, 2, 3, 8)},
    ),
    r"key_layer \[5, 2, 4, 8\]; expected \[s, b, 2, 8\]": (
        {},
        {"key_layer": torch.randn(5, 2, 4, 8)},
    ),
    "value_layer is torch.float64": ({}, {"value_layer": torch.randn(5, 2, 2, 8).double()}),
    "expected as many values as keys": ({}, {"value_layer": torch.randn(4, 2, 2, 8)}),
    "has batch 3, key_layer": ({}, {"query_layer": torch.randn(5, 3, 4, 8)}),
    "value_layer is None": ({}, {"value_layer": None}),
    "key_layer is list": ({}, {"key_layer": [1.0]}),
    "qkv_layer holds queries, keys and values": ({}, {"qkv_layer": torch.randn(5, 2, 3, 4, 8)}),
    "kv_layer holds keys and values": ({}, {"kv_layer": torch.randn(5, 2, 2, 2, 8)}),
    "padding mask type needs attention_mask": ({"attn_mask_type": "padding"}, {}),
    "True behind the end of a sequence": (
        {"attn_mask_type": "padding"},
        {"attention_mask": MASK[..., :4]},
    ),
    "Padding is behind the end": ({"attn_mask_type": "padding"}, {"attention_mask": INNER}),
    "one tensor in cross attention": (
        {"attn_mask_type": "padding", "attention_type": "cross"},
        {"attention_mask": MASK},
    ),
    "cu_seqlens_kv is NoneType": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 5])},
    ),
    "cu_seqlens_q is torch.int64": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": torch.tensor([0, 5, 10]), "cu_seqlens_kv": cu([5, 5])},
    ),
    "expected one number of sequences": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 5]), "cu_seqlens_kv": cu([5])},
    ),
    "for a batch of 2; expected 3": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5]), "cu_seqlens_kv": cu([5])},
    ),
    "sequences of at most 5 tokens": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 6]), "cu_seqlens_kv": cu([5, 5])},
    ),
    "cu_seqlens without padding": ({}, {"cu_seqlens_q": cu([5, 5]), "cu_seqlens_kv": cu([5, 5])}),
    "qkv_format='thd', whose sequences have lengths": (
        {"qkv_format": "thd"},
        {
            "query_layer": torch.randn(5, 4, 8),
            "key_layer": torch.randn(5, 2, 8),
            "value_layer": torch.randn(5, 2, 8),
        },
    ),
    "needs a bool tensor": ({"attn_mask_type": "arbitrary"}, {}),
    r"broadcasts to \[2, 4, 5, 5\]": (
        {"attn_mask_type": "arbitrary"},
        {"attention_mask": torch.zeros(2, 3, 5, 5, dtype=torch.bool)},
    ),
    "core_attention_bias is None": ({}, {"core_attention_bias_type": "post_scale_bias"}),
    "core_attention_bias is given": ({}, {"core_attention_bias": torch.zeros(1, 4, 5, 5)}),
    "core_attention_bias_type='bias'": ({}, {"core_attention_bias_type": "bias"}),
    r"core_attention_bias \[1, 4, 5, 4\]; expected": (
        {},
        {
            "core_attention_bias_type": "pre_scale_bias",
            "core_attention_bias": torch.zeros(1, 4, 5, 4),
        },
    ),
    "alibi_slopes with core_attention_bias_type='no_bias'": ({}, {"alibi_slopes": torch.ones(4)}),
    r"alibi_slopes \[3\] on cpu; expected \[4\]": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)},
    ),
    r"alibi_slopes \[3, 4\] on cpu; expected \[4\] or \[2, 4\]": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3, 4)},
    ),
    "alibi_slopes is list": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": [1.0] * 4},
    ),
    "alibi_slopes .4. is torch.complex64": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4).to(torch.complex64)},
    ),
    "alibi_slopes requires a gradient": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4, requires_grad=True)},
    ),
    "attention_mask is int": ({"attn_mask_type": "padding"}, {"attention_mask": 3}),
    "attention_mask is tuple of NoneType, NoneType": (
        {"attn_mask_type": "padding"},
        {"attention_mask": (None, None)},
    ),
    "qkv_layer is int": (
        {},
        {"query_layer": None, "key_layer": None, "value_layer": None, "qkv_layer": 3},
    ),
    "cu_seqlens_q is .2147483647, -2147483648, -2147483647": (
        {"attn_mask_type": "padding"},
        {
            "cu_seqlens_q": torch.tensor([2**31 - 1, -(2**31), 1 - 2**31], dtype=torch.int32),
            "cu_seqlens_kv": cu([5, 5]),
        },
    ),
    "pad_between_seqs=True needs": ({}, {"pad_between_seqs": True}),
    "score_mod=function is not offered": ({}, {"score_mod": lambda *given: given}),
    "thd_attention_policies=list": ({}, {"thd_attention_policies": []}),
    "num_splits=2": ({}, {"num_splits": 2}),
    "fp8_output=True": ({}, {"fp8_output": True}),
}


@pytest.mark.parametrize("message", CALLS)
def test_call_refuses(message: str) -> None:
    options, changed = CALLS[message]
    torch.manual_seed(0)
    call: dict[str, Any] = {
        name: torch.randn(5, 2, n, SIZE)
        for name, n in (("query_layer", 4), ("key_layer", 2), ("value_layer", 2))
    }
    with pytest.raises((OperandError, UnsupportedError), match=message) as caught:
        layer(name="block.attention", **options)(**{**call, **changed})
    assert "block.attention" in str(caught.value)


@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("starts", [[0, 4, 8], [0, 6, 8]])
def test_sequences_that_do_not_fit_between_their_padding_are_refused(
    side: str, starts: list[int]
) -> None:
    q, k, v = qkv(8)
    lengths, name = cu([5, 3]), f"cu_seqlens_{side}_padded"
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    padded = {name: torch.tensor(starts, dtype=torch.int32)}
    with pytest.raises(OperandError, match=f"{name} leaves . tokens to sequence ., which has"):
        attend(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **padded)


@pytest.mark.parametrize("longest", [-1, 8.0, "8"])
def test_a_longest_sequence_that_is_no_number_of_tokens_is_refused(longest: Any) -> None:
    q, k, v = qkv(8)
    none = cu([])
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(OperandError, match=f"max_seqlen_q={longest!r}; expected an integer"):
        attend(q, k, v, cu_seqlens_q=none, cu_seqlens_kv=none, max_seqlen_q=longest)


def test_packed_sequences_longer_than_said_are_refused() -> None:
    q, k, v = qkv(8)
    lengths = cu([5, 3])
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(OperandError, match="max_seqlen_q=4, but a sequence has 5 tokens"):
        attend(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=4)
    with pytest.raises(OperandError, match="offsets of at most 8 tokens"):
        attend(q, k, v, cu_seqlens_q=cu([5, 4]), cu_seqlens_kv=lengths)


def test_a_context_parallel_group_has_to_be_a_process_group() -> None:
    attend = layer()
    attend.set_context_parallel_group(None, None, None)
    with pytest.raises(OperandError, match="cp_group"):
        attend.set_context_parallel_group(object(), [0, 1], None)


def test_a_way_of_context_parallelism_has_to_be_known() -> None:
    with pytest.raises(OperandError, match="expected one of 'p2p'"):
        layer().set_context_parallel_group(None, cp_comm_type="p2")


def test_the_seed_of_a_cuda_graph_is_drawn_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def randint(*args: object, device: torch.device) -> None:
        drawn.append(torch.device(device).type)

    monkeypatch.setattr(torch, "randint", randint)
    for is_graph in (False, True):
        monkeypatch.setattr("fp8core.modules.bound._is_graph", lambda known=is_graph: known)
        for device in (torch.device("cuda", 0), torch.device("cpu"), None):
            new_seed(device)
    assert drawn == ["cpu", "cpu", "cpu", "cuda", "cpu", "cpu"]
