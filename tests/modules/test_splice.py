"""Layers of another library's module as one chain: each linear computes what it computes alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp8core
from fp8core import recipe
from fp8core.chain.activation import activation_shape
from fp8core.chain.residual import AddShape
from fp8core.modules.splice import Splice
from tests.device import DEVICE

WIDTH, INNER = 64, 96
CHOSEN = ("current", "block", "mxfp8", "rowwise")
LINEARS = ("q", "k", "o", "gate", "up", "down")


class Layer(nn.Module):
    """Two norms and six linears, in chains or one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": DEVICE, "params_dtype": torch.bfloat16}
        self.first = fp8core.RMSNorm(WIDTH, name="first", **options)
        self.second = fp8core.LayerNorm(WIDTH, name="second", **options)
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, 32), "o": (96, WIDTH)}
        sizes |= {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
        for name, (columns, rows) in sizes.items():
            linear = fp8core.Linear(columns, rows, bias=name in "ko", name=name, **options)
            self.add_module(name, linear)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)
        self.product = fp8core.ops.SwiGLU()
        self.before = Splice([self.first, (self.q, self.k)], [self])
        branch = [self.second, (self.gate, self.up), activation_shape("swiglu"), self.down]
        self.behind = Splice([self.o, AddShape(), branch], [self])

    def in_chains(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.before.run(x)
        assert rows is not None
        y = self.behind.run(rows.tanh(), x)
        assert y is not None
        return y

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self.first(x)
        rows = torch.cat((self.q(normalized), self.k(normalized)), -1)
        total = self.o(rows.tanh()) + x
        normalized = self.second(total)
        halves = torch.cat((self.gate(normalized), self.up(normalized)), -1)
        y: torch.Tensor = total + self.down(self.product(halves))
        return y


def steps(layer: Layer, chosen: str, *, is_joined: bool, count: int = 3) -> list[torch.Tensor]:
    """Return results, gradients and states of some steps."""
    results = []
    source = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(2, 32, WIDTH, generator=source).to(DEVICE, torch.bfloat16).requires_grad_()
        with fp8core.autocast(recipe=recipe.by_name(chosen)):
            y = layer.in_chains(x) if is_joined else layer.apart(x)
        (y * torch.linspace(-1, 1, WIDTH, device=DEVICE)).sum().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad]
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [*results, *gradients, *layer.buffers()]  # type: ignore[list-item]  # each has one


