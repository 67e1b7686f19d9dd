"""Tensors that a kernel must not read at their address: subclasses, freed, lazy, sparse, elsewhere.

They are used by their own rule, or refused by name. Whatever reaches a backend must be a plain
tensor with memory of its own: the spy of these tests looks at every tensor of every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._pytree import tree_leaves

import fp8core as te
from fp8core import OperandError, QuantizedTensor, ops, recipe
from fp8core.backend_api import OpDesc
from fp8core.modules.calls.bind import bind
from fp8core.recipe.plan import LayerRole
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE
from tests.pairs import turns

RECIPES = recipe.names()


def check_memory(*arguments: object) -> None:
    for own in tree_leaves(arguments):
        if isinstance(own, torch.Tensor):
            assert type(own) in (torch.Tensor, torch.nn.Parameter)
            assert not own.is_neg()
            assert not own.numel() or own.data_ptr() != 0


@pytest.fixture(autouse=True)
def spy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    bind = ReferenceBackend.bind

    def bind_and_look(
        self: ReferenceBackend, desc: OpDesc, device: torch.device
    ) -> Callable[..., Any]:
        run = bind(self, desc, device)

        def looking(*arguments: Any, **keywords: Any) -> Any:
            check_memory(arguments, keywords)
            return run(*arguments, **keywords)

        # Without a recipe a DTensor is computed with by torch's own operators, bound here too.
        is_low = desc.op == "quantize" or getattr(desc, "low_precision", False)
        return looking if is_low or "of_dtensors" not in request.node.name else run

    te.dispatch.table._resolve.cache_clear()
    monkeypatch.setattr(ReferenceBackend, "bind", bind_and_look)


@pytest.fixture
def mesh(group_of_one: None) -> Any:
    return init_device_mesh(DEVICE.type, (1,))


def values(rows: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def layers() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "Linear": te.Linear(32, 32),
        "LayerNormLinear": te.LayerNormLinear(32, 32),
        "LayerNormMLP": te.LayerNormMLP(32, 64),
        "RMSNorm": te.RMSNorm(32),
        "Sequential": ops.Sequential(ops.Quantize(), ops.Linear(32, 64), ops.SwiGLU()),
        "GELU": ops.GELU(),
    }


LAYERS = list(layers())


def stored(x: torch.Tensor, name: str, tensor: str = "input") -> QuantizedTensor:
    plan = recipe.by_name(name).plan(LayerRole("linear"), x.dtype)
    return QuantizedTensor.quantize(x, getattr(plan, tensor))


def run(
    layer: torch.nn.Module, x: torch.Tensor, name: str | None, grad: torch.Tensor | None = None
) -> list[torch.Tensor]:
    layer.zero_grad()
    with te.autocast(enabled=name is not None, recipe=name and recipe.by_name(name)):
        torch.manual_seed(2)
        y = layer(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *(own.grad for own in layer.parameters())]  # type: ignore[list-item]  # all have one


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, [*RECIPES, None]))
def test_a_quantized_input_is_used_by_its_values(kind: str, name: str | None) -> None:
    layer, x = layers()[kind], values()
    quantized = stored(x, "mxfp8")
    if kind == "GELU":
        assert torch.equal(layer(quantized), layer(quantized.dequantize()))
        return
    got, want = run(layer, quantized, name), run(layers()[kind], quantized.dequantize(), name)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "mxfp8", "nvfp4"])
def test_an_input_stored_as_the_recipe_casts_is_its_own_operand(name: str) -> None:
    x = values()
    if name == "nvfp4":
        plan = recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    else:
        plan = recipe.by_name(name)
    tensor = plan.plan(LayerRole("linear"), x.dtype).input
    layer = te.Linear(32, 32)
    found = []
    for given in (x, QuantizedTensor.quantize(x, tensor)):
        layer.zero_grad()
        with te.autocast(recipe=plan):
            y = layer(given)
        y.sum().backward()
        assert layer.weight.grad is not None
        found.append((y.detach(), layer.weight.grad.clone()))
    assert all(map(torch.equal, *found))


def test_a_quantized_input_is_not_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, casts = te.Linear(32, 32, bias=False), []
    with te.autocast(recipe=recipe.by_name("current")), torch.no_grad():
        link = bind(layer, DEVICE, torch.float32).linears[0]
        quantized = stored(values(), "current")
        monkeypatch.setattr(type(link.input), "__call__", lambda *a, **k: casts.append(a))
        layer(quantized)
    assert not casts


@pytest.mark.parametrize(
    ("name", "rows"), turns([*(name for name in RECIPES if name != "delayed"), None], [32, 17, 0])
)
def test_a_quantized_gradient(name: str | None, rows: int) -> None:
    layer, x = te.Linear(32, 32), values(rows).requires_grad_()
    gradient = stored(values(rows, 4), "current", "grad_output")
    found = []
    for grad in (gradient, gradient.dequantize()):
        x.grad = None
        found.append([*run(layer, x, name, grad), x.grad])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        # The same codes; a scale made again of decoded values may differ in its last place.
        assert (one - other).norm() <= 2**-20 * other.norm()


def test_a_stored_gradient_keeps_its_own_scale_under_delayed_scaling() -> None:
    layer, x = te.Linear(32, 32), values().requires_grad_()
    dy = values(32, 4)
    with te.autocast(recipe=recipe.by_name("delayed")):
        y = layer(x)
    y.backward(stored(dy, "delayed", "grad_output"))
    assert not layer.amax_history_bwd.any()
    assert x.grad is not None
    want = dy @ layer.weight.detach()
    assert (x.grad - want).norm() <= 10 ** (-18 / 20) * want.norm()  # its weight, at scale 1


@pytest.mark.parametrize("name", ["current", "block", "rowwise", "mxfp8"])
def test_a_gradient_stored_as_the_recipe_casts_is_its_own_operand(name: str) -> None:
    found = []
    dy = values(32, 4)
    for grad in (dy, stored(dy, name, "grad_output")):
        torch.manual_seed(0)
        layer, x = te.Linear(32, 32, bias=False), values().requires_grad_()
        found.append([*run(layer, x, name, grad), x.grad])
    assert all(map(torch.equal, *found))


def test_a_quantized_residual_is_added_by_its_values() -> None:
    chain = ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(), ops.RMSNorm(32))
    residual = stored(values(32, 3), "current")
    x = values()
    assert torch.equal(chain(x, residual), chain(x, residual.dequantize()))


def test_groups_of_a_quantized_input() -> None:
    layer, quantized = te.GroupedLinear(2, 32, 32), stored(values(), "current")
    with te.autocast(recipe=recipe.by_name("current")):
        got = layer(quantized, [16, 16])
        assert torch.equal(got, layer(quantized.dequantize(), [16, 16]))


class Named(torch.Tensor):
    """A user's subclass: nothing but a name, over ordinary memory."""


