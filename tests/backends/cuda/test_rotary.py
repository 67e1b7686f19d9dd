"""The native rotary embedding: its bits, positions and sequences; test_sizes.py has its sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import ATTENTION_LAYOUTS, OperandError, PackedRotaryDesc, RotaryDesc
from fp8core.conformance.compare import ulp, within
from fp8core_backends.cuda import native
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, backend, nothing_waits, same_bits

on_device = pytest.mark.needs_accelerator("cuda")
CPU, F64 = torch.device("cpu"), torch.float64
FLAGS = tuple(itertools.product((False, True), repeat=2))
# Of a sine, a cosine, two products and a sum, as a share of the magnitudes of the pair.
ROUNDINGS = 2.0**-22
# Head size and rotated elements: in vectors, and one by one.
EITHER_WAY = ((24, 16), (10, 8))
EMPTY = ((0, 2, 2, 8, 8), (3, 0, 2, 8, 8), (3, 2, 0, 8, 8))


def drawn(layout: str, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return x of sizes (sequence, batch, heads, head size) in ``layout``, with a few decades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes, generator=generator)
    x *= 10.0 ** (4 * torch.rand(sizes[0], 1, 1, 1, generator=generator) - 2)
    x = x if layout == "sbhd" else x.transpose(0, 1).contiguous()
    x = x.flatten(0, 1) if layout == "thd" else x
    return x.to(dtype).to(DEVICE)


def angles(positions: int, rotated: int) -> torch.Tensor:
    """Return angles of thousandths of a turn and of many turns, those of a pair not the same."""
    factors = 10000.0 ** (-torch.arange(rotated) / max(rotated, 1))
    return (torch.arange(positions)[:, None] * factors)[:, None, None, :].to(DEVICE)


def spans(layout: str, length: int, batch: int) -> dict[str, torch.Tensor]:
    """Return start positions for each sequence, and in thd where the sequences are."""
    given = {"start_positions": torch.arange(batch).flip(0) * 3}
    if layout == "thd":
        given["cu_seqlens"] = torch.arange(batch + 1) * length
    return {name: one.to(torch.int32).to(DEVICE) for name, one in given.items()}


def zeros(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16, device=DEVICE)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rotary(desc: RotaryDesc, *given: Any, **named: Any) -> torch.Tensor:
    y: torch.Tensor = backend("cuda").bind(desc, DEVICE)(*given, **named)
    return y


def pair_sizes(desc: RotaryDesc, x: torch.Tensor, rotated: int) -> torch.Tensor:
    """Return the magnitudes that are added up in each element of y; 0 where it is a copy."""
    size, part = torch.zeros_like(x), x[..., :rotated].abs()
    if desc.interleaved:
        size[..., :rotated] = part.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    else:
        size[..., :rotated] = (part[..., : rotated // 2] + part[..., rotated // 2 :]).repeat(
            *[1] * (x.dim() - 1), 2
        )
    return size


def check(desc: RotaryDesc, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> torch.Tensor:
    """Compare with the reference in float64 on the CPU; return y."""
    inputs = (x, freqs, *named.values())
    before = [one.clone() for one in inputs]
    y = rotary(desc, x, freqs, **named)
    wide, on_cpu = x.cpu().double(), {name: one.cpu() for name, one in named.items()}
    run = backend("reference").bind(replace(desc, dtype=F64), CPU)
    expected = run(wide, freqs.cpu(), **on_cpu)
    assert (y.dtype, y.device) == (desc.dtype, DEVICE)
    assert y.is_contiguous()
    size = pair_sizes(desc, wide, freqs.shape[-1])
    bound = ROUNDINGS * size + ulp(expected, desc.dtype) * (size > 0)
    within(f"{desc} of {list(x.shape)} {x.stride()}", y, expected, bound)
    assert all(map(same_bits, inputs, before)), "an input was written"
    return y


@on_device
@pytest.mark.parametrize("size", [16, 5])
def test_heads_of_which_nothing_is_rotated_are_copied(size: int) -> None:
    x = drawn("sbhd", (3, 2, 2, size), torch.bfloat16)
    for view in (x, x.transpose(0, 2)):
        assert same_bits(rotary(RotaryDesc(x.dtype, "sbhd"), view, angles(3, 0)), view)


@on_device
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_of_nothing_there_is_nothing_to_rotate(layout: str) -> None:
    for *sizes, rotated in EMPTY:
        x = drawn(layout, tuple(sizes), torch.float16)
        named = spans(layout, *sizes[:2])
        check(RotaryDesc(torch.float16, layout), x, angles(9, rotated), **named)


@on_device
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_bits_are_those_of_torchs_operators(layout: str) -> None:
    """Their sine and cosine on this device are CUDA's as well."""
    of_sizes = ((64, 2, 8, 128, 128), (9, 3, 2, 80, 32), (5, 2, 3, 33, 6))
    for flags, dtype, (*sizes, rotated) in itertools.product(FLAGS, DTYPES, of_sizes):
        desc = RotaryDesc(dtype, layout, *flags)
        x, freqs = drawn(layout, tuple(sizes), dtype), angles(80, rotated)
        named = spans(layout, *sizes[:2])
        theirs = backend("reference").bind(desc, DEVICE)(x, freqs, **named)
        assert same_bits(rotary(desc, x, freqs, **named), theirs), desc


