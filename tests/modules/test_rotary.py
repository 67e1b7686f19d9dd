"""Rotary embedding as users call it: against Hugging Face and formulas, and what is refused."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

import fp8core
from fp8core import (
    OperandError,
    RotaryPositionEmbedding,
    UnsupportedError,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    autocast,
    recipe,
)
from fp8core.chain.sequence_chunks import Chunks
from fp8core.modules.sequences import rotary
from fp8core.modules.sequences.rotary import Rotary
from tests.device import DEVICE, VALUES_ARE_READ
from tests.refusals import Refusal, unrefused

BF16 = torch.bfloat16
F64 = torch.float64
LAYOUTS = ("sbhd", "bshd", "thd")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(layout: str, dtype: torch.dtype = F64) -> tuple[torch.Tensor, dict[str, Any]]:
    """A tensor of two sequences of five tokens in ``layout``, and the keywords that it needs."""
    x = torch.randn(5, 2, 3, 8, generator=torch.Generator().manual_seed(4), dtype=F64).to(dtype)
    if layout == "sbhd":
        return x, {}
    x = x.transpose(0, 1).contiguous()
    if layout == "bshd":
        return x, {}
    return x.flatten(0, 1), {"cu_seqlens": ints(0, 5, 10)}


# The angles


def test_angles_are_position_times_power_of_the_base() -> None:
    freqs = RotaryPositionEmbedding(6, rotary_base=100.0)(4)
    assert freqs.shape == (4, 1, 1, 6)
    assert freqs.dtype == torch.float32
    want = [[p * 100.0 ** (-2 * i / 6) for i in (0, 1, 2, 0, 1, 2)] for p in range(4)]
    torch.testing.assert_close(freqs[:, 0, 0], torch.tensor(want), rtol=1e-6, atol=0)


def test_interleaved_angles_are_those_of_neighbours() -> None:
    halves, pairs = (RotaryPositionEmbedding(6, interleaved=flag)(4) for flag in (False, True))
    assert torch.equal(pairs[..., 0::2], halves[..., :3])
    assert torch.equal(pairs[..., 1::2], halves[..., :3])


def test_rotary_percent_leaves_elements_out() -> None:
    assert RotaryPositionEmbedding(16, 0.5)(3).shape == (3, 1, 1, 8)
    assert torch.equal(RotaryPositionEmbedding(16, 0.5)(3), RotaryPositionEmbedding(8)(3))


def test_offset_shifts_the_positions() -> None:
    embedding = RotaryPositionEmbedding(8)
    assert torch.equal(embedding(4, offset=3), embedding(7)[3:])


def test_interpolation_divides_the_positions_by_the_factor() -> None:
    plain = RotaryPositionEmbedding(8)
    squeezed = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=8
    )
    assert torch.equal(squeezed(32)[::4], plain(8))


def test_a_longer_sequence_is_squeezed_into_the_trained_length() -> None:
    squeezed = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=8
    )
    torch.testing.assert_close(squeezed(64)[::8], RotaryPositionEmbedding(8)(8))


def test_hugging_face_makes_the_same_angles() -> None:
    config = llama.LlamaConfig(hidden_size=32, num_attention_heads=2)
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(50)[None])
    freqs = RotaryPositionEmbedding(16)(50).reshape(1, 50, 16)
    torch.testing.assert_close(freqs.cos(), cos, rtol=0, atol=2e-6)
    torch.testing.assert_close(freqs.sin(), sin, rtol=0, atol=2e-6)


def test_factors_stay_float32_in_a_converted_model() -> None:
    for dtype in [BF16, F64]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), RotaryPositionEmbedding(8))
        before = model[1](9)
        model.to(dtype)
        assert model[0].weight.dtype == dtype, dtype
        assert torch.equal(model[1](9), before), dtype


def test_factors_move_to_another_device() -> None:
    assert RotaryPositionEmbedding(8).to("meta")(4).device.type == "meta"


def test_factors_are_in_the_state_dict_by_their_name_of_transformer_engine() -> None:
    assert list(RotaryPositionEmbedding(8).state_dict()) == ["inv_freq"]


def test_angles_that_make_no_sense_are_refused() -> None:
    for options, text in [
        ({"dim": 7}, "rotates 7 elements"),
        ({"dim": 0}, r"dim=0\): expected an integer >= 1"),
        ({"dim": "8"}, "dim='8'"),
        ({"dim": 8.0}, r"dim=8\.0"),
        ({"dim": math.nan}, "dim=nan"),
        ({"dim": None}, "dim=None"),
        ({"dim": 8, "rotary_percent": math.nan}, "rotary_percent=nan"),
        ({"dim": 8, "rotary_percent": "1"}, "rotary_percent='1'"),
        ({"dim": 8, "rotary_percent": -1}, "rotary_percent=-1"),
        ({"dim": 8, "rotary_percent": 1.5}, "at most 1"),
        ({"dim": 8, "rotary_base": math.nan}, "rotary_base=nan"),
        ({"dim": 8, "rotary_base": math.inf}, "not infinite"),
        ({"dim": 8, "rotary_base": "x"}, "rotary_base='x'"),
        ({"dim": 8, "rotary_base": None}, "rotary_base=None"),
        ({"dim": 8, "seq_len_interpolation_factor": "2"}, "seq_len_interpolation_factor='2'"),
        ({"dim": 8, "seq_len_interpolation_factor": 2}, "needs pretrained_max_position_embeddings"),
        ({"dim": 8, "pretrained_max_position_embeddings": "a"}, "embeddings='a'"),
        ({"dim": 10, "rotary_percent": 0.3}, "rotates 3 elements"),
        ({"dim": 8, "rotary_base": 0.0}, "rotary_base=0.0"),
        ({"dim": 8, "seq_len_interpolation_factor": -1}, "seq_len_interpolation_factor=-1"),
    ]:
        with pytest.raises(OperandError, match=text):
            RotaryPositionEmbedding(**options)


def test_positions_that_are_no_numbers_of_tokens_are_refused() -> None:
    for positions, text in [
        (("4",), "max_seq_len is '4'"),
        ((4.0,), r"max_seq_len is 4\.0"),
        ((math.nan,), "max_seq_len is nan"),
        ((-1,), "max_seq_len is -1"),
        ((None,), "max_seq_len is None"),
        ((True,), "max_seq_len is True"),
        ((torch.tensor(4),), "max_seq_len is a Tensor"),
        ((4, -1), "offset is -1"),
        ((4, 1.5), r"offset is 1\.5"),
        ((4, None), "offset is None"),
    ]:
        with pytest.raises(OperandError, match=text):
            RotaryPositionEmbedding(8)(*positions)


def test_no_positions_have_no_angles() -> None:
    assert RotaryPositionEmbedding(8)(0).shape == (0, 1, 1, 8)


# The rotation


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradient_are_those_of_complex_numbers(layout: str, interleaved: bool) -> None:
    x, given = packed(layout)
    freqs = RotaryPositionEmbedding(6, interleaved=interleaved)(9)
    own = x.clone().requires_grad_()
    given |= {"start_positions": ints(1, 4), "interleaved": interleaved}
    y = apply_rotary_pos_emb(own, freqs, layout, **given)
    grad = torch.randn_like(y)
    y.backward(grad)
    first = {"sbhd": 0, "bshd": 1, "thd": 0}[layout]
    batch = {"sbhd": 1, "bshd": 0}.get(layout, 0)
    split = x.unflatten(0, (2, 5)) if layout == "thd" else x.movedim(batch, 0)
    angle = freqs[..., ::2] if interleaved else freqs[..., :3]

    def turned(part: torch.Tensor, start: int, sign: int) -> torch.Tensor:
        """``part [5, h, d]`` of the sequence that starts at ``start``."""
        head = part[..., :6].unflatten(-1, (3, 2) if interleaved else (2, 3))
        head = head if interleaved else head.transpose(-1, -2)
        phase = sign * angle[start : start + 5].double().reshape(5, 1, 3)
        z = torch.view_as_complex(head.contiguous()) * torch.polar(torch.ones_like(phase), phase)
        back = torch.view_as_real(z)
        back = back if interleaved else back.transpose(-1, -2)
        return torch.cat((back.flatten(-2), part[..., 6:]), -1)

    grads = grad.unflatten(0, (2, 5)) if layout == "thd" else grad.movedim(batch, 0)
    results = y.unflatten(0, (2, 5)) if layout == "thd" else y.movedim(batch, 0)
    assert own.grad is not None
    back = own.grad.unflatten(0, (2, 5)) if layout == "thd" else own.grad.movedim(batch, 0)
    assert x.shape[first] in (5, 10)
    for at, start in enumerate((1, 4)):
        torch.testing.assert_close(results[at], turned(split[at], start, 1), rtol=0, atol=1e-14)
        torch.testing.assert_close(back[at], turned(grads[at], start, -1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_hugging_face_rotates_the_same(dtype: torch.dtype) -> None:
    x, _ = packed("bshd", dtype)
    freqs = RotaryPositionEmbedding(8)(5)
    cos, sin = (f(freqs).reshape(1, 5, 8).to(dtype) for f in (torch.cos, torch.sin))
    want, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    y = apply_rotary_pos_emb(x, freqs, "bshd")
    # they round cosine, sine, both products and the sum
    bound = 3 * torch.finfo(dtype).eps * x.abs().amax() if dtype == BF16 else 0
    torch.testing.assert_close(y, want, rtol=0, atol=float(bound))


def test_a_slice_of_a_packed_projection_is_rotated_without_a_copy_of_it() -> None:
    qkv = torch.randn(5, 2, 9, 8)
    freqs = RotaryPositionEmbedding(8)(5)
    query = qkv[:, :, 3:6]
    assert torch.equal(
        apply_rotary_pos_emb(query, freqs), apply_rotary_pos_emb(query.contiguous(), freqs)
    )


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_packed_query_key_value_are_split_and_rotated(layout: str) -> None:
    qkv = torch.randn(5, 2, 3, 4 * 8 + 8 + 6, dtype=F64, requires_grad=True)
    if layout == "bshd":
        qkv = qkv.detach().transpose(0, 1).contiguous().requires_grad_()
    q_freqs, k_freqs = RotaryPositionEmbedding(8)(5), RotaryPositionEmbedding(8, 0.5)(7)
    query, key, value = apply_fused_qkv_rotary_pos_emb(
        qkv, q_freqs, k_freqs, [32, 8, 6], layout, interleaved=True
    )
    parts = qkv.split([32, 8, 6], dim=-1)
    heads = parts[0].reshape(*qkv.shape[:2], 12, 8)
    assert torch.equal(query, apply_rotary_pos_emb(heads, q_freqs, layout, interleaved=True))
    assert torch.equal(key, apply_rotary_pos_emb(parts[1], k_freqs, layout, interleaved=True))
    assert torch.equal(value, parts[2])
    (query.sum() + key.sum() + value.sum()).backward()
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape


@pytest.mark.parametrize("starts", [None, (1, 3)], ids=["from_0", "from_starts"])
def test_packed_queries_are_rotated_where_they_lie(
    starts: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = Rotary.forward

    def spy(layer: Rotary, t: torch.Tensor, *given: Any) -> torch.Tensor:
        seen.append(t.data_ptr())
        return run(layer, t, *given)

    monkeypatch.setattr(Rotary, "forward", spy)
    qkv, freqs = torch.randn(5, 2, 3, 4 * 8 + 8 + 8), RotaryPositionEmbedding(8)(9)
    given = None if starts is None else ints(*starts)
    query, _, _ = apply_fused_qkv_rotary_pos_emb(
        qkv, freqs, freqs, [32, 8, 8], start_positions=given
    )
    assert seen == [qkv.data_ptr(), qkv[..., 32:].data_ptr()]
    heads = qkv[..., :32].reshape(5, 2, 12, 8)
    assert torch.equal(query, apply_rotary_pos_emb(heads, freqs, start_positions=given))
    with pytest.raises(OperandError, match="start_positions has 3 entries"):
        apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [32, 8, 8], start_positions=ints(1, 2, 3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_first_and_second_derivatives(interleaved: bool) -> None:
    x = torch.randn(3, 2, 1, 6, dtype=F64, requires_grad=True)
    freqs = RotaryPositionEmbedding(4, interleaved=interleaved)(9)
    starts = ints(2, 5)

    def run(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, freqs, start_positions=starts, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_vmap_and_jvp() -> None:
    freqs = RotaryPositionEmbedding(8)(5)
    x = torch.randn(4, 5, 2, 3, 8, dtype=F64)
    each = torch.stack([apply_rotary_pos_emb(one, freqs) for one in x])
    torch.testing.assert_close(torch.func.vmap(lambda x: apply_rotary_pos_emb(x, freqs))(x), each)
    _, tangent = torch.func.jvp(lambda x: apply_rotary_pos_emb(x, freqs), (x[0],), (x[1],))
    torch.testing.assert_close(tangent, each[1])  # it is linear


def test_a_call_like_the_last_is_neither_checked_nor_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, freqs = Rotary("bshd"), RotaryPositionEmbedding(8, device=DEVICE)(6)
    x = torch.randn(2, 6, 3, 8, device=DEVICE).bfloat16()
    expected = []
    for scale in (1.0, 2.0):
        t = (x * scale).requires_grad_()
        y = Rotary("bshd")(t, freqs)
        expected.append((y, *torch.autograd.grad(y.float().square().sum(), t)))
    layer(x.clone().requires_grad_(), freqs)
    monkeypatch.setattr(rotary, "bind", None)
    for scale, (y, grad) in zip((1.0, 2.0), expected, strict=True):
        t = (x * scale).requires_grad_()
        again = layer(t, freqs)
        assert torch.equal(again, y)
        assert torch.equal(*torch.autograd.grad(again.float().square().sum(), t), grad)
    with pytest.raises(TypeError):  # other sizes are bound
        layer(x[:, :5].clone().requires_grad_(), freqs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_graph_gives_the_same_bits(layout: str) -> None:
    x, given = packed(layout, BF16)
    freqs = RotaryPositionEmbedding(8)(9)
    given["start_positions"] = ints(1, 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, freqs, layout, **given)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for one in (run, compiled):
        own = x.clone().requires_grad_()
        y = one(own)
        y.backward(torch.ones_like(y))
        results.append((y, own.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_a_checkpoint_recomputes_it() -> None:
    x, _ = packed("sbhd")
    freqs = RotaryPositionEmbedding(8)(5)
    grads = []
    for run in (lambda x: x, lambda x: fp8core.checkpoint(apply_rotary_pos_emb, x, freqs)):
        own = x.clone().requires_grad_()
        y = run(own)
        y = apply_rotary_pos_emb(own, freqs) if y is own else y
        y.sin().sum().backward()
        grads.append(own.grad)
    assert torch.equal(*grads)


def test_a_recipe_changes_nothing() -> None:
    x, _ = packed("sbhd", BF16)
    freqs = RotaryPositionEmbedding(8)(5)
    plain = apply_rotary_pos_emb(x, freqs)
    for chosen in (recipe.DelayedScaling(), recipe.Float8CurrentScaling()):
        with autocast(recipe=chosen):
            assert torch.equal(apply_rotary_pos_emb(x, freqs), plain)


def test_fused_makes_no_difference() -> None:
    x, _ = packed("sbhd", BF16)
    freqs = RotaryPositionEmbedding(8)(5)
    assert torch.equal(
        apply_rotary_pos_emb(x, freqs, fused=True), apply_rotary_pos_emb(x, freqs, fused=False)
    )


def test_tokens_of_no_sequence_are_zeros_without_a_gradient() -> None:
    x = torch.full((8, 1, 4), torch.nan).index_fill_(0, torch.arange(2, 5), 1.0)
    own = x.requires_grad_()
    y = apply_rotary_pos_emb(own, RotaryPositionEmbedding(4)(3), "thd", cu_seqlens=ints(2, 5))
    assert torch.equal(y[[0, 1, 5, 6, 7]], torch.zeros(5, 1, 4))
    y.sum().backward()
    assert own.grad is not None
    assert torch.equal(own.grad[[0, 1, 5, 6, 7]], torch.zeros(5, 1, 4))
    assert bool(own.grad[2:5].ne(0).any())


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_padding_of_a_dense_batch_needs_no_angles(layout: str) -> None:
    x, _ = packed(layout)
    freqs, starts = RotaryPositionEmbedding(8)(6), ints(1, 4)
    y = apply_rotary_pos_emb(x, freqs, layout, starts, cu_seqlens=ints(0, 5, 7))
    want = apply_rotary_pos_emb(x, RotaryPositionEmbedding(8)(9), layout, starts)
    y, want = (one if layout == "bshd" else one.transpose(0, 1) for one in (y, want))
    assert torch.equal(y[0], want[0])
    assert torch.equal(y[1, :2], want[1, :2])
    assert bool(y[1, 2:].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_token_gives_no_output(layout: str) -> None:
    sizes = (0, 2, 4) if layout == "thd" else (0, 3, 2, 4)
    given = {"cu_seqlens": ints(0)} if layout == "thd" else {}
    y = apply_rotary_pos_emb(
        torch.empty(sizes, requires_grad=True), RotaryPositionEmbedding(4)(3), layout, **given
    )
    assert y.shape == sizes
    y.sum().backward()


@VALUES_ARE_READ
def test_integers_beyond_32_bits_do_not_wrap_around() -> None:
    for name, text in [
        ("start_positions", "reaches position"),
        ("cu_seqlens", "cu_seqlens .* tokens; expected"),
    ]:
        x, given = packed("thd")
        starts = torch.zeros_like(given["cu_seqlens"][1:])
        given = {"start_positions": starts, **given}
        wide = {**given, name: given[name].long() + 2**32}
        with pytest.raises(OperandError, match=text):
            apply_rotary_pos_emb(x, RotaryPositionEmbedding(8)(5), "thd", **wide)


def test_integers_of_64_bits_are_taken() -> None:
    x, given = packed("thd")
    freqs = RotaryPositionEmbedding(8)(5)
    wide = {name: one.long() for name, one in given.items()}
    assert torch.equal(
        apply_rotary_pos_emb(x, freqs, "thd", **wide),
        apply_rotary_pos_emb(x, freqs, "thd", **given),
    )


def test_a_backward_after_a_write_to_the_positions_is_refused() -> None:
    x, starts = torch.randn(2, 2, 1, 4, requires_grad=True), ints(0, 1)
    y = apply_rotary_pos_emb(x, RotaryPositionEmbedding(4)(5), start_positions=starts)
    starts += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_explain_lists_the_operation_of_a_layer_and_by_name() -> None:
    text = str(fp8core.explain(Rotary("bshd"), "current"))
    assert "RotaryDesc(bfloat16, bshd)" in text
    assert "RotaryDesc(bfloat16, bshd, inverse)" in text
    assert "RotaryDesc(bfloat16, thd, inverse)" in str(fp8core.explain("rotary", "mxfp8"))


def test_a_layer_can_be_copied() -> None:
    x, _ = packed("sbhd")
    freqs = RotaryPositionEmbedding(8)(5)
    layer = Rotary()
    assert torch.equal(layer(x, freqs), copy.deepcopy(layer)(x, freqs))


# What is refused

ONE = torch.ones(2, dtype=torch.int64)
GOOD = RotaryPositionEmbedding(8)(16)
T, TOKENS = torch.zeros(5, 2, 3, 8), torch.zeros(10, 3, 8)
DENSE: list[tuple[dict[str, Any], str]] = [
    ({"tensor_format": "bhsd"}, "tensor_format='bhsd'.*'sbhd', 'bshd', 'thd'"),
    ({"t": torch.zeros(5, 3, 8)}, r"t is \[5, 3, 8\]; expected s, b, h, d"),
    ({"t": torch.zeros(5, 2, 0, 8)}, r"t is \[5, 2, 0, 8\]"),
    ({"t": torch.zeros(5, 2, 3, 8, dtype=torch.int32)}, "int32"),
    ({"freqs": GOOD[..., :5]}, "rotates 5 of the 8 elements"),
    ({"freqs": RotaryPositionEmbedding(10)(16)}, "rotates 10 of the 8 elements"),
    ({"freqs": GOOD[:, 0]}, r"freqs is \[16, 1, 8\]; expected \[positions, 1, 1, r\]"),
    ({"freqs": GOOD.expand(16, 2, 1, 8)}, r"freqs is \[16, 2, 1, 8\]"),
    ({"freqs": GOOD.to("meta")}, f"freqs is on meta, t on {DEVICE}"),
    ({"freqs": GOOD[:4]}, "reaches position 4, but freqs has the angles of 4 positions"),
    ({"freqs": None}, "freqs is NoneType"),
    ({"start_positions": ints(0)}, "has 1 entries; expected one for each of the 2 sequences"),
    ({"start_positions": torch.zeros(2)}, "expected a vector of int32"),
    ({"start_positions": ints(0, 1).to("meta")}, "on meta"),
    ({"start_positions": [0, 1]}, "start_positions is list"),
    ({"cu_seqlens": ints(0, 5)}, "cu_seqlens has 2 entries"),
    ({"t": torch.zeros(6, 2, 3, 8), "freqs": GOOD[:8], "cp_size": 2}, "angles of 12 positions"),
]
PACKED: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": None}, "cu_seqlens is None for tensor_format='thd'"),
    ({"cu_seqlens": ints()}, "cu_seqlens has 0 entries"),
    ({"start_positions": ints(1, 2, 3)}, "expected one for each of the 2 sequences"),
]
# What is refused for the values of tensors, which are not read on a GPU.
DENSE_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"start_positions": ints(0, 12)}, "reaches position 16.*at least 17"),
    ({"start_positions": ints(0, -1)}, "one below 0"),
    ({"cu_seqlens": ints(0, 5, 11)}, r"cu_seqlens \[0, 5, 11\] of 5 tokens"),
]
PACKED_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": ints(0, 4, 3)}, r"cu_seqlens \[0, 4, 3\] of 10 tokens"),
    ({"cu_seqlens": ints(-1, 4)}, r"cu_seqlens \[-1, 4\]"),
    ({"cu_seqlens": ints(0, 11)}, r"cu_seqlens \[0, 11\] of 10 tokens"),
    ({"freqs": GOOD[:4]}, "reaches position 4"),
    ({"cu_seqlens": ints(0, 6), "cp_size": 2}, r"cu_seqlens \[0, 6\] over 2 ranks"),
]
PACKED_CALL = {"t": TOKENS, "tensor_format": "thd", "cu_seqlens": ints(0, 5, 10)}
NOT_OFFERED: list[tuple[dict[str, Any], str]] = [
    ({"freqs": GOOD.clone().requires_grad_()}, r"freqs\.detach"),
]


RANKS: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 2, "cp_rank": 2}, r"apply_rotary_pos_emb\(cp_size=2, cp_rank=2"),
    ({"cp_rank": 1}, r"apply_rotary_pos_emb\(cp_size=1, cp_rank=1"),
    ({"cp_size": 2, "t": T[:3]}, "expected two chunks of equal length"),
    ({"cp_size": 2, "t": T[:3], "start_positions": ONE}, "expected two chunks of equal length"),
    (
        {"cp_size": 2, "t": T[:4], "start_positions": ints(1)},
        "has 1 entries; expected one for each of the 2",
    ),
    ({"cp_size": 2, "t": T[:4], "start_positions": [1, 2]}, "start_positions is list"),
    ({"cp_size": 8, "t": T[:4]}, "expected angles of"),
    ({"cp_size": 2, "t": T[0], "tensor_format": "thd", "cu_seqlens": [0, 8]}, "cu_seqlens is list"),
    ({"cp_size": 2, "t": T[0], "tensor_format": "thd"}, "cu_seqlens is None"),
]


def refused(
    rows: list[tuple[dict[str, Any], str]], error: type[Exception] = OperandError, **call: Any
) -> dict[str, Refusal]:
    given = {"t": torch.zeros(6, 2, 3, 8) if error is UnsupportedError else T, "freqs": GOOD}
    return {
        f"{number} {text}": (
            partial(apply_rotary_pos_emb, **{**given, **call, **more}),
            error,
            text,
        )
        for number, (more, text) in enumerate(rows)
    }


def test_arguments_that_do_not_fit_are_named() -> None:
    assert unrefused(refused(DENSE)) == {}
    assert unrefused(refused(PACKED, **PACKED_CALL)) == {}
    assert unrefused(refused(RANKS)) == {}


@VALUES_ARE_READ
def test_values_that_do_not_fit_are_named() -> None:
    assert unrefused(refused(DENSE_VALUES)) == {}
    assert unrefused(refused(PACKED_VALUES, **PACKED_CALL)) == {}


def test_what_is_not_offered_is_refused() -> None:
    assert unrefused(refused(NOT_OFFERED, UnsupportedError)) == {}


def test_packed_projections_that_do_not_fit_are_refused() -> None:
    rotate = partial(apply_fused_qkv_rotary_pos_emb, T, GOOD, GOOD)
    table: dict[str, Refusal] = {
        f"sizes {sizes}": (partial(rotate, sizes), OperandError, "qkv_split_arg_list")
        for sizes in ([4, 4], [4, 4, 1], [6, 4, 2], [8, 0, 0])
    }
    packed_call = partial(rotate, [4, 2, 2], "thd")
    table["packed sequences"] = packed_call, UnsupportedError, "tensor_format='thd'"
    starts = {"start_positions": ONE, "cp_size": 2}
    of_rank = partial(apply_fused_qkv_rotary_pos_emb, T[:4], GOOD, GOOD, [4, 2, 2], **starts)
    table["start positions of a rank"] = of_rank, UnsupportedError, "start_positions=a tensor"
    assert unrefused(table) == {}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("starts", [None, (7, 2)])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_rank_of_a_context_parallel_group_rotates_its_two_chunks(
    layout: str, starts: tuple[int, ...] | None, interleaved: bool
) -> None:
    freqs = RotaryPositionEmbedding(8, device=DEVICE)(24)
    x = torch.randn(16, 2, 3, 8) if layout == "sbhd" else torch.randn(2, 16, 3, 8)
    given = None if starts is None else ints(*starts)
    chunks = Chunks(layout, 2)
    rotate = partial(apply_rotary_pos_emb, interleaved=interleaved, start_positions=given)
    whole = chunks.parts(rotate(x, freqs, layout))
    for rank, part in enumerate(chunks.parts(x)):
        y = rotate(part, freqs, layout, cp_size=2, cp_rank=rank)
        assert torch.equal(y, whole[rank])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("starts", [None, (7, 1, 2)])
def test_a_rank_of_a_context_parallel_group_rotates_two_chunks_of_each_sequence(
    starts: tuple[int, ...] | None, interleaved: bool
) -> None:
    freqs, bounds = RotaryPositionEmbedding(8, device=DEVICE)(24), torch.tensor([0, 8, 8, 24])
    x, chunks = torch.randn(24, 3, 8), Chunks("thd", 2, bounds)
    given = None if starts is None else ints(*starts)
    rotate = partial(apply_rotary_pos_emb, interleaved=interleaved, start_positions=given)
    whole = chunks.parts(rotate(x, freqs, "thd", cu_seqlens=bounds))
    for rank, part in enumerate(chunks.parts(x)):
        ranks = {"cp_size": 2, "cp_rank": rank}
        y = rotate(part, freqs, "thd", cu_seqlens=bounds, **ranks)
        assert torch.equal(y, whole[rank])


def test_gradients_of_a_ranks_chunks_are_those_of_the_whole() -> None:
    freqs, x = RotaryPositionEmbedding(8, device=DEVICE)(24), torch.randn(16, 2, 3, 8)
    grads = []
    for split in (True, False):
        whole = x.clone().requires_grad_()
        part = Chunks("sbhd", 2).parts(whole)[1] if split else whole
        ranks = {"cp_size": 2, "cp_rank": 1} if split else {}
        y = apply_rotary_pos_emb(part, freqs, start_positions=ints(7, 2), **ranks)
        y = y if split else Chunks("sbhd", 2).parts(y)[1]
        grads.append(torch.autograd.grad(y.square().sum(), whole)[0])
    assert torch.equal(*grads)


def test_a_rank_of_a_context_parallel_group_rotates_a_packed_projection() -> None:
    freqs = RotaryPositionEmbedding(4, device=DEVICE)(16)
    qkv, chunks = torch.randn(16, 2, 3, 16), Chunks("sbhd", 2)
    expected = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 4, 4])
    for rank, part in enumerate(chunks.parts(qkv)):
        ranks = {"cp_size": 2, "cp_rank": rank}
        results = apply_fused_qkv_rotary_pos_emb(part, freqs, freqs, [8, 4, 4], **ranks)
        for y, want in zip(results, expected, strict=True):
            assert torch.equal(y, chunks.parts(want)[rank])


def test_the_operation_is_shown_with_its_options() -> None:
    assert repr(Rotary("bshd", interleaved=True)).startswith("Rotary(tensor_format='bshd', inter")