def pairs_of(chosen: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = [steps(Layer(), chosen, is_joined=is_joined) for is_joined in (True, False)]
    return [*zip(*results, strict=True)]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_bits_are_those_of_the_layers_apart(chosen: str) -> None:
    assert all(torch.equal(a, b) for a, b in pairs_of(chosen))


def test_behind_an_activation_a_delayed_scale_casts_what_is_not_rounded_first() -> None:
    for a, b in pairs_of("delayed"):
        if a.is_floating_point():
            assert (a.float() - b.float()).norm() <= 0.05 * b.float().norm()
    layers, x = (Layer(), Layer()), torch.randn(2, 32, WIDTH, device=DEVICE).bfloat16()
    for scale in (1.0, 3.0, 0.5):
        t = [(x * scale).requires_grad_() for _ in layers]
        with fp8core.autocast(recipe=recipe.DelayedScaling()):
            normalized = layers[1].first(t[1])
            rows = torch.cat((layers[1].q(normalized), layers[1].k(normalized)), -1)
            joined = layers[0].before.run(t[0])
        assert joined is not None
        for y in (joined, rows):
            (y * torch.linspace(-1, 1, 96, device=DEVICE)).sum().backward()
        assert torch.equal(joined, rows)
        assert torch.equal(t[0].grad, t[1].grad)  # type: ignore[arg-type]  # both have one
    buffers = zip(layers[0].named_buffers(), layers[1].named_buffers(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in buffers)


def test_a_call_like_the_last_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    steps(layer, "delayed", is_joined=True)

    def refuse(*arguments: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(Splice, "_run_anew", refuse)
    steps(layer, "delayed", is_joined=True)


def test_siblings_cast_their_input_once_and_hold_it_once() -> None:
    held = []
    for is_joined in (True, False):
        layer, tensors = Layer(), {}

        def note(tensor: torch.Tensor, tensors: dict[int, int] = tensors) -> torch.Tensor:
            storage = tensor.untyped_storage()
            tensors[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = torch.randn(2, 32, WIDTH, device=DEVICE).bfloat16().requires_grad_()
        with (
            fp8core.autocast(recipe=recipe.DelayedScaling()),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            y = layer.in_chains(x) if is_joined else layer.apart(x)
        held.append(sum(tensors.values()))
        del y
    rows = 2 * 32
    # Of the inputs of two pairs, a copy in codes each, and its scale.
    assert held[0] <= held[1] - rows * 2 * WIDTH


def test_what_somebody_has_to_see_is_left_to_its_owner() -> None:
    x = torch.randn(2, 32, WIDTH, device=DEVICE).bfloat16()
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        layer = Layer()
        assert layer.before.run(x) is not None
        hook = layer.k.register_forward_hook(lambda *arguments: None)
        assert layer.before.run(x) is None
        hook.remove()
        assert layer.before.run(x) is not None
        layer.k = fp8core.Linear(WIDTH, 32, device=DEVICE, params_dtype=torch.bfloat16)
        assert layer.before.run(x) is None
        other = Layer()
        nn.utils.parametrizations.orthogonal(other.q.float(), "weight")
        assert other.before.run(x.float()) is None
        with fp8core.frozen_weights(layer):
            assert layer.behind.run(torch.zeros(2, 32, 96).to(x), x) is None
    assert layer.behind.run(torch.zeros(2, 32, 96).to(x), x) is None  # in high precision


CASTS = {
    "blocks": (recipe.Float8BlockScaling(), recipe.Float8CurrentScaling()),
    "margins": (recipe.DelayedScaling(margin=3), recipe.DelayedScaling()),
    "histories": (recipe.DelayedScaling(amax_history_len=2), recipe.DelayedScaling()),
    "nan": (recipe.MXFP8BlockScaling(nonfinite="propagate"), recipe.MXFP8BlockScaling()),
}


@pytest.mark.parametrize("case", CASTS)
def test_layers_cast_otherwise_than_their_siblings_run_apart(case: str) -> None:
    layer, x = Layer(), torch.randn(2, 32, WIDTH, device=DEVICE).bfloat16()
    rules = dict(zip("k*", CASTS[case], strict=True))
    with fp8core.autocast(recipe=recipe.PerLayer(rules)):
        assert layer.before.run(x) is None
        assert layer.behind.run(torch.zeros(2, 32, 96).to(x), x) is not None


def test_backward_of_siblings_works_once_main_grads_are_there() -> None:
    layers = [
        fp8core.Linear(WIDTH, n, bias=False, device=DEVICE, fuse_wgrad_accumulation=True)
        for n in (WIDTH, 32)
    ]
    norm = fp8core.RMSNorm(WIDTH, device=DEVICE)
    x = torch.randn(96, WIDTH, device=DEVICE, requires_grad=True)
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        y: Any = Splice([norm, tuple(layers)], [nn.ModuleList([norm, *layers])]).run(x)
    with pytest.raises(fp8core.OperandError, match="main_grad=None"):
        y.sum().backward()
    sums = [torch.zeros(layer.weight.shape, device=DEVICE) for layer in layers]
    for layer, main_grad in zip(layers, sums, strict=True):
        layer.weight.main_grad = main_grad  # type: ignore[attr-defined]  # set as frameworks do
    y.sum().backward()
    assert all(bool(main_grad.any()) for main_grad in sums)


def test_a_copy_has_chains_of_its_own() -> None:
    layer = Layer()
    want = steps(layer, "delayed", is_joined=True)
    other = copy.deepcopy(layer)
    assert other.before.layers[0] is other.first
    other.zero_grad()
    got = steps(other, "delayed", is_joined=True)
    layer.zero_grad()
    assert all(map(torch.equal, got, steps(layer, "delayed", is_joined=True)))
    assert len(got) == len(want)
