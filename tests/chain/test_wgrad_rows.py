"""Rows that wgrad cannot contract: each tensor is cast as it came, and its codes get the zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import Linear, autocast
from fp8core.backend_api import Alignment, GemmDesc, GroupedGemmDesc
from fp8core.chain.repeated import Repeated
from fp8core.dispatch import table
from fp8core_backends.reference.backend import ReferenceBackend
from tests import recording_backend

K, N = 48, 32
RECIPES = ["current", "delayed", "rowwise", "block"]


@pytest.fixture(autouse=True)
def steps_of_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the reference's products refuse a k that is no multiple of 16, as a GPU's do."""
    own, bind = ReferenceBackend.alignment, ReferenceBackend.bind

    def alignment(self: ReferenceBackend, desc: GemmDesc) -> Alignment:
        return own(self, desc)._replace(k=16) if desc.low_precision else own(self, desc)

    def bound(self: ReferenceBackend, desc: Any, device: torch.device) -> Any:
        run = bind(self, desc, device)
        if type(desc) not in (GemmDesc, GroupedGemmDesc) or not desc.low_precision:
            return run

        def product(a: Any, b: Any, *groups: torch.Tensor, **keywords: Any) -> Any:
            assert a.data.shape[1] % 16 == 0
            return run(a, b, *groups, **keywords)

        return product

    monkeypatch.setattr(ReferenceBackend, "alignment", alignment)
    monkeypatch.setattr(ReferenceBackend, "bind", bound)
    table.forget()
    yield
    table.forget()


class Pads(TorchDispatchMode):
    """Takes down the dtypes of what torch pads, but for the blocks of 128 of the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_block = func is torch.ops.aten.constant_pad_nd.default and any(
            size and size % 128 == 0 for size in result.shape
        )
        is_pad = func is torch.ops.aten.constant_pad_nd.default and not is_block
        if is_pad or func is torch.ops.aten.new_empty.default:  # memory for a padded copy
            self.dtypes.add(result.dtype)
        return result


def copies(layer: Linear, count: int) -> list[Linear]:
    made = [Linear(K, N, params_dtype=torch.bfloat16) for _ in range(count)]
    for one in made:
        one.load_state_dict(layer.state_dict())
    return made


def step(layer: Any, x: torch.Tensor, dy: torch.Tensor, name: str) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with autocast(recipe=name):
        y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def longer(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])


@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_have_the_bits_of_rows_padded_by_hand(name: str, rows: int) -> None:
    whole = -(-rows // 16) * 16
    ours, theirs = copies(Linear(K, N, params_dtype=torch.bfloat16), 2)
    for _ in range(3):
        x, dy = torch.randn(rows, K).bfloat16(), torch.randn(rows, N).bfloat16()
        wanted = step(theirs, longer(x, whole), longer(dy, whole), name)
        got = step(ours, x, dy, name)
        for one, other in zip(got, (wanted[0][:rows], wanted[1][:rows], *wanted[2:]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", RECIPES)
def test_codes_alone_are_padded_and_in_backward_alone(name: str) -> None:
    layer, x = Linear(K, N, params_dtype=torch.bfloat16), torch.randn(5, K).bfloat16()
    with Pads() as forward, autocast(recipe=name):
        y = layer(x.requires_grad_())
    with Pads() as backward:
        y.sum().backward()
    assert not forward.dtypes
    assert backward.dtypes == {torch.uint8}


def test_whole_steps_of_rows_are_not_padded() -> None:
    for name in RECIPES:
        layer, x = Linear(K, N, params_dtype=torch.bfloat16), torch.randn(32, K).bfloat16()
        with Pads() as pads, autocast(recipe=name):
            layer(x).sum().backward()
        assert not pads.dtypes, name


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_wgrad_of_any_rows_goes_where_it_is_asked_for(option: str) -> None:
    plain, x = Linear(K, N, params_dtype=torch.bfloat16), torch.randn(5, K).bfloat16()
    other = Linear(K, N, params_dtype=torch.bfloat16, **{option: True})
    other.load_state_dict(plain.state_dict())
    other.weight.main_grad = torch.zeros(N, K)
    for layer in (plain, other):
        with autocast(recipe="current"):
            y = layer(x)
        y.backward(torch.ones_like(y))
    if option == "delay_wgrad_compute":
        other.backward_dw()
        assert torch.equal(other.weight.grad, plain.weight.grad)
    else:
        assert torch.equal(other.weight.main_grad.bfloat16(), plain.weight.grad)


def test_groups_are_padded_before_their_cast() -> None:
    layer, x = fp8core.GroupedLinear(2, K, N), torch.randn(9, K)
    with autocast(recipe="rowwise"):
        layer(x, [4, 5]).sum().backward()
    assert layer.weight0.grad is not None


@pytest.mark.parametrize("name", ["current", "block"])
def test_a_graph_computes_the_same_gradients(name: str) -> None:
    layer = Linear(K, N, params_dtype=torch.bfloat16)
    x, dy = torch.randn(5, K).bfloat16(), torch.randn(5, N).bfloat16()
    wanted = step(layer, x, dy, name)
    layer.zero_grad()
    torch.compiler.reset()
    got = step(torch.compile(layer, backend="aot_eager"), x, dy, name)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recorded_step_pads_codes_in_each_repeat(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording_backend.install(monkeypatch)
    ours, theirs = copies(Linear(K, N, params_dtype=torch.bfloat16), 2)
    for _ in range(5):
        x, dy = torch.randn(5, K).bfloat16(), torch.randn(5, N).bfloat16()
        with fp8core.use_backend(recording_backend.NAME):
            got = step(ours, x, dy, name)
        for one, other in zip(got, step(theirs, x, dy, name), strict=True):
            assert torch.equal(one, other)
    (chain,) = ours._bindings.last[1].parts
    programs = [one for one in chain._programs.values() if isinstance(one, Repeated)]
    assert [one.is_recorded for one in programs] == [(True, True)]