@pytest.mark.parametrize("name", ["current", None])
def test_a_subclass_over_ordinary_memory_is_that_memory(name: str | None) -> None:
    layer, x = te.Linear(32, 32), values()
    for grad in (torch.ones(32, 32), torch.ones(32, 32).as_subclass(Named)):
        own = x.as_subclass(Named).requires_grad_()
        with te.autocast(enabled=name is not None, recipe=name):
            y = layer(own)
            want = layer(x)
        y.backward(grad)
        assert torch.equal(torch.Tensor(y), want)
        assert own.grad is not None


@pytest.mark.parametrize("name", ["current", None])
def test_an_unfinished_collective_is_waited_for(name: str | None, mesh: Any) -> None:
    layer, x = te.Linear(32, 32), values()
    with te.autocast(enabled=name is not None, recipe=name), torch.no_grad():
        assert torch.equal(layer(AsyncCollectiveTensor(x)), layer(x))


@pytest.mark.parametrize("name", ["current", "mxfp8"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in ("RMSNorm", "GELU")])
def test_a_dtensor_as_input_is_refused_by_name(kind: str, name: str, mesh: Any) -> None:
    x = distribute_tensor(values(), mesh, [Replicate()])
    with (
        te.autocast(recipe=recipe.by_name(name)),
        pytest.raises(OperandError, match=r"DTensor.*to_local\(\)"),
    ):
        layers()[kind](x)


