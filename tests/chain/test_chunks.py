"""Gradients that are quantized some rows at a time: the same bits, and less memory at once."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import LayerNormMLP, Linear, recipe, use_backend
from fp8core.backend_api import API_VERSION, BackendSpec, Operand, hookimpl
from fp8core.dispatch import plugins, table
from tests.conformance import broken
from tests.device import DEVICE
from tests.pairs import pairs

ROWS = 272  # two chunks of 128 rows and a short one


class Recording(broken.GivesChunks):
    """Takes down the rows of tensors asked for in chunks, and of GEMMs into a given result."""

    def __init__(self, chunked: list[int], gemms: list[int]) -> None:
        self._chunked = chunked
        self._gemms = gemms

    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        for name in ("quantize_chunked", "quantize_chunked_and_sum"):
            if hasattr(run, name):
                setattr(run, name, self._recorded(getattr(run, name)))
        if desc.op != "gemm":
            return run

        def gemm(a: Operand, b: Operand, **given: Any) -> Any:
            if given.get("out") is not None:
                self._gemms.append(len(a.data))
            return run(a, b, **given)

        return gemm

    def _recorded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def quantize_chunked(x: torch.Tensor, **given: Any) -> Any:
            self._chunked.append(len(x))
            return inner(x, **given)

        return quantize_chunked


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], list[int]]]:
    """What the backend ``chunks`` takes down."""
    asked: tuple[list[int], list[int]] = ([], [])
    module, plugin = types.ModuleType("chunks_made"), types.ModuleType("chunks_plugin")
    module.Made = lambda: Recording(*asked)  # type: ignore[attr-defined]

    @hookimpl
    def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
        register(BackendSpec("chunks", (DEVICE.type,), "chunks_made:Made", api_version=API_VERSION))

    plugin.fp8core_register_backends = fp8core_register_backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugins, "_loaded", [])
    plugins.register(plugin, "chunks")
    yield asked
    table._resolve.cache_clear()


def step(
    layer: torch.nn.Module, name: str, backend: str, columns: int = 64, *, requantizes: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, columns, requires_grad=True)
    chosen: Any = recipe.by_name(name)
    chosen = dataclasses.replace(chosen, requantize_weights=requantizes)
    with use_backend(backend), fp8core.autocast(recipe=chosen):
        y = layer(x)
    y.backward(torch.randn_like(y))
    found = [x.grad, *(own.grad for own in layer.parameters())]
    layer.zero_grad()
    return [one.clone() for one in found if one is not None]


@pytest.mark.parametrize(
    ("name", "bias", "requantizes"),
    pairs(["delayed", "current", "block", "rowwise"], [False, True], [False, True]),
)
def test_gradients_in_chunks_have_the_same_bits(
    name: str, bias: bool, requantizes: bool, asked: tuple[list[int], list[int]]
) -> None:
    layer = Linear(64, 96, bias=bias)
    want = step(layer, name, "reference")
    layer.reset_delayed_state()
    got = step(layer, name, "chunks", requantizes=requantizes)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert asked == ([ROWS], [128, 128, 16])


def test_only_the_gradient_from_outside_comes_in_chunks(
    asked: tuple[list[int], list[int]],
) -> None:
    step(LayerNormMLP(64, 96), "current", "chunks")
    assert asked == ([ROWS], [128, 128, 16])


def test_parts_are_for_more_rows_than_the_input_has_columns(
    asked: tuple[list[int], list[int]],
) -> None:
    step(Linear(ROWS, 96), "current", "chunks", columns=ROWS)
    assert asked == ([], [])


def test_a_frozen_weight_or_input_needs_no_chunks(asked: tuple[list[int], list[int]]) -> None:
    layer = Linear(64, 96)
    layer.weight.requires_grad_(False)
    step(layer, "current", "chunks")
    assert asked == ([], [])


def test_a_monitor_sees_the_whole_gradient(asked: tuple[list[int], list[int]]) -> None:
    layer = fp8core.prepare(torch.nn.Sequential(Linear(64, 96)))
    with fp8core.monitor(layer) as watch:
        step(layer, "current", "chunks")
        watch.step()
        assert watch.row("0", "grad_output").amax > 0
    assert asked == ([], [])
