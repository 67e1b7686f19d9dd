"""Plain tensors that a kernel must not read at their address: freed, lazy, sparse, elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fp8core as te
from fp8core import OperandError, QuantizedTensor, ops, recipe
from fp8core.backend_api import OpDesc
from fp8core.dispatch import table
from fp8core.recipe.plan import LayerRole
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE
from tests.pairs import turns

NAMES = [*recipe.names(), None]
Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look at every tensor that the backend is given, as a kernel would read it."""
    bind = ReferenceBackend.bind

    def bind_and_look(own: ReferenceBackend, desc: OpDesc, device: torch.device) -> Any:
        run = bind(own, desc, device)

        def looking(*arguments: Any, **keywords: Any) -> Any:
            for one in tree_leaves((arguments, keywords)):
                if isinstance(one, torch.Tensor):
                    assert not one.is_neg()
                    assert not one.numel() or one.data_ptr() != 0
            return run(*arguments, **keywords)

        return looking

    table.forget()
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceBackend, "bind", bind_and_look)
        yield
    table.forget()


def values(seed: int = 1) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))


def autocast(name: str | None) -> Any:
    return te.autocast(enabled=name is not None, recipe=name)


def layers() -> dict[str, Make]:
    return {
        "Linear": lambda: te.Linear(32, 32),
        "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
        "LayerNormMLP": lambda: te.LayerNormMLP(32, 64),
        "Sequential": lambda: ops.Sequential(ops.Linear(32, 32), ops.RMSNorm(32)),
    }


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return layers()[kind]()


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as torch gives the gradient of a complex conjugate's imaginary part."""
    return torch._neg_view((-x).contiguous())


def freed() -> torch.Tensor:
    made = values()
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, layers()))
def test_a_lazy_negation_is_made(name: str | None, kind: str) -> None:
    found = []
    for lazy in (True, False):
        own, x, grad = made(kind), values(), values(2)
        torch.manual_seed(3)
        x, grad = (negated(x), negated(grad)) if lazy else (x, grad)
        x.requires_grad_()
        with autocast(name):
            y = own(x)
        y.backward(grad)
        found.append([y.detach(), x.grad, *(one.grad for one in own.parameters())])
    assert all(map(torch.equal, *found))


def test_a_gradient_through_a_complex_conjugate_has_its_sign() -> None:
    own = made("Linear")
    with autocast("current"):
        y = own(values())
    torch.complex(values(3), y).conj().imag.sum().backward()
    assert torch.equal(own.bias.grad, torch.full((32,), -32.0))


def test_a_lazy_negation_as_weight_is_made() -> None:
    own, other = made("Linear"), made("Linear")
    other.weight = torch.nn.Parameter(negated(own.weight.detach()))
    assert other.weight.is_neg()
    with autocast("current"):
        assert torch.equal(other(values()), own(values()))


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, layers()))
def test_a_zero_without_memory_is_made(name: str | None, kind: str) -> None:
    own = made(kind)
    zero = torch._efficientzerotensor((32, 32), device=DEVICE)
    with autocast(name):
        y = own(zero)
        assert torch.equal(y, own(torch.zeros(32, 32)))
    y.backward(zero)
    assert not any(one.grad.any() for one in own.parameters())


@pytest.mark.parametrize(("name", "kind"), turns(NAMES, layers()))
def test_freed_memory_is_refused_by_name(name: str | None, kind: str) -> None:
    own = made(kind)
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
            own = made("Linear")
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
    own = made("Linear")
    value = LAYOUTS[layout](getattr(own, parameter).detach())
    setattr(own, parameter, torch.nn.Parameter(value, requires_grad=False))
    with autocast("current"), pytest.raises(OperandError, match=f"layout {layout}.*to_dense"):
        own(values())


def test_a_sparse_gradient_is_refused_by_name_and_backward_may_go_on() -> None:
    for kind in layers():
        own = made(kind)
        with autocast("delayed"):
            y = own(values())
        with pytest.raises(OperandError, match=r"grad_output .*layout sparse_coo.*to_dense"):
            y.backward(values().to_sparse())
        y.backward(values())


def test_without_a_recipe_a_sparse_gradient_is_torchs() -> None:
    found = []
    for grad in (values().to_sparse(), values()):
        own = made("Linear")
        own(values(2)).backward(grad)
        found.append(own.weight.grad)
    torch.testing.assert_close(*found)


def test_a_parameter_on_another_device_is_refused_by_name() -> None:
    for name in NAMES:
        own = made("Linear")
        own.bias = torch.nn.Parameter(cast(torch.Tensor, own.bias).to("meta"))
        with autocast(name), pytest.raises(OperandError, match="a parameter is on meta"):
            own(values())


def test_empty_tensors_need_no_memory() -> None:
    for name in NAMES:
        own, x = made("Linear"), torch.empty(0, 32, requires_grad=True)
        with autocast(name):
            y = own(x)
        y.backward(torch.empty(0, 32))
        assert x.grad is not None, name


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
        own, x = made("Linear"), QuantizedTensor.quantize(values(), plan)
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
