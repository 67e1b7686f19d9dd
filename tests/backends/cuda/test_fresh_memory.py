"""Results on a side stream, and in memory that held something else before: every byte is written.

The kit's law of uninitialised memory fills what torch's operators allocate; kernels' results and
workspaces come from torch's allocator directly, so that here the memory of the device is filled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeDesc,
    RotaryDesc,
)
from fp8core.conformance.calls import Case
from fp8core.conformance.laws import arguments
from fp8core.conformance.laws.every_op import outcome
from fp8core.torch_ops.private import pytree
from tests.backends.cuda.cuda_cases import DEVICE, same_bits, spec, subject

pytestmark = pytest.mark.needs_accelerator("cuda")
BF16, F32 = torch.bfloat16, torch.float32
RECIPES = ("delayed", "current", "rowwise", "vector", "square", "mx", "mx square")
# Bytes: more than all results of a call, and as torch keeps them apart, also in pieces below 1 MiB.
FILLED = (64 << 20, *[1 << 19] * 64)
# Rows of whole vectors, of cut ones, and of more than a block holds; the last row of tiles is cut.
SIZES = ((257, 1040), (257, 70), (130, 8192))


def casts() -> Iterator[QuantizeDesc]:
    for name in RECIPES:
        yield QuantizeDesc(BF16, spec(name), spec(name))
    fp4, turned, square = spec("fp4"), spec("fp4 transformed"), spec("fp4 square")
    random = (dataclasses.replace(one, stochastic=True) for one in (fp4, turned))
    for specs in ((fp4, turned), (square, square), tuple(random)):
        yield QuantizeDesc(BF16, *specs)


def producers() -> Iterator[OpDesc]:
    for kind in ("rmsnorm", "layernorm"):
        norm = NormDesc(kind, BF16, BF16, 1e-5)
        yield from (norm, AddNormDesc(norm), NormBackwardDesc(norm))
    for name, kind in itertools.product(
        ("silu", "gelu", "swiglu"), (ActivationDesc, ActivationBackwardDesc)
    ):
        yield kind(name, BF16, BF16)
    for layout in ATTENTION_LAYOUTS:
        yield RotaryDesc(BF16, layout)


def fusions() -> Iterator[FusedDesc]:
    for name in ("delayed", "current", "rowwise", "vector"):
        out = F32 if name == "delayed" else BF16
        cast = QuantizeDesc(out, spec(name), spec(name))
        yield FusedDesc(NormDesc("layernorm", BF16, out, 1e-5), cast)
        yield FusedDesc(NormDesc("rmsnorm", BF16, out, 1e-5), cast)
    names = (name for name in RECIPES if name != "square")
    kinds = (ActivationDesc, ActivationBackwardDesc)
    for name, activation, kind in itertools.product(names, ("gelu", "swiglu"), kinds):
        is_backward = kind is ActivationBackwardDesc
        out = F32 if name == "delayed" and not (is_backward and activation == "swiglu") else BF16
        cast = QuantizeDesc(out, spec(name), spec(name), sums=is_backward)
        yield FusedDesc(kind(activation, BF16, out), cast)


DESCS = [*casts(), *producers(), *fusions()]


def same(ours: Any, theirs: Any) -> bool:
    """Say whether two outcomes have the same bits."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True)
    return all(
        same_bits(one, other) if isinstance(one, torch.Tensor) else one is other
        for one, other in pairs
    )


@pytest.mark.parametrize("desc", DESCS, ids=str)
def test_every_byte_of_a_result_is_written(desc: OpDesc) -> None:
    for size in SIZES:
        outcomes = []
        for fill in (0x00, 0xFF):
            call = arguments(subject(), desc, Case(size=size))
            torch.cuda.empty_cache()
            pieces = [torch.full((n,), fill, dtype=torch.uint8, device=DEVICE) for n in FILLED]
            del pieces  # to torch's allocator, which hands this memory out again
            outcomes.append(outcome(call, call.run(subject())))
        assert same(*outcomes), size


@pytest.mark.parametrize("desc", DESCS, ids=str)
def test_a_side_stream_gives_the_same(desc: OpDesc) -> None:
    call = arguments(subject(), desc, Case(size=(2048, 2048)))
    again = call.again()
    expected = outcome(call, call.run(subject()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = again.run(subject())
    torch.cuda.current_stream().wait_stream(stream)
    assert same(outcome(again, result), expected)
