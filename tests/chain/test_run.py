"""The one autograd.Function: gradients, what passes through it, and torch.autocast around it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import fp8core
from fp8core import (
    LayerNormLinear,
    Linear,
    MasterWeights,
    OperandError,
    autocast,
    quantized_model_init,
    recipe,
)
from fp8core.chain import run as chain
from fp8core.chain.call import DENSE
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.protocol import Wrapper
from fp8core.chain.series import Chain
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from tests.device import DEVICE, assert_same_sums
from tests.pairs import pairs, turns

RECIPES = {"none": None, **{name: recipe.by_name(name) for name in recipe.names()}}
FEW = ("none", "delayed", "mxfp8", "nvfp4")
"""Of chains without casts, with a state, with blocks that are padded, and with random numbers."""


def forward(layer: LowPrecisionModule, x: torch.Tensor, name: str) -> torch.Tensor:
    chosen = RECIPES[name]
    torch.manual_seed(11)  # of stochastic rounding
    with autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x)


def gradients(layer: Linear, x: torch.Tensor, dy: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return y and the gradients of the input, the weight and the bias."""
    layer.reset_delayed_state()
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = forward(layer, x, name)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def assert_same_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_without_a_recipe_the_result_is_torch_s_own() -> None:
    layer, x = Linear(48, 20, params_dtype=torch.bfloat16), torch.randn(9, 48).bfloat16()
    torch.nn.init.normal_(layer.bias)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_leading_dimensions_are_rows() -> None:
    for name in FEW:
        layer = Linear(32, 16)
        x, dy = torch.randn(12, 32), torch.randn(12, 16)
        y, dx, dw, db = gradients(layer, x, dy, name)
        got = gradients(layer, x.reshape(2, 3, 2, 32), dy.reshape(2, 3, 2, 16), name)
        assert_same_bits(got, (y.reshape(2, 3, 2, 16), dx.reshape(2, 3, 2, 32), dw, db))


def test_a_single_row_needs_no_leading_dimension() -> None:
    for name in FEW:
        layer = Linear(32, 16)
        x, dy = torch.randn(1, 32), torch.randn(1, 16)
        y, dx, dw, db = gradients(layer, x, dy, name)
        assert_same_bits(gradients(layer, x[0], dy[0], name), (y[0], dx[0], dw, db))


def test_an_empty_batch_gives_empty_results_and_zero_gradients() -> None:
    for name, shape in turns(RECIPES, [(0, 32), (2, 0, 32)]):
        layer = Linear(32, 16)
        y, dx, dw, db = gradients(layer, torch.randn(shape), torch.randn(*shape[:-1], 16), name)
        assert y.shape == (*shape[:-1], 16), (name, shape)
        assert dx.shape == shape, (name, shape)
        assert not dw.any(), (name, shape)
        assert not db.any(), (name, shape)


