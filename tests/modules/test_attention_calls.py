"""How DotProductAttention is called: layouts, lengths, masks, biases and dtypes."""

from __future__ import annotations

import inspect
import logging
from typing import Any, get_type_hints

import pytest
import torch

import fp8core
from fp8core import DotProductAttention, OperandError
from fp8core.modules.calls.bound import new_seed
from fp8core.modules.sequences.attention_arguments import AttentionOptions
from fp8core.reporting import _logged
from tests.device import DEVICE
from tests.modules.attention_calls import (
    GROUPS,
    HEADS,
    SIZE,
    cu,
    equal,
    grads,
    layer,
    qkv,
)

# torch.func.jvp compiles decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Q_LENGTHS, KV_LENGTHS = [5, 0, 3], [2, 6, 4]


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


def test_packed_projection_equals_its_parts() -> None:
    for dim in [-3, -2]:
        packed = torch.randn(
            5, 2, *((3, HEADS) if dim == -3 else (HEADS, 3)), SIZE, requires_grad=True
        )
        attend = layer(num_gqa_groups=HEADS)
        out = attend(qkv_layer=packed, qkv_interleave_dim=dim)
        want = attend(*[x.contiguous() for x in packed.unbind(dim)])
        equal([out, *grads(out, packed)], [want, *grads(want, packed)])


@pytest.mark.parametrize("dim", [-3, -2])
def test_packed_keys_and_values_equal_their_parts(dim: int) -> None:
    q, k, v = qkv(5, 2)
    kv = torch.stack((k.detach(), v.detach()), dim).requires_grad_()
    attend = layer()
    out = attend(q, kv_layer=kv, qkv_interleave_dim=dim)
    equal([out], [attend(q, k, v)])
    assert grads(out, kv)[0].shape == kv.shape


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


def test_nothing_to_attend_gives_nothing() -> None:
    for tokens in [(0, 2), (3, 0)]:
        q, k, v = qkv(*tokens)
        out = layer()(q, k, v)
        assert out.shape == (*tokens, HEADS * SIZE), tokens
        assert [g.shape for g in grads(out, q, k, v)] == [q.shape, k.shape, v.shape], tokens


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


def test_other_spellings_of_a_mask_type() -> None:
    for name in ["padding,causal", "causal,padding"]:
        assert layer(attn_mask_type=name).attn_mask_type == "padding_causal", name


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


def test_alibi_takes_the_slopes_of_the_paper() -> None:
    for heads, slopes in [
        (8, [0.5**n for n in range(1, 9)]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
    ]:
        attend = DotProductAttention(heads, SIZE, attn_mask_type="causal")
        q, k, v = torch.randn(3, 5, 2, heads, SIZE)
        asked = {"core_attention_bias_type": "alibi"}
        equal(
            [attend(q, k, v, **asked)],
            [attend(q, k, v, alibi_slopes=torch.tensor(slopes), **asked)],
        )


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


def test_torch_autocast_decides_the_dtype() -> None:
    q, k, v = qkv(5, 2, dtype=torch.float32)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = layer()(q, k, v)
    equal([out], [layer()(*[x.bfloat16() for x in (q, k, v)])])
    assert all(g.dtype == torch.float32 for g in grads(out, q, k, v))


def test_meta_gives_shapes() -> None:
    q, k, v = (torch.empty(5, 2, n, SIZE, device="meta") for n in (HEADS, GROUPS, GROUPS))
    out, largest = layer(return_max_logit=True, attention_dropout=0.1)(q, k, v)
    assert (out.shape, largest.shape, out.device.type) == ((5, 2, 32), (HEADS,), "meta")


@pytest.mark.parametrize("options", [{}, {"fp8_dpa": True}, {"fp8_dpa": True, "fp8_mha": True}])
def test_where_every_weight_is_dropped_results_and_gradients_are_zero(
    options: dict[str, Any],
) -> None:
    block = fp8core.MultiheadAttention(32, HEADS, attention_dropout=1.0, bias=False)
    x, chosen = torch.randn(5, 2, 32), fp8core.recipe.DelayedScaling(**options)
    for _ in range(3):
        x = x.detach().requires_grad_()
        with fp8core.autocast(recipe=chosen):
            out = block(x)
        assert all(not one.any() for one in (out, *grads(out, x, *block.parameters())))


def test_explanation_names_who_runs_it_and_why_others_do_not() -> None:
    said = str(fp8core.explain(layer()))
    assert "attention: AttentionDesc(bfloat16, sbhd, 4 heads in 2 groups, d=8" in said
    assert "attention backward: AttentionBackwardDesc(" in said
    assert "cuda: runs on cuda, not on cpu" in said
    assert "holds" in said


def test_the_seed_of_a_cuda_graph_is_drawn_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def randint(*args: object, device: torch.device) -> None:
        drawn.append(torch.device(device).type)

    monkeypatch.setattr(torch, "randint", randint)
    for is_graph in (False, True):
        monkeypatch.setattr("fp8core.modules.calls.bound._is_graph", lambda known=is_graph: known)
        for device in (torch.device("cuda", 0), torch.device("cpu"), None):
            new_seed(device)
    assert drawn == ["cpu", "cpu", "cpu", "cuda", "cpu", "cpu"]


def test_lengths_are_left_unread_by_a_mask_without_padding() -> None:
    for mask in ["no_mask", "causal"]:
        q, k, v = qkv(5, 2)
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        unread = torch.full((3,), -7, dtype=torch.int32)
        attend = layer(attn_mask_type=mask)
        given = dict.fromkeys(names, unread)
        equal([attend(q, k, v, **given, pad_between_seqs=False)], [attend(q, k, v)])


def test_equal_offsets_with_padding_announce_none() -> None:
    q, k, v = qkv(8)
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    lengths = {"cu_seqlens_q": cu([5, 3]), "cu_seqlens_kv": cu([5, 3])}
    padded = {f"{name}_padded": offsets.clone() for name, offsets in lengths.items()}
    equal(
        [attend(q, k, v, **lengths, **padded, pad_between_seqs=False)], [attend(q, k, v, **lengths)]
    )


def test_options_of_a_call_are_the_arguments_of_forward_in_every_layer_with_attention() -> None:
    defaults, hints = AttentionOptions._field_defaults, get_type_hints(AttentionOptions)
    parameters = inspect.signature(DotProductAttention.forward).parameters
    assert list(parameters)[4:] == list(AttentionOptions._fields)
    # The mask of queries and keys is no pair everywhere, and the last is refused whatever it is.
    wider = {"attention_mask", "thd_attention_policies"}
    for owner in (DotProductAttention, fp8core.MultiheadAttention, fp8core.TransformerLayer):
        parameters = inspect.signature(owner.forward).parameters
        types = get_type_hints(owner.forward)
        shared = hints.keys() & parameters.keys()
        assert len(shared) > 15
        for name in shared:
            assert parameters[name].default == defaults[name], (owner, name)
            assert name in wider or types[name] == hints[name], (owner, name)
