"""Attention on CUDA, within bounds that follow from its roundings, of float64.

cuDNN rounds a weight and a gradient of a logit to the operands' dtype before it multiplies: an
error of eps / 2 of each term; the result is rounded once more. The kit's laws hold the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core.errors import OperandError
from tests.backends.cuda.cuda_cases import DEVICE, backend, nothing_waits, same_bits

pytestmark = pytest.mark.needs_accelerator("cuda")
F64 = torch.float64
BASE = AttentionDesc(torch.bfloat16, "sbhd", 4, 2, 64, 64, 0.125, window=(-1, 0))
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "no_mask": {"window": (-1, -1)},
    "bshd": {"layout": "bshd"},
    "bottom_right": {"bottom_right": True},
    "window": {"window": (7, 3)},
    "window.bottom_right": {"window": (7, 3), "bottom_right": True},
    "padding": {"padding": True},
    "padding.bshd.bottom_right": {"padding": True, "layout": "bshd", "bottom_right": True},
    "thd": {"padding": True, "layout": "thd"},
    "thd.window.bottom_right": {
        "padding": True,
        "layout": "thd",
        "window": (7, 3),
        "bottom_right": True,
    },
    "arbitrary": {"window": (-1, -1), "arbitrary": True},
    "post_scale": {"bias": "post_scale"},
    "pre_scale": {"bias": "pre_scale"},
    "off_by_one": {"softmax": "off-by-one"},
    "learnable": {"softmax": "learnable"},
    "max_logit": {"max_logit": True},
}
HEAD_SIZES = ((8, 8), (64, 64), (64, 128), (96, 96), (128, 128), (192, 128), (256, 256))
LENGTHS = (
    *((1, 1), (1, 70), (2, 1), (21, 37), (37, 21), (64, 64), (127, 129), (128, 128), (130, 5)),
    *((255, 257), (513, 511), (1024, 1000)),
)
FULL = ("q", "k", "v")
Results = tuple[torch.Tensor | None, ...]


def desc_of(name: str, **changed: Any) -> AttentionDesc:
    return dataclasses.replace(BASE, **(OPTIONS[name] | changed))


def bound(desc: object) -> Any:
    """Return the CUDA backend's callable; the test is skipped where a package is not installed."""
    reason = backend("cuda").unsupported(desc, DEVICE)
    if reason is not None and "not installed" in reason:
        pytest.skip(reason)
    assert reason is None, reason
    return backend("cuda").bind(desc, DEVICE)


def lengths_of(length: int, batch: int, empty: int) -> torch.Tensor:
    each = [0 if at == empty else max(0, length - 3 * at) for at in range(batch)]
    return torch.tensor([0, *each]).cumsum(0).int()


