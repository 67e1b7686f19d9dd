"""Gradients of gate and up, two tensors that are computed and cast in one launch: bit for bit the
gradient of the activation, and the reference's casts of its halves."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import GATED, ColumnSumsDesc, FusedDesc, QuantizeDesc
from fp8core.chain.activation import activation_shape
from fp8core.modules.splice import Splice
from tests.backends.cuda.cuda_cases import DEVICE, KERNELS, backend, differs, same_bits, spec
from tests.backends.cuda.test_activation import drawn_for, fused
from tests.backends.cuda.test_repeated import assert_equal, without_recordings
from tests.pairs import pairs

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
RECIPES = ("delayed", "current", "vector")
NAMES = tuple(name for name in KERNELS if name in GATED)
# Whole and partial tiles, one row, halves that no vector reads, and none of blocks.
SHAPES = ((1, 128), (130, 264), (256, 256), (129, 384), (33, 20), (5, 7), (0, 16), (16, 0))


def halves(desc: FusedDesc) -> FusedDesc:
    return replace(desc, quantize=replace(desc.quantize, split=True))


def slots(own: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the keywords of both casts; the second amax is exceeded by few results."""

    def pair(first: float, second: float, dtype: torch.dtype = torch.float32) -> Any:
        return tuple(
            [torch.full((1,), value, device=DEVICE).to(dtype) for value in (first, second)]
        )

    counts = {"nonfinite_out": pair(7, 11, torch.int64)}
    return counts | ({"scale": pair(3.7, 0.21), "amax_out": pair(0.25, 5.0)} if own.delayed else {})


def check(desc: FusedDesc, tensors: list[torch.Tensor]) -> None:
    own = desc.quantize.rowwise or desc.quantize.columnwise
    ours, theirs = slots(own), slots(own)
    before = [one.clone() for one in tensors]
    pair, *sums = backend("cuda").bind(halves(desc), DEVICE)(*tensors, **ours)
    value = backend("cuda").bind(desc.producer, DEVICE)(*tensors)
    cast = backend("reference").bind(replace(desc.quantize, sums=False), DEVICE)
    text = f"{desc} of {[list(one.shape) for one in tensors]}"
    for at, half in enumerate(value.chunk(2, 1)):
        expected = cast(half, **{name: both[at] for name, both in theirs.items()})
        for one, other, side in zip(pair[at], expected, ("rowwise", "columnwise"), strict=True):
            assert differs(one, other) is None, f"{side} of half {at}: {text}"
    for name, both in ours.items():
        for at, one in enumerate(both):
            other = theirs[name][at]
            assert same_bits(one, other), f"{name} of half {at}, {one} for {other}: {text}"
    assert len(sums) == desc.quantize.sums
    if desc.quantize.sums:
        apart = backend("cuda").bind(ColumnSumsDesc(value.dtype), DEVICE)(value)
        assert same_bits(sums[0], apart), f"column sums {text}"
    for one, other in zip(tensors, before, strict=True):
        assert same_bits(one, other), "an input was written"


@pytest.mark.parametrize("name", NAMES)
def test_every_gated_activation_equals_its_pair(name: str) -> None:
    for own_recipe, dtype, element in itertools.product(
        RECIPES, (torch.bfloat16, torch.float16), ("e4m3", "e5m2")
    ):
        desc = fused(name, spec(own_recipe, element), dtype, backward=True, sums=True)
        for shape in ((130, 264), (256, 256)):
            check(desc, drawn_for(name, *shape, dtype, backward=True))


@pytest.mark.parametrize("own_recipe", RECIPES)
def test_sizes_and_orientations_equal_the_pair(own_recipe: str) -> None:
    desc = fused("swiglu", spec(own_recipe, "e5m2"), torch.bfloat16, backward=True)
    for shape, cast, sums in itertools.product(
        SHAPES, (desc.quantize, *desc.quantize.halves()), (False, True)
    ):
        one = FusedDesc(desc.producer, replace(cast, sums=sums))
        if min(shape) or not sums:
            check(one, drawn_for("swiglu", *shape, torch.bfloat16, backward=True))


@pytest.mark.parametrize("own_recipe", RECIPES)
def test_large_tensors_equal_the_pair(own_recipe: str) -> None:
    desc = fused("swiglu", spec(own_recipe), torch.bfloat16, backward=True, sums=True)
    for rows, n in ((4096, 4096), (8200, 1408), (129, 28672)):
        check(desc, drawn_for("swiglu", rows, n, torch.bfloat16, backward=True))