def distributed(layer: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for name, own in list(layer.named_parameters()):
        whole = distribute_tensor(own.detach(), mesh, [Replicate()])
        setattr(layer, name, torch.nn.Parameter(whole))
    return layer


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "RMSNorm"])
def test_without_a_recipe_a_layer_of_dtensors_computes_as_torch_does(kind: str, mesh: Any) -> None:
    x = values().requires_grad_()
    plain = layers()[kind]
    want = plain(x)
    want.square().sum().backward()
    layer = distributed(layers()[kind], mesh)
    x_too = distribute_tensor(values(), mesh, [Replicate()]).requires_grad_()
    got = layer(x_too)
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    assert x_too.grad is not None
    torch.testing.assert_close(x_too.grad.full_tensor(), x.grad)  # type: ignore[attr-defined]  # a DTensor
    for own, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)  # type: ignore[union-attr]  # likewise


def test_a_dtensor_as_weight_is_refused_by_name(mesh: Any) -> None:
    layer, x = te.Linear(32, 32), values()
    for parameter in ("weight", "bias"):
        own = distribute_tensor(getattr(layer, parameter).detach(), mesh, [Replicate()])
        setattr(layer, parameter, torch.nn.Parameter(own))
    with (
        te.autocast(recipe=recipe.by_name("current")),
        pytest.raises(OperandError, match=r"DTensor.*to_local\(\)"),
    ):
        layer(x)


def test_a_dtensor_as_gradient_is_refused_by_name_and_backward_may_go_on(mesh: Any) -> None:
    layer, x = te.Linear(32, 32), values()
    with te.autocast(recipe=recipe.by_name("delayed")):
        y = layer(x)
    grad = distribute_tensor(torch.ones(32, 32), mesh, [Replicate()])
    with pytest.raises(OperandError, match=r"grad_output.*DTensor.*to_local\(\)"):
        y.backward(grad)
    y.backward(torch.ones(32, 32))
    assert layer.weight.grad is not None


class Hollow(torch.Tensor):
    """A wrapper without memory, whose operations give nothing away."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Hollow:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked to compute")


def test_a_wrapper_of_unknown_kind_is_refused_by_name() -> None:
    for name in RECIPES:
        layer = te.Linear(32, 32)
        with (
            te.autocast(recipe=name),
            pytest.raises(OperandError, match="input is a Hollow"),
        ):
            layer(Hollow(values()))


def test_a_lazy_parameter_is_refused_by_name() -> None:
    layer: Any = te.Linear(32, 32)
    layer.bias = torch.nn.parameter.UninitializedParameter()
    with pytest.raises(OperandError, match="UninitializedParameter"):
        layer(values())


def test_explain_says_what_becomes_of_a_quantized_input() -> None:
    text = str(te.explain(te.Linear(32, 32), recipe.by_name("current")))
    assert "a QuantizedTensor of this format is used directly" in text


NAMES = [*recipe.names(), None]
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "Sequential")


def autocast(name: str | None) -> Any:
    return te.autocast(enabled=name is not None, recipe=name)


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as torch gives the gradient of a complex conjugate's imaginary part."""
    return torch._neg_view((-x).contiguous())


def freed() -> torch.Tensor:
    made = values()
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, KINDS))
def test_a_lazy_negation_is_made(name: str | None, kind: str) -> None:
    found = []
    for lazy in (True, False):
        own, x, grad = layers()[kind], values(), values(seed=2)
        torch.manual_seed(3)
        x, grad = (negated(x), negated(grad)) if lazy else (x, grad)
        x.requires_grad_()
        with autocast(name):
            y = own(x)
        y.backward(grad)
        found.append([y.detach(), x.grad, *(one.grad for one in own.parameters())])
    assert all(map(torch.equal, *found))


def test_a_gradient_through_a_complex_conjugate_has_its_sign() -> None:
    own = layers()["Linear"]
    with autocast("current"):
        y = own(values())
    torch.complex(values(seed=3), y).conj().imag.sum().backward()
    assert torch.equal(own.bias.grad, torch.full((32,), -32.0))


