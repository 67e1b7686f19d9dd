"""Casts composed of casts, and casts that return column sums as well: the bits of each alone."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import ColumnSumsDesc, Quantized, QuantizeDesc
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import quantize, quantize_chunked
from fp8core_backends.cuda.quantize_chunked import QuantizeChunked
from fp8core_backends.cuda.quantize_compose import apart, in_groups
from tests.backends.cuda.cuda_cases import DEVICE, backend, differs, put_on_the_host, spec

on_device = pytest.mark.needs_accelerator("cuda")


@on_device
@pytest.mark.parametrize(
    ("name", "dtype"), [("square", torch.bfloat16), ("current", torch.float32)]
)
def test_what_has_no_kernel_offers_no_sums(name: str, dtype: torch.dtype) -> None:
    for chunked in (False, True):
        desc = QuantizeDesc(dtype, spec(name), spec(name), sums=True, chunked=chunked)
        assert "no column sums with a cast" in backend("cuda").unsupported(desc, DEVICE)


@on_device
@pytest.mark.parametrize("rows", [96, 8192])
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_gradients_of_a_layer_have_the_bits_of_a_frozen_bias(name: str, rows: int) -> None:
    layer = fp8core.Linear(128, 8192, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(rows, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, 8192, device=DEVICE, dtype=torch.bfloat16)
    grads = []
    for is_trained in (True, False):
        layer.zero_grad()
        layer.reset_delayed_state()
        x.grad = None
        layer.bias.requires_grad_(is_trained)
        with fp8core.autocast(recipe=fp8core.recipe.by_name(name)):
            y = layer(x)
        y.backward(grad)
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(map(torch.equal, grads[0][:2], grads[1][:2]))
    sums = backend("cuda").bind(ColumnSumsDesc(grad.dtype), DEVICE)(grad)
    assert torch.equal(grads[0][2], sums.bfloat16())


class Native:
    """A native cast that takes down its arguments, and the library beside it."""

    MAX_PARTIALS = 8

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, arguments: tuple[int, ...], stream: int) -> None:
        raise AssertionError("the cast without sums")

    def tile_sums_floats(self, rows: int, cols: int) -> int:
        return -(-rows // 128) * cols

    def and_sum(self, arguments: tuple[int, ...], stream: int) -> None:
        self.calls.append(arguments)

    def add_tile_sums(self, arguments: tuple[int, ...], index: int, stream: int) -> None:
        self.calls.append(arguments)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    put_on_the_host(monkeypatch, quantize, quantize_chunked)
    monkeypatch.setattr(quantize_chunked, "CHUNK_ROWS", 256)
    monkeypatch.setattr(quantize_chunked, "LEAST_SAVED", 1)
    return Native()


def test_cast_is_given_sums_and_tensor_and_results(native: Native) -> None:
    results = (Quantized(None, None), (11, 12, 13), None)
    cast: Any = SimpleNamespace(
        dtype=torch.bfloat16, native_cast=native, results=lambda *given: results
    )
    x = torch.zeros(130, 64, dtype=torch.bfloat16)[:, 8:48]
    _, sums = quantize.QuantizeAndSum(cast, 0)(x)
    ((address, tile_sums, *rest),) = native.calls
    assert address == sums.data_ptr() != tile_sums
    assert rest == [x.data_ptr(), 130, 40, 64, 11, 12, 13]
    assert (sums.shape, sums.dtype) == ((40,), torch.float32)


def test_sums_of_tiles_of_each_chunk_lie_behind_those_before(native: Native) -> None:
    own, cpu = spec("delayed"), torch.device("cuda", 0)
    desc = QuantizeDesc(torch.bfloat16, own, own, sums=True, chunked=True)
    run: Any = QuantizeChunked(desc, cpu, native, native, None)  # type: ignore[arg-type]  # no whole cast
    x = torch.zeros(600, 40, dtype=torch.bfloat16)
    (chunks, _), sums = run(x, scale=torch.ones(1))
    assert [(start, end) for start, end, _ in chunks] == [(0, 256), (256, 512), (512, 600)]
    *casts, (tile_sums, *added) = native.calls
    assert [one[:2] for one in casts] == [(0, tile_sums + 4 * 40 * at) for at in (0, 2, 4)]
    assert [one[2:6] for one in casts] == [
        (x.data_ptr() + 2 * 40 * start, rows, 40, 40)
        for start, rows in ((0, 256), (256, 256), (512, 88))
    ]
    assert added == [600, 40, sums.data_ptr()]


CPU = torch.device("cpu")
SIZES = (32, 0, 64, 16)
TENSORS = ("input", "grad_output")


def desc_of(name: str, tensor: str) -> QuantizeDesc:
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.float32)
    return QuantizeDesc(torch.float32, *getattr(plan, tensor))


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", recipe.names())
def test_a_cast_a_group_is_a_cast_of_groups(name: str, tensor: str) -> None:
    desc, reference = desc_of(name, tensor), backend("reference")
    whole = dataclasses.replace(desc, grouped=True)
    torch.manual_seed(0)
    x = torch.randn(sum(SIZES), 48)
    offsets = torch.tensor((0, *SIZES)).cumsum(0)
    specs = [own for own in (desc.rowwise, desc.columnwise) if own is not None]

    def given() -> dict[str, torch.Tensor]:
        found = {}
        if any(own.delayed for own in specs):
            found = {"scale": torch.tensor((1.0, 2.0, 4.0, 8.0)), "amax_out": torch.zeros(4)}
        if any(own.stochastic for own in specs):
            found["rng"] = torch.tensor((7, 9))
        return found

    x[0, 3], x[-1, :2] = torch.inf, torch.nan
    ours, theirs = given(), given()
    for own_keywords in (ours, theirs):
        own_keywords["nonfinite_out"] = torch.full((1,), 7)
    made = in_groups(whole, reference.bind(desc, CPU))(x, offsets, **ours)
    expected = reference.bind(whole, CPU)(x, offsets, **theirs)
    assert differs(made.rowwise, expected.rowwise) is None
    assert differs(made.columnwise, expected.columnwise) is None
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert int(ours["nonfinite_out"]) == 7 + 3


@pytest.mark.parametrize("name", recipe.names())
def test_halves_make_the_whole(name: str) -> None:
    desc, reference = desc_of(name, "input"), backend("reference")
    if desc.rowwise is None or desc.columnwise is None:
        pytest.skip("has one orientation")
    given = {"scale": torch.ones(1)} if desc.rowwise.delayed else {}
    x = torch.randn(64, 48)
    x[5, 6] = torch.inf
    count = torch.full((1,), 7)
    halves = apart(*(reference.bind(half, CPU) for half in desc.halves()))
    made = halves(x, **given, nonfinite_out=count)
    assert int(count) == 7 + 1
    expected = reference.bind(desc, CPU)(x, **given)
    assert differs(made.rowwise, expected.rowwise) is None
    assert differs(made.columnwise, expected.columnwise) is None


def test_seeds_stay_on_the_cpu_whatever_the_default_device_is() -> None:
    seeds: list[torch.Tensor] = []

    def dense(x: torch.Tensor, *, rng: torch.Tensor, nonfinite_out: None) -> Quantized:
        seeds.append(rng)
        return Quantized(None, None)

    x, offsets, rng = torch.zeros(5, 2), torch.tensor((0, 2, 5)), torch.tensor((7, 9))
    with torch.device("meta"):
        in_groups(desc_of("nvfp4", "input"), dense)(x, offsets, rng=rng)
    assert [seed.tolist() for seed in seeds] == [[7, 9], [7, 10]]
