"""Law 4 for rotary embedding: each pair turned by its own angles, within float32's roundings."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fp8core.backend_api import RotaryDesc
from fp8core.conformance.calls import arguments, rotary_angles, rotary_input
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_form, ulp, within
from fp8core.conformance.laws.pointwise import FUNCTION
from fp8core.conformance.subject import Subject, on_cpu

# Sequence, batch, heads, head size, and how many elements of a head are rotated.
SIZES = ((7, 3, 2, 10, 6), (4, 4, 4, 4, 4), (33, 2, 5, 64, 64), (5, 2, 3, 130, 32), (1, 1, 1, 2, 2))
EMPTY = ((0, 3, 2, 8, 8), (5, 0, 2, 8, 8))
LONG = ((4100, 1, 1, 4, 2), (1, 1100, 1, 4, 4), (2, 2, 530, 4, 2))
VERY_LONG = ((70000, 1, 1, 2, 2),)  # above 65535; in bfloat16 alone, which costs less


@law(4, "rotary", is_core=True)
def rotary_is_within_the_bound(subject: Subject, desc: RotaryDesc) -> float:
    """The pairs are turned in float32, also by angles of many turns, and the rest is copied."""
    very_long = VERY_LONG if desc.dtype == torch.bfloat16 else ()
    worst = 0.0
    for *sizes, rotated in subject.sizes("rotary", *SIZES, *EMPTY, *LONG, *very_long):
        length, batch = sizes[:2]
        call = _Call(desc, tuple(sizes), rotated, length + 3)
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.arange(batch + 1, dtype=torch.int32) * length
        worst = max(worst, call.within_the_bound(subject, f"{sizes}, {rotated} rotated"))
    return worst


@law(4, "rotary")
def rotary_starts_at_the_given_positions(subject: Subject, desc: RotaryDesc) -> float:
    """Each sequence begins at its own position, the first and the last that there is among them."""
    worst = 0.0
    for *sizes, rotated in subject.sizes("rotary", *SIZES):
        length, batch = sizes[:2]
        call = _Call(desc, tuple(sizes), rotated, length + 2 * batch)
        starts = 2 * batch - torch.arange(batch, dtype=torch.int32).flip(0) * 2
        call.keywords["start_positions"] = starts
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.arange(batch + 1, dtype=torch.int32) * length
        worst = max(worst, call.within_the_bound(subject, f"{sizes} from {starts.tolist()}"))
    return worst


@law(4, "rotary", applies=lambda desc: desc.layout == "thd")
def rotary_of_sequences_of_any_length(subject: Subject, desc: RotaryDesc) -> float:
    """Positions begin anew in each sequence, also behind empty ones; a token of none has zeros."""
    worst = 0.0
    for bounds in ([0, 0, 2, 2, 9, 12], [3, 4, 4, 11], [0], [5], [0, 12], [0, 1100, 1100, 1103]):
        tokens = max(12, bounds[-1])
        call = _Call(desc, (tokens, 1, 2, 8), 8, max(12, tokens) + 4)
        call.keywords["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        worst = max(worst, call.within_the_bound(subject, f"cu_seqlens {bounds}"))
        starts = torch.arange(len(bounds) - 1, dtype=torch.int32).flip(0)
        call.keywords["start_positions"] = starts
        name = f"cu_seqlens {bounds} from {starts.tolist()}"
        worst = max(worst, call.within_the_bound(subject, name))
    return worst


@law(4, "rotary")
def rotary_is_nan_at_positions_without_angles(subject: Subject, desc: RotaryDesc) -> float:
    """A position below 0 or behind the last angle gives NaN; the rest of the head is copied."""
    worst = 0.0
    far = torch.iinfo(torch.int32).max - 16
    for first in (-3, 5, -far, far):
        call = _Call(desc, (4, 2, 3, 10), 6, 8)
        call.keywords["start_positions"] = torch.tensor([first, 1], dtype=torch.int32)
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.tensor([0, 4, 8], dtype=torch.int32)
        worst = max(worst, call.within_the_bound(subject, f"sequences from {first} and 1"))
    return worst


@law(4, "rotary")
def rotary_passes_on_nan_and_inf(subject: Subject, desc: RotaryDesc) -> None:
    """A NaN or inf of x stays in its pair, or in its element where nothing is rotated."""
    for value in (torch.nan, torch.inf):
        call = arguments(subject, desc)
        x = call.arguments[0]
        plain = on_cpu(call.run(subject))
        for element in (1, x.shape[-1] - 1):
            spoilt = x.clone()
            spoilt[2, ..., 0, element] = value
            y = on_cpu(subject.run(desc, spoilt, *call.arguments[1:], **call.keywords))
            size = call.arguments[1].shape[-1]
            pair = {element}
            if element < size:
                pair = {0, 1} if desc.interleaved else {1, 1 + size // 2}
            outside = [at for at in range(x.shape[-1]) if at not in pair]
            name = f"{value} in element {element}"
            require(
                torch.equal(y[..., outside], plain[..., outside]), f"{name} changes other elements"
            )
            hit = ~y[2, ..., 0, sorted(pair)].isfinite()
            require(bool(hit.all()), f"{name} is lost")


class _Call:
    """A call of ``desc`` with x of ``sizes`` and angles of ``positions`` for ``rotated`` elements.

    ``keywords`` may be added to; all tensors are on the CPU.
    """

    def __init__(
        self, desc: RotaryDesc, sizes: tuple[int, ...], rotated: int, positions: int
    ) -> None:
        self.desc = desc
        self.x = rotary_input(desc, sizes, 31)
        self.freqs = rotary_angles(positions, rotated)
        self.keywords: dict[str, Any] = {}

    def within_the_bound(self, subject: Subject, name: str) -> float:
        """Require the backend's result to be within the bound of the formula in float64."""
        positional, keywords = subject.here(((self.x, self.freqs), self.keywords))
        y = subject.run(self.desc, *positional, **keywords)
        same_form(f"y of {name}", y, self.x)
        require(y.is_contiguous(), f"y of {name} is not contiguous")
        expected, size = self._in_float64()
        # The parts that are copied, and zeros, are exact: their size is 0.
        bound = FUNCTION * size + ulp(expected, self.desc.dtype) * (size > 0)
        return within(f"y of {name}", y, expected, bound)

    def _in_float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated x, and the magnitudes that its rounding errors grow with."""
        x, rotated = self.x.double(), self.freqs.shape[-1]
        is_token, positions = self._positions()
        table = self.freqs.double().reshape(-1, rotated)
        is_valid = (positions >= 0) & (positions < len(table))
        angles = table[torch.where(is_valid, positions, 0)]
        angles = torch.where(is_valid[..., None], angles, torch.nan)[..., None, :]
        first, second = self._pairs(rotated)
        a, b, at_a, at_b = x[..., first], x[..., second], angles[..., first], angles[..., second]
        y, size = x.clone(), torch.zeros_like(x)
        if self.desc.inverse:
            y[..., first] = a * at_a.cos() + b * at_b.sin()
            y[..., second] = b * at_b.cos() - a * at_a.sin()
        else:
            y[..., first] = a * at_a.cos() - b * at_a.sin()
            y[..., second] = b * at_b.cos() + a * at_b.sin()
        size[..., first] = size[..., second] = a.abs() + b.abs()
        is_token = is_token[..., None, None]
        return torch.where(is_token, y, 0), torch.where(is_token, size, 0)

    def _pairs(self, rotated: int) -> tuple[list[int], list[int]]:
        """Return the first and the second elements of the pairs."""
        if self.desc.interleaved:
            return [*range(0, rotated, 2)], [*range(1, rotated, 2)]
        return [*range(rotated // 2)], [*range(rotated // 2, rotated)]

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token whether it is of a sequence, and its position in it."""
        layout, sizes = self.desc.layout, self.x.shape[:-2]
        positions = torch.zeros(sizes, dtype=torch.int64)
        is_token = torch.ones(sizes, dtype=torch.bool)
        starts = self.keywords.get("start_positions")
        if layout != "thd":
            view, is_seen = (positions if layout == "bshd" else positions.t()), is_token
            view += torch.arange(view.shape[1])
            if starts is not None:
                view += starts[:, None]
            return is_seen, positions
        bounds = self.keywords["cu_seqlens"].tolist()
        is_token[:] = False
        for at, (begin, end) in enumerate(itertools.pairwise(bounds)):
            is_token[begin:end] = True
            first = 0 if starts is None else int(starts[at])
            positions[begin:end] = torch.arange(first, first + end - begin)
        return is_token, positions