@on_device
@pytest.mark.parametrize("interleaved", [False, True])
def test_large_angles_are_reduced_exactly(interleaved: bool) -> None:
    """Beyond 105615 a sine takes another way; a long context has such angles."""
    freqs = torch.logspace(0, 30, 64)[None].repeat(8, 1)[:, None, None, :].to(DEVICE)
    freqs[4:] *= -1.7
    x = drawn("sbhd", (8, 2, 4, 64), torch.float32)
    check(RotaryDesc(torch.float32, "sbhd", interleaved), x, freqs)


BOUNDS = (
    *([0, 0, 2, 2, 9, 12], [3, 4, 4, 11], [0], [5], [0, 12], [0, 1100, 1100, 1103], [7, 7]),
    *([*range(34)], [*range(33)], [*range(32)], [*range(0, 3300, 3)], [5] * 40 + [*range(5, 70)]),
    *([*range(1025)], [0] * 2000 + [9], [0, 5, 5, 70]),
)


@on_device
@pytest.mark.parametrize(("size", "rotated"), EITHER_WAY)
def test_each_token_has_its_position_in_its_sequence(size: int, rotated: int) -> None:
    for bounds in BOUNDS:
        tokens = max(12, bounds[-1] + 3)
        x = drawn("sbhd", (tokens, 1, 2, size), torch.bfloat16)[:, 0]
        cu_seqlens = integers(*bounds)
        starts = torch.arange(len(bounds) - 1, dtype=torch.int32, device=DEVICE)
        desc, freqs = RotaryDesc(torch.bfloat16, "thd"), angles(tokens + len(bounds), rotated)
        check(desc, x, freqs, cu_seqlens=cu_seqlens)
        check(desc, x, freqs, cu_seqlens=cu_seqlens, start_positions=starts)


@on_device
@pytest.mark.parametrize(("size", "rotated"), EITHER_WAY)
def test_a_token_of_no_sequence_is_zero_whatever_it_holds(size: int, rotated: int) -> None:
    x = drawn("sbhd", (12, 1, 3, size), torch.float16)[:, 0]
    x[:2], x[9:] = math.nan, math.inf
    cu_seqlens = integers(2, 5, 9)
    for flags in FLAGS:
        desc = RotaryDesc(x.dtype, "thd", *flags)
        y = check(desc, x, angles(4, rotated), cu_seqlens=cu_seqlens)
        assert same_bits(y[:2], torch.zeros_like(y[:2]))
        assert same_bits(y[9:], torch.zeros_like(y[9:]))


@on_device
def test_sequences_that_are_none_harm_nothing() -> None:
    x = drawn("sbhd", (12, 1, 2, 16), torch.bfloat16)[:, 0]
    ends = ((40, 0, -5, 2**31 - 1), (-(2**31), 2**31 - 1), (*[60] * 40, 0))
    for bounds in ((-7, 50), (9, 3, 5), *ends):
        starts = torch.full((len(bounds) - 1,), 2**31 - 1, dtype=torch.int32, device=DEVICE)
        named = {"cu_seqlens": integers(*bounds), "start_positions": starts}
        y = rotary(RotaryDesc(x.dtype, "thd"), x, angles(4, 8), **named)
        torch.cuda.synchronize()
        assert y.shape == x.shape, bounds


