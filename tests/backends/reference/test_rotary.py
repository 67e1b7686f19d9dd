"""Rotary embedding of the reference, against complex numbers and Hugging Face's Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from fp8core.backend_api import ATTENTION_LAYOUTS, RotaryDesc
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
F64 = torch.float64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rotary(desc: RotaryDesc, *given: Any, **named: Any) -> torch.Tensor:
    y: torch.Tensor = ReferenceBackend().bind(desc, CPU)(*given, **named)
    return y


def angles(positions: int, pairs: int) -> torch.Tensor:
    """Angles ``[positions, pairs]``, each of them another."""
    return torch.arange(positions)[:, None] * 3.0 ** -torch.arange(pairs)


def table(by_pair: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The operand ``freqs``, with the angle of each pair for both of its elements."""
    both = by_pair.repeat_interleave(2, 1) if interleaved else torch.cat((by_pair, by_pair), 1)
    return both[:, None, None, :]


def by_complex_numbers(x: torch.Tensor, by_pair: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [s, b, h, d]``: each pair a complex number, multiplied by one of the angle; float64."""
    dims = (-1, 2) if interleaved else (2, -1)
    parts = x.double().unflatten(-1, dims)
    parts = parts if interleaved else parts.transpose(-1, -2)
    turned = (
        torch.view_as_complex(parts.contiguous())
        * torch.polar(torch.ones_like(by_pair, dtype=F64), by_pair.double())[:, None, None]
    )
    back = torch.view_as_real(turned)
    return (back if interleaved else back.transpose(-1, -2)).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_times_that_of_its_angle(interleaved: bool) -> None:
    x = torch.randn(9, 2, 3, 8, dtype=F64)
    by_pair = angles(9, 4)
    y = rotary(RotaryDesc(F64, "sbhd", interleaved), x, table(by_pair, interleaved))
    torch.testing.assert_close(y, by_complex_numbers(x, by_pair, interleaved), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_narrow_dtype_is_rounded_once(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(9, 2, 3, 8).to(dtype)
    by_pair = angles(9, 4)
    y = rotary(RotaryDesc(dtype, "sbhd", interleaved), x, table(by_pair, interleaved))
    want = by_complex_numbers(x, by_pair, interleaved)
    # half a step of the dtype at the value, and four float32 roundings of both terms
    bound = want.abs() * torch.finfo(dtype).eps / 2 + 4 * 2.0**-24 * 2 * x.double().abs().amax()
    assert y.dtype == dtype
    assert bool(((y.double() - want).abs() <= bound).all())


def test_hugging_face_rotates_the_same() -> None:
    x = torch.randn(2, 9, 3, 8)  # bshd
    freqs = table(angles(9, 4), interleaved=False)
    cos, sin = freqs.cos().reshape(1, 9, 8), freqs.sin().reshape(1, 9, 8)
    want, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotary(RotaryDesc(torch.float32, "bshd"), x, freqs), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_is_the_transposed_map_whatever_the_angles(interleaved: bool) -> None:
    freqs = torch.randn(4, 1, 1, 6, dtype=torch.float32)
    desc = RotaryDesc(F64, "sbhd", interleaved)
    inverse = RotaryDesc(F64, "sbhd", interleaved, inverse=True)
    basis = torch.eye(8, dtype=F64).reshape(1, 8, 1, 8).expand(4, 8, 1, 8)
    there, back = rotary(desc, basis, freqs), rotary(inverse, basis, freqs)
    assert torch.equal(there.transpose(1, 3), back)


def test_layouts_are_the_same_numbers_in_another_order() -> None:
    x, freqs = torch.randn(5, 2, 3, 8), table(angles(9, 4), interleaved=False)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32)
    sbhd, bshd, thd = (RotaryDesc(torch.float32, layout) for layout in ATTENTION_LAYOUTS)
    y = rotary(sbhd, x, freqs, start_positions=starts)
    batch_first = x.transpose(0, 1)
    assert torch.equal(rotary(bshd, batch_first, freqs, start_positions=starts), y.transpose(0, 1))
    packed = batch_first.reshape(10, 3, 8)
    turned = rotary(thd, packed, freqs, start_positions=starts, cu_seqlens=cu_seqlens)
    assert torch.equal(turned, y.transpose(0, 1).reshape(10, 3, 8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    reason = ReferenceBackend().unsupported(RotaryDesc(dtype, "sbhd"), CPU)
    assert "no rotary embedding of" in (reason or "")


def test_another_layout_is_refused() -> None:
    reason = ReferenceBackend().unsupported(RotaryDesc(F64, "bhsd"), CPU)
    assert reason == "no layout 'bhsd'"
