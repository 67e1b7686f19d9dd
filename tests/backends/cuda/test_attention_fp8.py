"""FP8 attention on CUDA: forward within the noise of its roundings of float64, and the gradients
from its codes within those of bfloat16.

e4m3 rounds the weights and the result, each by up to a sixteenth: two independent errors that leave
28 dB of signal, with a scatter of 4 dB in a head of some tens of elements. The kit's laws hold each
element to its bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, Operand, OperandSpec
from fp8core.errors import OperandError
from tests.backends.cuda.cuda_cases import DEVICE, backend, nothing_waits, same_bits
from tests.backends.cuda.test_attention import bound, call_of, gradient_of, here, judge

pytestmark = pytest.mark.needs_accelerator("cuda")
FLOOR = 23.0  # dB, of each head
# 1 %: to bfloat16 are rounded the weights, the result, the gradients of logits, their products, and
# these times their scale, each by 2^-9 at most.
BACKWARD = 5 * 2.0**-9
SPEC = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
WIDE = AttentionDesc(torch.bfloat16, "sbhd", 4, 2, 64, 64, 0.125, window=(-1, 0))
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "no_mask": {"window": (-1, -1)},
    "bshd": {"layout": "bshd"},
    "window": {"window": (7, 3)},
    "padding": {"padding": True},
    "padding.bshd.window": {"padding": True, "layout": "bshd", "window": (7, 3)},
}
LENGTHS = (
    *((1, 70), (2, 1), (1, 1), (21, 37), (37, 21), (64, 64), (127, 129), (130, 5)),
    *((255, 257), (1024, 1000)),
)
HEAD_SIZES = ((16, 16), (32, 32), (64, 64), (64, 128), (128, 128))


def desc_of(name: str, **changed: Any) -> AttentionDesc:
    wide = dataclasses.replace(WIDE, **(OPTIONS[name] | changed))
    return dataclasses.replace(wide, qkv=SPEC, s=SPEC, out=SPEC)


def quantized(x: torch.Tensor) -> Operand:
    """Return ``x`` in e4m3, its amax at 448."""
    scale = 448 / x.float().abs().amax().clamp(min=1e-6) if x.numel() else torch.ones(())
    codes = (x.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return Operand(codes, (1 / scale).reshape(1, 1))


def values(operand: Operand) -> torch.Tensor:
    assert operand.scale_inv is not None
    return operand.data.view(torch.float8_e4m3fn).double() * operand.scale_inv.double().view(())


def on_device(operand: Operand) -> Operand:
    assert operand.scale_inv is not None
    return Operand(operand.data.to(DEVICE), operand.scale_inv.to(DEVICE))


def call(
    desc: AttentionDesc, length_q: int, length_kv: int, **options: Any
) -> tuple[list[Operand], dict[str, Any]]:
    """Return operands and keywords on the CPU."""
    wide = dataclasses.replace(desc, qkv=None, s=None, out=None)
    tensors, keywords = call_of(wide, length_q, length_kv, **options)
    return [quantized(x) for x in tensors], keywords


def run(desc: AttentionDesc, operands: list[Operand], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of the result, statistics, the largest logit, and the recorded amax."""
    amax = torch.zeros(1, device=DEVICE)
    scale = torch.full((1,), 448.0, device=DEVICE)
    given = here(keywords) | {"s_scale": scale, "s_amax_out": amax}
    placed = [on_device(one) for one in operands]
    codes, stats, largest = bound(desc)(*placed, **given)
    assert codes.dtype == torch.uint8
    return values(Operand(codes, placed[2].scale_inv)), stats, largest, amax