def strided(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the values of ``x [m, k]`` in other strides."""
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "sliced":
        return torch.stack((x, x), -1).flatten(-2)[:, ::2]
    return x[:1].expand_as(x)


def test_strides_of_the_input_change_no_bit() -> None:
    for name, kind in turns(RECIPES, ["transposed", "sliced", "expanded"]):
        layer = Linear(32, 16)
        x, dy = strided(kind, torch.randn(12, 32)), torch.randn(12, 16)
        assert not x.is_contiguous(), (name, kind)
        same = assert_same_sums if name == "none" else assert_same_bits  # none: torch's product
        same(gradients(layer, x, dy, name), gradients(layer, x.contiguous(), dy, name))


@pytest.mark.parametrize(("name", "kind"), turns(RECIPES, ["transposed", "sliced", "expanded"]))
def test_strides_of_grad_output_change_no_bit(name: str, kind: str) -> None:
    layer = Linear(32, 16)
    x, dy = torch.randn(12, 32), strided(kind, torch.randn(12, 16))
    *got, db = gradients(layer, x, dy, name)
    *want, wanted_db = gradients(layer, x, dy.contiguous(), name)
    same = assert_same_sums if name == "none" else assert_same_bits  # none: torch's product
    same(got, want)
    torch.testing.assert_close(db, wanted_db)  # torch's sum orders its terms by strides


@pytest.mark.parametrize("name", FEW)
def test_backward_inside_and_outside_torch_autocast_give_the_same_bits(name: str) -> None:
    layer, x, dy = Linear(32, 16), torch.randn(12, 32), torch.randn(12, 16).bfloat16()
    found = []
    for is_inside in (True, False):
        layer.reset_delayed_state()
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = forward(layer, leaf, name)
            if is_inside:
                y.backward(dy)
        if not is_inside:
            y.backward(dy)
        found.append([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad])
    assert_same_bits(*found)


def test_torch_autocast_without_a_recipe_gives_torch_s_bits() -> None:
    layer, x = Linear(48, 20), torch.randn(9, 48)
    torch.nn.init.normal_(layer.bias)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("name", FEW)
def test_backward_in_another_thread_gives_the_same_bits(name: str) -> None:
    layer, x, dy = Linear(32, 16), torch.randn(12, 32), torch.randn(12, 16)
    want = gradients(layer, x, dy, name)
    layer.reset_delayed_state()
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = forward(layer, leaf, name)
    thread = threading.Thread(target=y.backward, args=(dy,))
    thread.start()
    thread.join()
    assert_same_bits([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad], want)


def test_backward_twice_over_a_retained_graph_gives_the_same_bits() -> None:
    for name in ["none", "current", "mxfp8", "nvfp4"]:
        layer = Linear(32, 16)
        y = forward(layer, torch.randn(12, 32), name)
        first, second = (
            torch.autograd.grad(y.sum(), tuple(layer.parameters()), retain_graph=True)
            for _ in range(2)
        )
        assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("name", "dtype", "bias"),
    pairs(RECIPES, [torch.float32, torch.bfloat16], [False, True]),
    ids=str,
)
def test_a_linear_that_casts_by_itself_has_the_bits_of_handovers(
    name: str, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[torch.Tensor | None]] = []
    program = LinearLink.program

    def handed_over(*arguments: Any) -> Wrapper:
        inner = program(*arguments)
        return Wrapper(inner, inner.input_request)

    for is_handed in (False, True):
        if is_handed:
            monkeypatch.setattr(LinearLink, "program", handed_over)
        torch.manual_seed(0)
        layer = Linear(64, 32, bias=bias, params_dtype=dtype)
        made: list[torch.Tensor | None] = []
        for needs in itertools.product((True, False), repeat=3 if bias else 2):
            x = torch.randn(2, 16, 64, dtype=dtype, requires_grad=needs[0])
            for own, need in zip(layer.parameters(), needs[1:], strict=True):
                own.requires_grad_(need)
                own.grad = None
            y = forward(layer, x, name)
            if any(needs):
                y.backward(torch.randn_like(y))
            made += [y.detach(), x.grad, *(own.grad for own in layer.parameters())]
        found.append([*made, *layer.buffers()])
    for own, handed in zip(*found, strict=True):
        assert (own is None) == (handed is None)
        if own is not None:
            assert handed is not None
            assert torch.equal(own, handed)


@pytest.mark.parametrize("retains", [False, True])
def test_backward_frees_the_weight_that_dgrad_has_read(retains: bool) -> None:
    layer, x = Linear(32, 16), torch.randn(8, 32, requires_grad=True)
    with autocast(recipe=fastest("current")):
        link = bind(layer, x.device, x.dtype).linears[0]
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def weight(*arguments: object, **keywords: object) -> object:
        made = link.weight(*arguments, **keywords)  # type: ignore[arg-type]
        kept.append(weakref.ref(made.columnwise.data))
        return made

    def wgrad(*arguments: object) -> object:
        alive.append(kept[0]() is not None)
        return link.wgrad(*arguments)

    weight.requantizes = False  # type: ignore[attr-defined]
    watched = dataclasses.replace(link, weight=weight, wgrad=wgrad, _programs={})
    y = chain.run((watched,), x, layer.link_params())
    y.sum().backward(retain_graph=retains)
    assert alive == [retains]


def test_a_weight_changed_before_backward_is_refused() -> None:
    layer = Linear(32, 16)
    y = layer(torch.randn(3, 32, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        y.sum().backward()


LOW = [name for name in RECIPES if name != "none"]


def fastest(name: str) -> Any:
    return dataclasses.replace(RECIPES[name], holding="fastest")


def written_between(layer: Linear, chosen: Any, *, is_written: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=chosen):
        y = layer(x)
    if is_written:
        with torch.no_grad():
            layer.weight.mul_(3)
    y.square().sum().backward()
    return [x.grad, *(own.grad for own in layer.parameters())]


def test_backward_in_low_precision_is_of_the_weight_that_forward_quantized() -> None:
    for name in LOW:
        layer = Linear(32, 16)
        other = copy.deepcopy(layer)
        want = written_between(layer, fastest(name), is_written=False)
        assert_same_bits(written_between(other, fastest(name), is_written=True), want)
        chosen = dataclasses.replace(fastest(name), holding="balanced")
        with pytest.raises(OperandError, match=r'written in place since .* holding="fastest"'):
            written_between(other, chosen, is_written=True)


def test_a_quantized_weight_written_before_backward_is_refused() -> None:
    for name in LOW:
        with quantized_model_init(recipe=RECIPES[name]):
            layer = Linear(32, 32, name="fc")
        with pytest.raises(OperandError, match=r"'fc'.*written in place since forward"):
            written_between(layer, RECIPES[name], is_written=True)


def test_a_weight_that_backward_takes_in_high_precision_is_refused_once_written() -> None:
    layer = Linear(32, 32, name="fc")
    chosen = recipe.Float8CurrentScaling(backward_override="high_precision")
    with autocast(recipe=chosen):
        y = layer(torch.randn(32, 32, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(3)
    with pytest.raises(OperandError, match=r"'fc'.*written in place since forward"):
        y.sum().backward()


def test_an_optimizer_may_step_between_two_forwards_of_a_quantized_weight() -> None:
    chosen = RECIPES["current"]
    with quantized_model_init(recipe=chosen):
        layer = Linear(32, 32)
    masters = MasterWeights(layer)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    for _ in range(3):
        forward(layer, torch.randn(32, 32), "current").square().mean().backward()
        optimizer.step()


def bound_ops(layers: Sequence[Linear], name: str) -> tuple[object, ...]:
    chosen = RECIPES[name]
    with autocast(enabled=chosen is not None, recipe=chosen):
        bounds = [bind(layer, DEVICE, torch.float32) for layer in layers]
    return tuple(bound.links[0] for bound in bounds)


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_two_ops_in_one_chain_equal_two_layers(name: str) -> None:
    layers = (Linear(32, 16), Linear(16, 24))
    params = [param for layer in layers for param in layer.parameters()]
    x, dy = torch.randn(2, 3, 32, requires_grad=True), torch.randn(2, 3, 24)
    y = chain.run(bound_ops(layers, name), x, params)
    got = torch.autograd.grad(y, (x, *params), dy)
    two = forward(layers[1], forward(layers[0], x, name), name)
    assert torch.equal(y, two)
    assert_same_bits(got, torch.autograd.grad(two, (x, *params), dy))


def test_a_chain_stops_where_nobody_needs_a_gradient() -> None:
    for frozen in [(), (0, 1), (0, 1, 2)]:
        layers = (Linear(32, 16), Linear(16, 24))
        params = [param for layer in layers for param in layer.parameters()]
        for index in frozen:
            params[index].requires_grad_(False)
        chain.run(bound_ops(layers, "current"), torch.randn(5, 32), params).sum().backward()
        assert [param.grad is None for param in params] == [i in frozen for i in range(4)], frozen


def test_an_op_behind_frozen_ones_computes_no_gradient_of_its_input() -> None:
    layers = (Linear(32, 16).requires_grad_(False), Linear(16, 24))
    params = [param for layer in layers for param in layer.parameters()]
    first, second = bound_ops(layers, "current")
    second = dataclasses.replace(second, dgrad=lambda *_: pytest.fail("nobody needs it"))
    chain.run((first, second), torch.randn(5, 32), params).sum().backward()
    assert params[2].grad is not None


def test_nothing_is_recorded_for_backward_when_nothing_needs_it() -> None:
    for name in ["none", "current"]:
        layer = Linear(32, 16).requires_grad_(False)
        assert not forward(layer, torch.randn(3, 32), name).requires_grad, name


def test_without_gradients_the_bits_are_the_same() -> None:
    for name, mode in turns(RECIPES, [torch.no_grad, torch.inference_mode]):
        layer, x = Linear(32, 16), torch.randn(12, 32)
        want = forward(layer, x, name).detach()
        layer.reset_delayed_state()
        with mode():
            assert torch.equal(forward(layer, x, name), want), (name, mode)


def test_forward_and_backward_run_on_meta() -> None:
    for name in RECIPES:
        layer = Linear(40, 24, params_dtype=torch.bfloat16, device="meta")
        y = forward(layer, torch.empty(2, 3, 40, dtype=torch.bfloat16, device="meta"), name)
        assert (y.shape, y.dtype, y.is_meta) == ((2, 3, 24), torch.bfloat16, True), name
        y.sum().backward()
        assert layer.weight.grad.shape == (24, 40), name


def test_a_chain_drops_the_oldest_program_alone_of_sizes_without_end() -> None:
    layer = LayerNormLinear(32, 16)
    parts = bind(layer, torch.device(DEVICE), torch.float32).parts
    links = parts[0]
    assert isinstance(links, Chain)

    def program(rows: int) -> object:
        return links.program(torch.Size((rows, 32)), rows, (False,) * 4, DENSE)

    programs = [program(rows) for rows in range(1, 81)]
    assert len(links._programs) == 64
    assert all(program(rows) is programs[rows - 1] for rows in range(17, 81))
    assert program(1) is not programs[0]


HIDDEN, FFN = 32, 48
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: fp8core.Linear(HIDDEN, FFN),
    "norm": lambda: fp8core.RMSNorm(HIDDEN),
    "norm_linear": lambda: fp8core.LayerNormLinear(HIDDEN, FFN),
    "mlp": lambda: fp8core.LayerNormMLP(HIDDEN, FFN),
    "attention": lambda: fp8core.MultiheadAttention(HIDDEN, 2, attention_dropout=0.0),
    "transformer": lambda: fp8core.TransformerLayer(
        HIDDEN, FFN, 2, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "sequential": lambda: fp8core.ops.Sequential(
        fp8core.ops.Linear(HIDDEN, FFN), fp8core.ops.GELU()
    ),
}
LOW_AND_NONE = {"current": recipe.Float8CurrentScaling(), "none": None}


def low_precision(name: str) -> AbstractContextManager[object]:
    chosen = LOW_AND_NONE[name]
    return nullcontext() if chosen is None else fp8core.autocast(recipe=chosen)


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, LOW_AND_NONE))
def test_a_result_that_is_written_has_the_gradients_of_a_copy(kind: str, name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    gradients = []
    for is_written in (False, True):
        x = torch.linspace(-1, 1, 16 * HIDDEN).reshape(8, 2, HIDDEN).requires_grad_()
        with low_precision(name):
            y = layer(x)
        result = torch.relu_(y) if is_written else torch.relu(y)
        gradients.append(torch.autograd.grad(result.square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_compiled_code_writes_a_result() -> None:
    layer = fp8core.Linear(HIDDEN, FFN)
    x = torch.randn(8, 2, HIDDEN)
    with low_precision("current"):
        written = torch.compile(lambda x: torch.relu_(layer(x)), backend="eager", fullgraph=True)(x)
        assert torch.equal(written, torch.relu(layer(x)))


def test_a_write_to_what_backward_reads_is_noticed() -> None:
    layer = fp8core.LayerNormLinear(HIDDEN, FFN, return_layernorm_output=True)
    y, normalized = layer(torch.randn(8, 2, HIDDEN, requires_grad=True))
    normalized.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_chain_is_freed_with_its_last_reference() -> None:
    """Not by Python's collector later: its links hold tensors."""

    class Recorder:
        pass

    layer = LayerNormLinear(32, 32)
    with autocast(recipe=recipe.by_name("current")):
        links = bind(layer, DEVICE, torch.float32).links
    recorder: Any = Recorder()
    links_in_chain, freed = Chain(links, recorder), weakref.ref(recorder)
    gc.disable()
    try:
        del links_in_chain, recorder
        assert freed() is None
    finally:
        gc.enable()