def call_of(
    desc: AttentionDesc, length_q: int, length_kv: int, batch: int = 3, seed: int = 0
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return operands and keywords on the CPU, made there so that any device has the same."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = desc.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    keywords: dict[str, Any] = {}
    rows = {"q": length_q, "kv": length_kv}
    if desc.padding:
        for name, empty in (("q", 2), ("kv", 1)):
            offsets = lengths_of(rows[name], batch, empty)
            keywords[f"cu_seqlens_{name}"] = offsets
            if desc.layout == "thd":
                keywords[f"max_seqlen_{name}"] = int(offsets.diff().max())
                rows[name] = int(offsets[-1]) + 2
    tensors = []
    for name, heads, size in (
        ("q", desc.heads, desc.head_dim),
        ("kv", desc.groups, desc.head_dim),
        ("kv", desc.groups, desc.head_dim_v),
    ):
        tokens = {"thd": (rows[name],), "sbhd": (rows[name], batch), "bshd": (batch, rows[name])}
        tensors.append(normal(*tokens[desc.layout], heads, size))
    full = (batch, desc.heads, length_q, length_kv)
    if desc.bias is not None:
        keywords["bias"] = normal(1, *full[1:])
    if desc.arbitrary:
        mask = torch.rand((batch, 1, *full[2:]), generator=generator) > 0.7
        mask[:, :, 1:2] = True
        keywords["mask"] = mask
    if desc.softmax == "learnable":
        keywords["softmax_offset"] = normal(desc.heads, dtype=torch.float32)
    if desc.dropout:
        keywords["rng"] = torch.tensor([seed, 5])
    return tuple(tensors), keywords


def here(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with their tensors on the device; seed and offset stay."""
    return {
        name: one.to(DEVICE) if isinstance(one, torch.Tensor) and name != "rng" else one
        for name, one in keywords.items()
    }


def both_ways(
    desc: AttentionDesc,
    tensors: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
    device: torch.device,
    name: str = "cuda",
) -> Results:
    """Return the results of forward, and of backward with :func:`gradient_of`."""
    bias_grad = desc.bias is not None
    run, back = (
        bound(one) if name == "cuda" else backend(name).bind(one, device)
        for one in (desc, AttentionBackwardDesc(desc, bias_grad))
    )
    out, stats, largest = run(*tensors, **keywords)
    return (out, stats, largest, *back(gradient_of(out), *tensors, out, stats, **keywords))


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    """Return a gradient of the result, of the same values for any dtype and device."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype)


def judge(
    desc: AttentionDesc, tensors: tuple[torch.Tensor, ...], keywords: dict[str, Any]
) -> Results:
    """Return float64 results of the reference on the CPU."""
    wide = dataclasses.replace(desc, dtype=F64)
    floats = {"bias", "softmax_offset"}
    given = {name: one.double() if name in floats else one for name, one in keywords.items()}
    cpu = torch.device("cpu")
    return both_ways(wide, tuple(x.double() for x in tensors), given, cpu, "reference")


def check(ours: Results, theirs: Results, dtype: torch.dtype) -> None:
    """Require 4 eps of the largest result of each element, and of the norm of all.

    Rounded are the weights, the gradients of logits and the result, by eps / 2 each, and for groups
    of heads the parts of a sum: 2 eps if errors were all of one sign and terms as large as their
    sum. That bound is one of size, not of each element; the laws of the kit have the latter.
    """
    eps = torch.finfo(dtype).eps
    names = ("out", "stats", "max_logit", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_offset")
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is None or other is None or not other.numel():
            continue
        got = one.cpu().double()
        assert got.shape == other.shape, name
        infinite = other == -torch.inf
        assert torch.equal(got == -torch.inf, infinite), name
        got, wanted = got.masked_fill(infinite, 0), other.masked_fill(infinite, 0)
        assert bool(got.isfinite().all()), name
        largest = float(wanted.abs().max())
        wide = name in ("stats", "max_logit")  # never rounded to the operands' dtype
        allowed = (2.0**-14 if wide else 4 * eps) * max(largest, 1.0)
        worst = float((got - wanted).abs().max())
        assert worst <= allowed, f"{name}: {worst:.3g} of {allowed:.3g}"
        if not wide:  # as a whole: errors of single elements are of either sign
            # Behind a softmax of one key a gradient is zero; its terms, which cancel, are about 1.
            size = max(float(wanted.norm()), 2**-10 * wanted.numel() ** 0.5)
            share = float((got - wanted).norm()) / size
            assert share <= 4 * eps, f"{name}: {share:.3g} of the norm"


def check_call(
    desc: AttentionDesc, tensors: tuple[torch.Tensor, ...], keywords: dict[str, Any]
) -> Results:
    ours = both_ways(desc, tuple(x.to(DEVICE) for x in tensors), here(keywords), DEVICE)
    check(ours, judge(desc, tensors, keywords), desc.dtype)
    return ours


@pytest.mark.parametrize("name", OPTIONS)
def test_any_lengths_are_within_the_bound(name: str) -> None:
    desc = desc_of(name)
    for lengths in LENGTHS:
        check_call(desc, *call_of(desc, *lengths))


@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_any_head_sizes_are_within_the_bound(sizes: tuple[int, int]) -> None:
    names = ("causal", "padding", "thd", "post_scale", "window")
    for name, dtype, groups in itertools.product(names, (torch.bfloat16, torch.float16), (1, 2, 4)):
        desc = desc_of(name, head_dim=sizes[0], head_dim_v=sizes[1], dtype=dtype, groups=groups)
        check_call(desc, *call_of(desc, 130, 130))


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the same values: transposed, a slice of a wider tensor, unaligned, elements apart."""
    wide = torch.zeros(*x.shape[:-2], 3 * x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
    packed = wide[..., x.shape[-2] : 2 * x.shape[-2], :].copy_(x)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
    apart = torch.stack((x, x), -1)[..., 0]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    return [packed, moved, apart, turned]


@pytest.mark.parametrize("name", OPTIONS)
def test_strides_and_addresses_change_nothing(name: str) -> None:
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 130, 140)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    expected = both_ways(desc, placed, given, DEVICE)
    for variants in zip(*map(views, placed), strict=True):
        ours = both_ways(desc, variants, given, DEVICE)
        check(ours, judge(desc, tensors, keywords), desc.dtype)
        assert same_bits(ours[0], expected[0])
        assert ours[0].is_contiguous()


@pytest.mark.parametrize("name", ["causal", "bshd", "padding", "thd"])
def test_the_layout_of_the_gradient_is_not_remembered(name: str) -> None:
    # The operator of torch keeps graphs without the strides of the result's gradient.
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 64, 64)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    out, stats, _ = bound(desc)(*placed, **given)
    back = bound(AttentionBackwardDesc(desc))
    grad = torch.randn_like(out)
    expected = back(grad, *placed, out, stats, **given)
    for one in views(grad):
        for ours, theirs in zip(back(one, *placed, out, stats, **given), expected, strict=True):
            assert ours is theirs is None or torch.allclose(
                ours.float(), theirs.float(), rtol=2**-6, atol=2**-6
            )


@pytest.mark.parametrize("name", ["padding", "padding.bshd.bottom_right", "thd"])
def test_what_lies_behind_a_sequence_has_no_effect(name: str) -> None:
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 130, 130)
    dirty = [x.clone() for x in tensors]
    for x, offsets in zip(dirty, ("q", "kv", "kv"), strict=True):
        ends = keywords[f"cu_seqlens_{offsets}"]
        if desc.layout == "thd":
            x[int(ends[-1]) :] = torch.nan
            continue
        for at, length in enumerate(ends.diff().tolist()):
            (x[length:, at] if desc.layout == "sbhd" else x[at, length:]).fill_(torch.nan)
    given = here(keywords)
    clean = both_ways(desc, tuple(x.to(DEVICE) for x in tensors), given, DEVICE)
    ours = both_ways(desc, tuple(x.to(DEVICE) for x in dirty), given, DEVICE)
    for one, other in zip(ours[:3], clean[:3], strict=True):
        assert one is other is None or same_bits(one, other)
    assert all(one is None or bool(one.isfinite().all()) for one in ours[3:])


@pytest.mark.parametrize("name", ["causal", "padding", "thd", "post_scale"])
def test_dropout_is_repeated_by_seed_and_offset(name: str) -> None:
    desc = desc_of(name, dropout=0.25)
    tensors, keywords = call_of(desc, 130, 130)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    run = bound(desc)
    expected = run(*placed, **given)[0]
    assert same_bits(run(*placed, **given)[0], expected)
    for change in ((1, 0), (0, 1)):
        other = given | {"rng": given["rng"] + torch.tensor(change)}
        assert not torch.equal(run(*placed, **other)[0], expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_captured_graph_computes_the_same(name: str) -> None:
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 130, 130)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    run, back = bound(desc), bound(AttentionBackwardDesc(desc))
    grad = torch.randn_like(run(*placed, **given)[0])

    def step() -> tuple[Any, Any]:
        forward = run(*placed, **given)
        return forward, back(grad, *placed, *forward[:2], **given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward, grads = step()
    for x in placed:
        x.copy_(x.flip(0))
    graph.replay()
    expected, expected_grads = step()
    assert same_bits(forward[0], expected[0])
    for one, other in zip(grads, expected_grads, strict=True):
        assert one is other is None or torch.allclose(
            one.float(), other.float(), rtol=2**-6, atol=2**-6
        )


@pytest.mark.parametrize("name", ["causal", "padding", "thd"])
def test_a_side_stream_waits_for_its_own_inputs_alone(name: str) -> None:
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 130, 130)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    expected = bound(desc)(*placed, **given)[0]
    empty = tuple(torch.zeros_like(x) for x in placed)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = tuple(one.copy_(x) for one, x in zip(empty, placed, strict=True))
        ours = bound(desc)(*late, **given)[0]
    stream.synchronize()
    assert same_bits(ours, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", ["causal", "padding", "thd", "learnable"])
def test_a_second_device_computes_the_same(name: str) -> None:
    desc, other = desc_of(name), torch.device("cuda", 1)
    tensors, keywords = call_of(desc, 130, 130)
    expected = bound(desc)(*(x.to(DEVICE) for x in tensors), **here(keywords))[0]
    given = {
        key: one.to(other) if isinstance(one, torch.Tensor) and key != "rng" else one
        for key, one in keywords.items()
    }
    run = backend("cuda").bind(desc, other)
    ours = run(*(x.to(other) for x in tensors), **given)[0]
    assert ours.device == other
    assert same_bits(ours.to(DEVICE), expected)


@pytest.mark.parametrize("name", ["causal", "padding", "thd"])
def test_nothing_waits_for_the_device(name: str) -> None:
    desc = desc_of(name)
    tensors, keywords = call_of(desc, 130, 130)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    both_ways(desc, placed, given, DEVICE)
    run, back = bound(desc), bound(AttentionBackwardDesc(desc))
    grad = torch.zeros_like(run(*placed, **given)[0])
    with nothing_waits():
        forward = run(*placed, **given)
        back(grad, *placed, *forward[:2], **given)


def test_offsets_that_are_too_large_read_no_row_outside() -> None:
    desc = desc_of("thd")
    tensors, keywords = call_of(desc, 130, 130)
    placed, given = tuple(x.to(DEVICE) for x in tensors), here(keywords)
    given["cu_seqlens_kv"] = given["cu_seqlens_kv"] + 2**30
    out = bound(desc)(*placed, **given)[0]
    torch.cuda.synchronize()
    assert not bool(out.any())


@pytest.mark.parametrize("name", FULL)
def test_operands_of_another_shape_are_refused(name: str) -> None:
    desc = desc_of("causal")
    tensors, _ = call_of(desc, 64, 64)
    placed = {key: x.to(DEVICE) for key, x in zip(FULL, tensors, strict=True)}
    placed[name] = placed[name][..., :-8]
    with pytest.raises(OperandError, match="expected q"):
        bound(desc)(*placed.values())


def test_declined_attention_has_reasons() -> None:
    cases = {
        "cap of logits": {"softcap": 2.0},
        "ALiBi": {"bias": "alibi"},
        "multiples of 8": {"head_dim": 60},
        "float32": {"dtype": torch.float32},
        "bottom right": {"bias": "post_scale", "bottom_right": True},
        "beside a sink": {"max_logit": True, "softmax": "learnable"},
    }
    for reason, options in cases.items():
        said = backend("cuda").unsupported(dataclasses.replace(BASE, **options), DEVICE)
        assert said is not None
        assert reason in said