def check(desc: AttentionDesc, operands: list[Operand], keywords: dict[str, Any]) -> None:
    wide = dataclasses.replace(desc, qkv=None, s=None, out=None)
    want, stats, largest = judge(wide, tuple(map(values, operands)), keywords)[:3]
    out, got_stats, got_largest, amax = run(desc, operands, keywords)
    assert want is not None
    assert stats is not None
    noise = (out.cpu() - want).flatten(0, -3).square().sum((0, 2))
    signal = want.flatten(0, -3).square().sum((0, 2))
    ratios = 10 * torch.log10(signal / noise.clamp(min=1e-30))
    assert bool((ratios > FLOOR).all()) or not signal.any(), ratios
    assert torch.equal(out.cpu()[want == 0], want[want == 0])
    infinite = stats == -torch.inf
    assert torch.equal(got_stats.cpu() == -torch.inf, infinite)
    off = (got_stats.cpu().double() - stats)[~infinite].abs()
    # Hopper's sums of FP8 products are cut off 13 bits below the largest one, 32 products at once.
    assert not off.numel() or float(off.max()) < 2**-11 * max(desc.head_dim / 32, 2)
    if largest is not None:
        assert torch.allclose(got_largest.cpu().double(), largest, atol=2**-10)
    assert 0 <= float(amax) <= 1.001


@pytest.mark.parametrize("name", OPTIONS)
def test_any_lengths_are_within_the_noise(name: str) -> None:
    desc = desc_of(name)
    for lengths in LENGTHS:
        check(desc, *call(desc, *lengths))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [*(((64, 128), name) for name in OPTIONS), ((128, 128), "padding")],
)
def test_any_lengths_of_other_heads_are_within_the_noise(sizes: tuple[int, int], name: str) -> None:
    desc = desc_of(name, head_dim=sizes[0], head_dim_v=sizes[1])
    for lengths in LENGTHS:
        check(desc, *call(desc, *lengths))


@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_any_head_sizes_are_within_the_noise(sizes: tuple[int, int]) -> None:
    for groups in (1, 4):
        desc = desc_of("causal", head_dim=sizes[0], head_dim_v=sizes[1], groups=groups)
        check(desc, *call(desc, 130, 130))


def test_the_amax_of_the_weights_is_recorded() -> None:
    desc = desc_of("no_mask")
    operands, keywords = call(desc, 64, 64)
    operands[0] = Operand(torch.zeros_like(operands[0].data), operands[0].scale_inv)
    amax = run(desc, operands, keywords)[3]
    # Each of 64 weights is 1/64. A kernel that quantizes before it divides by the sum records 1.
    assert float(amax) in (pytest.approx(1 / 64, rel=1e-3), 1.0)


def test_codes_do_not_overflow_where_all_values_are_the_largest() -> None:
    desc = desc_of("causal")
    operands, keywords = call(desc, 128, 128)
    full = torch.full_like(operands[2].data, 0x7E)  # 448
    operands[2] = Operand(full, operands[2].scale_inv)
    out = run(desc, operands, keywords)[0]
    largest = values(operands[2]).max()
    assert bool(((out.cpu() - largest).abs() <= largest / 8).all())


def backward_call(
    desc: AttentionDesc, deviation: float, length: int
) -> tuple[list[Operand], dict[str, Any]]:
    """Return a call whose logits have this standard deviation."""
    wide = dataclasses.replace(desc, qkv=None, s=None, out=None)
    (q, k, v), keywords = call_of(wide, length, length)
    factor = (deviation / (desc.scale * desc.head_dim**0.5)) ** 0.5
    return [quantized(x) for x in (factor * q, factor * k, v)], keywords