@pytest.mark.parametrize("own_recipe", RECIPES)
def test_nan_and_inf_count_for_their_half(own_recipe: str) -> None:
    desc = fused("swiglu", spec(own_recipe, "e5m2"), torch.bfloat16, backward=True, sums=False)
    for rows, value, at in itertools.product((200, 1100), (math.nan, math.inf), ("x", "b", "grad")):
        grad, x = drawn_for("swiglu", rows, 384, torch.bfloat16, backward=True)
        if at == "grad":
            grad[rows // 2, 100] = grad[-1, -1] = value
        else:
            x[rows // 2, 3 if at == "x" else 384 + 3] = value
        check(desc, [grad, x])


@pytest.mark.parametrize("own_recipe", RECIPES)
def test_rows_of_wider_tensors_and_other_addresses_equal_the_pair(own_recipe: str) -> None:
    desc = fused("swiglu", spec(own_recipe), torch.bfloat16, backward=True)
    wide = torch.randn(300, 2048, device=DEVICE).bfloat16()
    for first in (8, 3):  # read as vectors, and not
        check(desc, [wide[:, first : first + 512], wide[:, 512 + first : 512 + first + 1024]])


@pytest.mark.parametrize("own_recipe", RECIPES)
def test_whole_vectors_take_one_kernel(own_recipe: str) -> None:
    """The two steps are not taken where one is possible."""
    desc = halves(fused("swiglu", spec(own_recipe), torch.bfloat16, backward=True))
    run = backend("cuda").bind(desc, DEVICE)
    run._backward = None
    given = slots(spec(own_recipe))
    run(*drawn_for("swiglu", 256, 256, torch.bfloat16, backward=True), **given)
    with pytest.raises(TypeError):
        run(*drawn_for("swiglu", 256, 130, torch.bfloat16, backward=True), **given)


def test_other_casts_of_halves_are_refused() -> None:
    unsupported = backend("cuda").unsupported
    split = QuantizeDesc(torch.bfloat16, spec("delayed"), spec("delayed"), split=True)
    assert "two casts" in unsupported(split, DEVICE)
    for name, own in (("gelu", "current"), ("swiglu", "rowwise"), ("swiglu", "mx")):
        desc = halves(fused(name, spec(own), torch.bfloat16, backward=True))
        assert "halves" in unsupported(desc, DEVICE)


class Block(torch.nn.Module):
    """A norm, gate, up, their product and down, as one chain."""

    def __init__(self, bias: bool, hidden: int = 256, ffn: int = 384) -> None:
        super().__init__()
        torch.manual_seed(0)
        own: dict[str, Any] = {"device": DEVICE, "params_dtype": torch.bfloat16}
        self.norm = fp8core.RMSNorm(hidden, **own)
        self.gate = fp8core.Linear(hidden, ffn, bias=bias, name="gate", **own)
        self.up = fp8core.Linear(hidden, ffn, bias=bias, name="up", **own)
        self.down = fp8core.Linear(ffn, hidden, bias=False, name="down", **own)
        shape = activation_shape("swiglu")
        self.chain = Splice([self.norm, (self.gate, self.up), shape, self.down], [self])

    def steps(self, name: str, rows: int, count: int = 5) -> list[torch.Tensor]:
        results = []
        for step in range(count):
            torch.manual_seed(10 + step)
            x = torch.randn(rows, 256, device=DEVICE).bfloat16().requires_grad_()
            with fp8core.autocast(recipe=recipe.by_name(name)):
                y = self.chain.run(x)
            assert y is not None
            grads = torch.autograd.grad(y, (x, *self.parameters()), torch.randn_like(y) / 16)
            results += [y.detach(), *grads, *[one.clone() for one in self.buffers()]]
        return results


@pytest.mark.parametrize(
    ("name", "bias", "rows"), pairs(["delayed", "current", "block"], [False, True], [400, 37])
)
def test_a_chain_has_the_bits_of_casts_apart(
    name: str, bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by run, and repeated; with the halves cast by themselves, scales and amaxes."""
    monkeypatch.setenv("FP8CORE_AUTOTUNE", "0")
    ours = Block(bias).steps(name, rows)
    with without_recordings():
        assert_equal(ours, Block(bias).steps(name, rows), "not recorded")
    fused_cuda = type(backend("cuda"))
    refused = fused_cuda.unsupported

    def unsupported(self: Any, desc: Any, device: torch.device) -> str | None:
        if isinstance(desc, FusedDesc) and desc.quantize.split:
            return "not in this test"
        return refused(self, desc, device)

    monkeypatch.setattr(fused_cuda, "unsupported", unsupported)
    fp8core.dispatch.table.forget()
    theirs = Block(bias).steps(name, rows)
    fp8core.dispatch.table.forget()
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype == torch.bfloat16:
            # Products of codes that lie beside others' may add in another order.
            difference = (one.float() - other.float()).norm()
            assert difference <= 1e-2 * other.float().norm(), number
        else:
            assert torch.equal(one, other), number
