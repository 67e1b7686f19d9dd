"""What the linear link computes and keeps, by what is asked of it."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, Linear, autocast, recipe
from fp8core.modules import run as module_run
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from tests.device import DEVICE, assert_same_sums
from tests.pairs import pairs, turns

RECIPES = {
    "none": None,
    **{n: dataclasses.replace(recipe.by_name(n), holding="fastest") for n in recipe.names()},
}
"""Of the defaults, but that backward makes nothing again."""
M, K, N = 96, 64, 32
SPLITS = [32, 64]


def binder_of(layer: LowPrecisionModule) -> ModuleType:
    """Return the module that binds ``layer`` in a call."""
    return sys.modules[type(layer).__module__] if isinstance(layer, GroupedLinear) else module_run


class Counter:
    """Names the GEMMs that a layer runs, and the orientations its quantizers are asked for."""

    def __init__(self, layer: LowPrecisionModule, patch: pytest.MonkeyPatch) -> None:
        self.gemms: list[str] = []
        self.orientations: dict[str, set[str]] = {}

        def bind_counted(own: LowPrecisionModule, *arguments: Any, **options: Any) -> Any:
            bound = bind(own, *arguments, **options)
            op = bound.linears[0]
            gemms = {name: self._gemm(name, getattr(op, name)) for name in GEMMS}
            tensors = {name: self._quantizer(name, getattr(op, name)) for name in TENSORS}
            counted = dataclasses.replace(op, **gemms, **tensors, _programs={})
            return bound._replace(parts=((counted,),), links=(counted,))

        patch.setattr(binder_of(layer), "bind", bind_counted)

    def _gemm(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.gemms.append(name)
            return run(*args, **kwargs)

        return counted

    def _quantizer(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            asked = self.orientations.setdefault(name, set())
            asked |= {way for way in ("rowwise", "columnwise") if kwargs.get(way, True)}
            return run(*args, **kwargs)

        counted.cast_to = lambda *, chunked=False, **ways: (  # type: ignore[attr-defined]
            functools.partial(counted, **ways)
        )
        counted.requantizes = False  # type: ignore[attr-defined]
        counted.choices = ()  # type: ignore[attr-defined]
        counted.plan = None  # type: ignore[attr-defined]
        counted.cast_and_sum = lambda sums, *, chunked, **ways: (  # type: ignore[attr-defined]
            lambda x: (counted(x, **ways), sums(x))
        )
        return counted


GEMMS = ("fprop", "dgrad", "wgrad")
TENSORS = ("input", "weight", "grad_output")


def build(kind: str) -> LowPrecisionModule:
    return Linear(K, N) if kind == "linear" else GroupedLinear(len(SPLITS), K, N)


def weights(layer: LowPrecisionModule) -> list[torch.nn.Parameter]:
    return [value for name, value in layer.named_parameters() if "weight" in name]


def forward(layer: LowPrecisionModule, x: torch.Tensor, chosen: recipe.Recipe | None) -> Any:
    with autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x) if isinstance(layer, Linear) else layer(x, SPLITS)


GEMMS_OF_FROZEN = {
    (): ["fprop", "dgrad", "wgrad"],
    ("weight",): ["fprop", "dgrad"],
    ("input",): ["fprop", "wgrad"],
    ("weight", "input"): ["fprop"],
}


@pytest.mark.parametrize(
    ("name", "kind", "frozen"), pairs(RECIPES, ["linear", "grouped"], GEMMS_OF_FROZEN), ids=str
)
def test_a_step_runs_the_gemms_that_somebody_needs(
    name: str, kind: str, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build(kind)
    for weight in weights(layer):
        weight.requires_grad_("weight" not in frozen)
    counter = Counter(layer, monkeypatch)
    forward(
        layer, torch.randn(M, K, requires_grad="input" not in frozen), RECIPES[name]
    ).sum().backward()
    assert counter.gemms == GEMMS_OF_FROZEN[frozen]


@pytest.mark.parametrize(
    ("name", "mode"), turns(["none", "mxfp8", "delayed"], [torch.no_grad, torch.inference_mode])
)
def test_without_gradients_there_is_one_gemm_over_rowwise_operands(
    name: str, mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build("linear")
    counter = Counter(layer, monkeypatch)
    with mode():
        forward(layer, torch.randn(M, K, requires_grad=True), RECIPES[name])
    assert counter.gemms == ["fprop"]
    assert counter.orientations == {"input": {"rowwise"}, "weight": {"rowwise"}}


BOTH, ROWWISE, COLUMNWISE = {"rowwise", "columnwise"}, {"rowwise"}, {"columnwise"}


@pytest.mark.parametrize(
    ("frozen", "orientations"),
    [
        ("weight", {"input": ROWWISE, "weight": BOTH, "grad_output": ROWWISE}),
        ("input", {"input": BOTH, "weight": ROWWISE, "grad_output": COLUMNWISE}),
    ],
)
def test_what_is_frozen_needs_one_orientation_of_the_others(
    frozen: str, orientations: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build("linear")
    layer.weight.requires_grad_(frozen != "weight")
    counter = Counter(layer, monkeypatch)
    x = torch.randn(M, K, requires_grad=frozen != "input")
    forward(layer, x, RECIPES["mxfp8"]).sum().backward()
    assert counter.orientations == orientations


def saved_shapes(layer: LowPrecisionModule, x: torch.Tensor, name: str) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= min(M, K, N) * min(M, K, N):  # elements, not scales
            kept.append((*tensor.shape, tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(layer, x, RECIPES[name])
    return sorted(kept)


@pytest.mark.parametrize(
    ("name", "frozen", "shapes"),
    [
        ("current", (), [(K, N, 1), (K, M, 1)]),
        ("current", ("weight",), [(K, N, 1)]),
        ("current", ("input",), [(K, M, 1)]),
        ("current", ("weight", "input"), []),  # the bias is trained
        ("nvfp4", (), [(K, N // 2, 1), (K, M // 2, 1)]),
    ],
    ids=str,
)
def test_backward_keeps_codes_of_what_it_multiplies(
    name: str, frozen: tuple[str, ...], shapes: list[tuple[int, ...]]
) -> None:
    layer = build("linear")
    layer.weight.requires_grad_("weight" not in frozen)
    x = torch.randn(M, K, requires_grad="input" not in frozen)
    assert saved_shapes(layer, x, name) == shapes


def test_high_precision_keeps_no_copy_of_the_weight() -> None:
    layer = build("linear")
    storages = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(M, K, requires_grad=True))
    assert layer.weight.untyped_storage().data_ptr() in storages


def test_one_frozen_weight_of_a_group_gets_no_gradient() -> None:
    layer = build("grouped")
    layer.weight0.requires_grad_(False)
    forward(layer, torch.randn(M, K), RECIPES["current"]).sum().backward()
    assert layer.weight0.grad is None
    assert layer.weight1.grad is not None


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4", "rowwise", "block"])
def test_freezing_one_changes_no_bit_of_the_other_s_gradient(name: str) -> None:
    layer = build("linear")
    x, dy = torch.randn(M, K), torch.randn(M, N)
    grads = []
    for trains_weight, needs_input in ((True, True), (False, True), (True, False)):
        layer.reset_delayed_state()
        layer.zero_grad()
        layer.weight.requires_grad_(trains_weight)
        leaf = x.clone().requires_grad_(needs_input)
        torch.manual_seed(1)
        forward(layer, leaf, RECIPES[name]).backward(dy)
        grads.append((leaf.grad, layer.weight.grad))
    assert torch.equal(grads[1][0], grads[0][0])
    assert torch.equal(grads[2][1], grads[0][1])


def test_the_bias_gradient_is_the_rounded_float32_sum_of_grad_output() -> None:
    for dtype in [torch.bfloat16, torch.float16, torch.float32]:
        layer = Linear(K, N, params_dtype=dtype)
        dy = torch.randn(M, N).to(dtype)
        forward(layer, torch.randn(M, K).to(dtype), RECIPES["current"]).backward(dy)
        assert_same_sums([layer.bias.grad], [dy.sum(0, dtype=torch.float32).to(dtype)])


def test_the_bias_is_added_before_the_one_rounding() -> None:
    layer = Linear(32, 32, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(0.5)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([256.0, 1.0])
    # bfloat16 holds 256 and 258: 257.5 rounds to 258, but 257 alone to 256, and 256.5 to 256.
    assert forward(layer, x, recipe.MXFP8BlockScaling()).unique().tolist() == [258.0]


def test_permuting_the_rows_permutes_the_result() -> None:
    for name in ["rowwise", "block", "mxfp8"]:
        layer, x = build("linear"), torch.randn(M, K)
        order = torch.randperm(M)
        y = forward(layer, x, RECIPES[name])
        assert torch.equal(forward(layer, x[order], RECIPES[name]), y[order]), name


def test_choices_name_the_backend_of_every_gemm_and_tensor() -> None:
    layer = build("linear")
    with autocast(recipe=RECIPES["current"]):
        op = bind(layer, DEVICE, torch.float32).linears[0]
    assert set(op.choices) == {*GEMMS, *TENSORS}
    assert {choice.backend for choice in op.choices.values()} == {
        "reference" if DEVICE.type == "cpu" else DEVICE.type
    }


def test_the_rowwise_gradient_is_gone_when_wgrad_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orientations of a large gradient are the peak of a layer's memory."""
    layer = Linear(128, 256)
    alive: list[bool] = []

    def bind_watched(own: LowPrecisionModule, *arguments: Any, **options: Any) -> Any:
        bound = bind(own, *arguments, **options)
        link, seen = bound.linears[0], []

        def dgrad(dy: Any, w: Any) -> torch.Tensor:
            seen.append(weakref.ref(dy.data))
            made: torch.Tensor = link.dgrad(dy, w)
            return made

        def wgrad(dy: Any, x: Any) -> torch.Tensor:
            alive.append(seen[0]() is not None)
            made: torch.Tensor = link.wgrad(dy, x)
            return made

        watched = dataclasses.replace(link, dgrad=dgrad, wgrad=wgrad, _programs={})
        return bound._replace(parts=((watched,),), links=(watched,))

    monkeypatch.setattr(module_run, "bind", bind_watched)
    x = torch.randn(64, 128, requires_grad=True)
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        y = layer(x)
    y.sum().backward()
    assert alive == [False]