@on_device
def test_results_beyond_float16_are_infinite() -> None:
    x = torch.full((4, 1, 2, 16), 65504.0, dtype=torch.float16, device=DEVICE)
    freqs = torch.full((4, 1, 1, 16), -math.pi / 4, device=DEVICE)
    y = rotary(RotaryDesc(torch.float16, "sbhd"), x, freqs)
    assert y[..., :8].isposinf().all()


@on_device
def test_a_graph_replays_with_other_positions_and_nothing_waits() -> None:
    x, freqs = drawn("thd", (64, 2, 4, 64), torch.bfloat16), angles(200, 64)
    desc, named = RotaryDesc(x.dtype, "thd"), spans("thd", 64, 2)
    run = backend("cuda").bind(desc, DEVICE)
    run(x, freqs, **named)
    with nothing_waits():
        run(x, freqs, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, freqs, **named)
    named["start_positions"].fill_(70)
    named["cu_seqlens"][1] = 100
    graph.replay()
    assert same_bits(y, run(x, freqs, **named))


@on_device
@pytest.mark.parametrize("size", [128, 127])
def test_offsets_that_32_bits_do_not_hold_are_reached(size: int) -> None:
    tokens, heads = 40_000, 424
    if torch.cuda.mem_get_info(DEVICE)[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free device memory")
    x = torch.zeros(tokens, 1, heads, size, dtype=torch.bfloat16, device=DEVICE)
    assert x.numel() > 2**31
    x[-2:] = torch.randn(2, 1, heads, size, device=DEVICE).bfloat16()
    freqs, desc = angles(tokens, 64), RotaryDesc(x.dtype, "sbhd")
    y = rotary(desc, x, freqs)
    last = rotary(desc, x[-2:].clone(), freqs, start_positions=integers(tokens - 2))
    assert same_bits(y[-2:], last)
    assert not y[:-2].any()


@on_device
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_functions_and_gradients_run_this_kernel(tensor_format: str) -> None:
    layer = fp8core.RotaryPositionEmbedding(64, device=DEVICE)
    freqs = layer(48)
    qkv = torch.randn(48, 2, 4, 4 * 64, device=DEVICE, dtype=torch.bfloat16)
    qkv = qkv if tensor_format == "sbhd" else qkv.transpose(0, 1)
    query = qkv[..., : 2 * 64].unflatten(-1, (2, 64)).flatten(2, 3).detach().requires_grad_()
    y = fp8core.apply_rotary_pos_emb(query, freqs, tensor_format)
    grad = torch.randn_like(y)
    y.backward(grad)
    desc = RotaryDesc(torch.bfloat16, tensor_format)
    assert same_bits(y, rotary(desc, query.detach(), freqs))
    assert same_bits(query.grad, rotary(replace(desc, inverse=True), grad, freqs))


# Sequence, batch, query heads, groups, head size, rotated elements.
PACKED = (
    *((64, 2, 8, 2, 128, 128), (1, 16, 32, 8, 128, 128), (9, 3, 4, 4, 80, 32), (5, 2, 3, 1, 33, 6)),
    *((3, 2, 2, 1, 1100, 1030), (3, 2, 2, 2, 16, 0), (0, 2, 2, 1, 8, 8), (3, 0, 2, 1, 8, 8)),
)


@on_device
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_packed_heads_have_the_bits_of_each(layout: str) -> None:
    for flags, dtype, sizes in itertools.product(FLAGS, DTYPES, PACKED):
        length, batch, heads, groups, size, rotated = sizes
        desc, named = RotaryDesc(dtype, layout, *flags), spans(layout, length, batch)
        if layout == "thd":  # tokens of no sequence are before and behind
            named["cu_seqlens"] = torch.clamp(named["cu_seqlens"], 1, max(1, length * batch - 1))
        rows = drawn(layout, (length, batch, heads + 2 * groups, size), dtype)
        rows[..., -1, :1], rows[..., -1, -1:] = math.nan, -0.0
        freqs, of_each = angles(80, rotated), [heads, groups, groups]
        q, k, v = rows.split_with_sizes(of_each, -2)
        expected = torch.cat(
            (rotary(desc, q, freqs, **named), rotary(desc, k, freqs, **named), v), -2
        )
        whole = PackedRotaryDesc.of(desc)
        for parts in ((q, k, v), [x.contiguous() for x in (q, k, v)], [q, k.contiguous(), v]):
            y = rotary(whole, parts[0], freqs, k=parts[1], v=parts[2], **named)
            assert y.is_contiguous()
            assert same_bits(y, expected), (whole, sizes)
        if size % 8 == 0 and v.numel():  # one of the three begins beside a vector
            odd = v.new_empty(v.numel() + 1)[1:].view(v.shape).copy_(v)
            assert same_bits(rotary(whole, q, freqs, k=k, v=odd, **named), expected)


@on_device
def test_packed_heads_in_a_graph_take_other_positions() -> None:
    rows, freqs = drawn("bshd", (1, 4, 12, 64), torch.bfloat16), angles(200, 64)
    desc, starts = PackedRotaryDesc(rows.dtype, "bshd"), integers(0, 3, 9, 50)
    q, k, v = rows.split_with_sizes([8, 2, 2], -2)
    run = partial(rotary, desc, q, freqs, k=k, v=v, start_positions=starts)
    with nothing_waits():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    starts += 70
    graph.replay()
    assert same_bits(y, run())


@on_device
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_that_do_not_fit_are_refused_by_name(name: str) -> None:
    desc = PackedRotaryDesc(torch.bfloat16, "sbhd")
    fitting = {"k": zeros(3, 2, 1, 8), "v": zeros(3, 2, 1, 8)}
    wrong = (
        None,
        zeros(3, 2, 0, 8),
        zeros(3, 1, 1, 8),
        zeros(3, 2, 1, 16),
        zeros(3, 2, 1, 8).float(),
        zeros(3, 2, 8),
    )
    for part in (*wrong, zeros(3, 2, 1, 8).cpu()):
        with pytest.raises(OperandError, match=f"rotary: {name} is"):
            rotary(desc, zeros(3, 2, 2, 8), angles(4, 8), **{**fitting, name: part})


@on_device
def test_the_native_entry_compares_keys_and_values_with_queries() -> None:
    library, memory = native.load(), zeros(8, 1, 8, 64).data_ptr()
    run = library.Rotary(library.RotaryLayout.sbhd, False, False, library.InputType.bfloat16, 0)
    x, part = (memory, 8, 1, 4, 64, 256, 256, 64, 1), (memory, 8, 1, 2, 64, 128, 128, 64, 1)
    for at, size in ((1, 7), (2, 2), (3, 0), (4, 32)):
        wrong = (*part[:at], size, *part[at + 1 :])
        for parts in ((*wrong, *part), (*part, *wrong)):
            with pytest.raises(ValueError, match="heads of the same tokens and size"):
                run((*x, memory, 8, 64, 0, 0, 1, memory, *parts), 0)


# The reason, and the operands that it is given for; by default those of two sequences of three.
WRONG: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "bound for": lambda: {"x": zeros(3, 2, 2, 8).float()},
    "expected 4 dimensions": lambda: {"x": zeros(3, 2, 8)},
    "freqs is torch.float64": lambda: {"freqs": angles(4, 8).double()},
    r"freqs is torch.float32 \[4, 8\]": lambda: {"freqs": angles(4, 8)[:, 0, 0]},
    "r even and at most 8": lambda: {"freqs": angles(4, 10)},
    "r even and": lambda: {"freqs": angles(4, 7)},
    "on cpu; expected torch.float32": lambda: {"freqs": angles(4, 8).cpu()},
    "there alone": lambda: {"cu_seqlens": integers(0, 3)},
    r"start_positions is torch.int32 \[3\]": lambda: {"start_positions": integers(0, 1, 2)},
    "start_positions is torch.int64": lambda: {"start_positions": integers(0, 1).long()},
    r"\[2\] on cpu": lambda: {"start_positions": integers(0, 1).cpu()},
}


@on_device
@pytest.mark.parametrize("reason", WRONG)
def test_wrong_operands_are_refused_by_name(reason: str) -> None:
    given = {"x": zeros(3, 2, 2, 8), "freqs": angles(4, 8), **WRONG[reason]()}
    with pytest.raises(OperandError, match=reason):
        rotary(RotaryDesc(torch.bfloat16, "sbhd"), given.pop("x"), given.pop("freqs"), **given)


@on_device
def test_packed_sequences_take_their_bounds() -> None:
    run = backend("cuda").bind(RotaryDesc(torch.bfloat16, "thd"), DEVICE)
    for bounds in (None, integers()):
        with pytest.raises(OperandError, match="cu_seqlens"):
            run(zeros(3, 2, 8), angles(4, 8), cu_seqlens=bounds)
