"""Casts of strided tensors, of new memory and on streams; test_sizes.py has their sizes."""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import Quantized, QuantizeDesc, ScaleUpdateDesc
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    backend,
    differs,
    same_bits,
    spec,
    values,
)

pytestmark = pytest.mark.needs_accelerator("cuda")
RECIPES = ("delayed", "current", "rowwise", "vector", "square")


def both(x: torch.Tensor, desc: QuantizeDesc) -> tuple[list[Quantized], list[torch.Tensor]]:
    """Quantize by the CUDA and by the reference backend; return what they made and recorded."""
    made, recorded = [], []
    delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    for name in ("cuda", "reference"):
        amax = torch.full((1,), 0.25, device=DEVICE)
        given = {"scale": torch.full((1,), 3.7, device=DEVICE), "amax_out": amax} if delayed else {}
        made.append(backend(name).bind(desc, DEVICE)(x, **given))
        recorded.append(amax)
    return made, recorded


def check(x: torch.Tensor, desc: QuantizeDesc) -> None:
    before = x.clone()
    (ours, theirs), (our_amax, their_amax) = both(x, desc)
    assert differs(ours.rowwise, theirs.rowwise) is None, f"rowwise {desc} {list(x.shape)}"
    assert differs(ours.columnwise, theirs.columnwise) is None, f"columnwise {desc} {list(x.shape)}"
    assert same_bits(our_amax, their_amax), desc
    assert same_bits(x, before), "the input was written"


@pytest.mark.parametrize("name", RECIPES)
def test_strided_and_misaligned_inputs_equal_the_reference(name: str) -> None:
    own = spec(name)
    whole = values("wide", (520, 776), torch.bfloat16)
    parts = [whole.t(), whole[1:, 1:], whole[:, 8:264], whole[::2], whole[:, ::3], whole[3:4]]
    parts.append(torch.randn(1, 640, device=DEVICE).bfloat16().expand(256, 640))
    for x in parts:
        check(x, QuantizeDesc(torch.bfloat16, own, own))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scale_updates_equal_the_reference(algorithm: str) -> None:
    desc = ScaleUpdateDesc(algorithm)
    results = []
    for name in ("cuda", "reference"):
        torch.manual_seed(0)
        states = [
            (torch.rand(length, slots, device=DEVICE) * 10, torch.ones(slots, device=DEVICE))
            for length in (1, 2, 5, 1024, 3000)
            for slots in (1, 3, 40)
        ] * 6  # more than one launch takes
        states = [(history.clone(), scale.clone()) for history, scale in states]
        for number, (history, _) in enumerate(states):
            history[0, 0] = (0.0, float("inf"), float("nan"), 1e-45, 3.0)[number % 5]
            if number % 7 == 0:
                history[-1, -1] = float("inf")
        targets = [torch.full_like(scale, 448.0) for _, scale in states]
        run = backend(name).bind(desc, DEVICE)
        counts = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in states]
        run([h for h, _ in states], [s for _, s in states], targets, counts)
        results.append([*(tensor for state in states for tensor in state), torch.cat(counts)])
    for ours, theirs in zip(*results, strict=True):
        assert same_bits(ours, theirs)