def gradients(
    desc: AttentionDesc, operands: list[Operand], keywords: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values from the codes."""
    out, stats, *_ = run(desc, operands, keywords)
    placed = [on_device(one) for one in operands]
    out = out.to(desc.dtype)
    back = bound(AttentionBackwardDesc(desc))
    return list(back(gradient_of(out), *placed, out, stats, **here(keywords))[:3])


def check_gradients(desc: AttentionDesc, deviation: float, length: int) -> None:
    operands, keywords = backward_call(desc, deviation, length)
    wide = dataclasses.replace(desc, qkv=None, s=None, out=None)
    wanted = judge(wide, tuple(map(values, operands)), keywords)[3:6]
    for name, got, want in zip("qkv", gradients(desc, operands, keywords), wanted, strict=True):
        assert want is not None
        share = float((got.cpu() - want).norm() / want.norm())
        assert share < BACKWARD, f"grad_{name}: {share:.3g} of the norm"
        # The difference of two equal numbers, each rounded, where a query sees one key.
        rest = got.cpu()[want == 0].double().abs()
        assert bool((rest <= BACKWARD * want.abs().max()).all())


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_steep_rows_are_within_1_percent(name: str) -> None:
    check_gradients(desc_of(name), 10.0, 512)


@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_gradients_of_any_head_sizes_are_within_1_percent(sizes: tuple[int, int]) -> None:
    scale = sizes[0] ** -0.5
    for dtype in (torch.bfloat16, torch.float16):
        changed = {"head_dim": sizes[0], "head_dim_v": sizes[1], "scale": scale, "dtype": dtype}
        check_gradients(desc_of("causal", **changed), 10.0, 512)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_any_lengths_are_finite(name: str) -> None:
    desc = desc_of(name)
    for lengths in ((0, 7), (1, 1), (1, 70), (37, 21)):
        operands, keywords = call(desc, *lengths)
        for one, got in zip(operands, gradients(desc, operands, keywords), strict=True):
            assert got.shape == one.data.shape, lengths
            assert bool(got.isfinite().all()), lengths


def test_gradients_wait_for_nothing_on_the_device() -> None:
    desc = desc_of("padding")
    operands, keywords = call(desc, 130, 130)
    placed, given = [on_device(one) for one in operands], here(keywords)
    out, stats, *_ = run(desc, operands, keywords)
    out, back = out.to(desc.dtype), bound(AttentionBackwardDesc(desc))
    grad = gradient_of(out)
    back(grad, *placed, out, stats, **given)
    with nothing_waits():
        back(grad, *placed, out, stats, **given)


@pytest.mark.parametrize("name", ["causal", "padding"])
def test_a_captured_graph_computes_the_same(name: str) -> None:
    desc = desc_of(name)
    operands, keywords = call(desc, 130, 130)
    placed, given = [on_device(one) for one in operands], here(keywords)
    given["s_scale"] = torch.full((1,), 448.0, device=DEVICE)
    attend = bound(desc)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(*placed, **given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*placed, **given)[0]
    for one in placed:
        one.data.copy_(one.data.flip(0))
    graph.replay()
    assert same_bits(out, attend(*placed, **given)[0])


def test_nothing_waits_for_the_device() -> None:
    desc = desc_of("padding")
    operands, keywords = call(desc, 130, 130)
    run(desc, operands, keywords)
    placed, given = [on_device(one) for one in operands], here(keywords)
    given["s_scale"] = torch.full((1,), 448.0, device=DEVICE)
    with nothing_waits():
        bound(desc)(*placed, **given)


def test_scales_of_another_form_are_refused() -> None:
    desc = desc_of("causal")
    operands, keywords = call(desc, 64, 64)
    placed = [on_device(one) for one in operands]
    given = here(keywords)
    with pytest.raises(OperandError, match="s_scale is None"):
        bound(desc)(*placed, **given)
    given["s_scale"] = torch.full((1,), 448.0)
    with pytest.raises(OperandError, match=r"s_scale is torch.float32 \[1\] on cpu"):
        bound(desc)(*placed, **given)
    given["s_scale"] = given["s_scale"].to(DEVICE)
    with pytest.raises(OperandError, match="scale_inv of q is None"):
        bound(desc)(Operand(placed[0].data), *placed[1:], **given)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"out": None}, "returns FP8 alone"),
        ({"bottom_right": True}, "bottom right corner on Hopper"),
        ({"dropout": 0.1}, "illegal address"),
        ({"layout": "thd", "padding": True}, "illegal instruction"),
        ({"softmax": "off-by-one"}, "no plan for a sink"),
        ({"max_logit": True}, "largest logits are wrong"),
        ({"head_dim": 96, "head_dim_v": 96}, "not seen to pass"),
        ({"head_dim": 128, "head_dim_v": 128, "window": (-1, -1)}, "not seen to pass"),
        ({"window": (-1, -1), "arbitrary": True}, "no arbitrary mask"),
        ({"qkv": dataclasses.replace(SPEC, format="e5m2")}, "tensorwise e4m3"),
    ],
)
def test_declined_attention_has_reasons(changed: dict[str, Any], reason: str) -> None:
    desc = dataclasses.replace(desc_of("causal"), **changed)
    said = backend("cuda").unsupported(desc, DEVICE)
    assert said is not None
    assert reason in said