def test_a_lazy_negation_as_weight_is_made() -> None:
    own, other = layers()["Linear"], layers()["Linear"]
    other.weight = torch.nn.Parameter(negated(own.weight.detach()))
    assert other.weight.is_neg()
    with autocast("current"):
        assert torch.equal(other(values()), own(values()))


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, KINDS))
def test_a_zero_without_memory_is_made(name: str | None, kind: str) -> None:
    own = layers()[kind]
    zero = torch._efficientzerotensor((32, 32), device=DEVICE)
    with autocast(name):
        y = own(zero)
        assert torch.equal(y, own(torch.zeros(32, 32)))
    y.backward(zero)
    assert not any(one.grad.any() for one in own.parameters())


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, KINDS))
def test_freed_memory_is_refused_by_name(name: str | None, kind: str) -> None:
    own = layers()[kind]
    with autocast(name):
        with pytest.raises(OperandError, match=r"input \[32, 32\] .*freed"):
            own(freed())
        y = own(values())
    with pytest.raises(OperandError, match=r"grad_output \[32, 32\] .*freed"):
        y.backward(freed())
    y.backward(values())
    for parameter in own.parameters():
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        with autocast(name), pytest.raises(OperandError, match=r"a parameter \[.*freed"):
            own(values())
        storage.resize_(size)


def test_a_freed_operand_of_a_stored_weight_is_refused_by_name() -> None:
    for at in [0, 1]:
        with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
            own = layers()["Linear"]
        storage = own.weight.tensors()[at].untyped_storage()
        for _ in range(2):  # the second call repeats the first
            with autocast("mxfp8"):
                own(values())
        storage.resize_(0)
        with (
            autocast("mxfp8"),
            pytest.raises(OperandError, match=r"operand of a parameter .*freed"),
        ):
            own(values())


def test_a_freed_residual_is_refused_by_name() -> None:
    chain = ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(), ops.RMSNorm(32))
    with autocast("current"), pytest.raises(OperandError, match="freed"):
        chain(values(), freed())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": torch.Tensor.to_sparse,
    "mkldnn": torch.Tensor.to_mkldnn,
}


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_in_another_layout_is_refused_by_name(layout: str, parameter: str) -> None:
    own = layers()["Linear"]
    value = LAYOUTS[layout](getattr(own, parameter).detach())
    setattr(own, parameter, torch.nn.Parameter(value, requires_grad=False))
    with autocast("current"), pytest.raises(OperandError, match=f"layout {layout}.*to_dense"):
        own(values())


def test_a_sparse_gradient_is_refused_by_name_and_backward_may_go_on() -> None:
    for kind in KINDS:
        own = layers()[kind]
        with autocast("delayed"):
            y = own(values())
        with pytest.raises(OperandError, match=r"grad_output .*layout sparse_coo.*to_dense"):
            y.backward(values().to_sparse())
        y.backward(values())


def test_without_a_recipe_a_sparse_gradient_is_torchs() -> None:
    found = []
    for grad in (values().to_sparse(), values()):
        own = layers()["Linear"]
        own(values(seed=2)).backward(grad)
        found.append(own.weight.grad)
    torch.testing.assert_close(*found)


def test_a_parameter_on_another_device_is_refused_by_name() -> None:
    for name in NAMES:
        own = layers()["Linear"]
        own.bias = torch.nn.Parameter(cast(torch.Tensor, own.bias).to("meta"))
        with autocast(name), pytest.raises(OperandError, match="a parameter is on meta"):
            own(values())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "3-D": lambda x: x.view(2, 16, 32),
    "rows": lambda x: x[8:],
    "transposed": lambda x: x.t(),
}


@pytest.mark.parametrize(("name", "view"), turns(NAMES, VIEWS))
def test_gradients_pass_a_view_of_a_quantized_tensor(name: str | None, view: str) -> None:
    found = []
    plan = recipe.by_name("current").plan(LayerRole("linear"), torch.float32).input
    for is_quantized in (True, False):
        own, x = layers()["Linear"], QuantizedTensor.quantize(values(), plan)
        leaf = (x if is_quantized else x.dequantize()).requires_grad_()
        torch.manual_seed(3)
        with autocast(name):
            own(VIEWS[view](leaf)).square().sum().backward()
        assert leaf.grad is not None
        found.append([leaf.grad, own.weight.grad])
    if name == "delayed" and view != "transposed":  # codes are taken, with a scale of their own
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() < 0.1 * theirs.norm()
        return
    assert all(map(torch.equal, *found))
