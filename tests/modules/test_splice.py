"""Layers of another library's module as one chain: each linear computes what it computes alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fp8core
from fp8core import recipe
from fp8core.backend_api import DequantizeDesc, QuantizeDesc
from fp8core.chain.activation import activation_shape
from fp8core.chain.linear.siblings import SiblingsLink
from fp8core.chain.repeated import Repeated
from fp8core.chain.residual import AddShape
from fp8core.conformance.subject import find
from fp8core.dispatch import table
from fp8core.modules import splice
from fp8core.modules.calls.bind import bind
from fp8core.modules.splice import Splice
from tests import recording_backend
from tests.chain import fused_toy
from tests.device import DEVICE
from tests.pairs import pairs

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


@pytest.fixture
def sums_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of siblings' input are added as torch's engine adds them."""
    monkeypatch.setattr(splice, "siblings", lambda links, context: SiblingsLink(tuple(links)))


@pytest.mark.usefixtures("sums_of_tensors")
@pytest.mark.parametrize("chosen", CHOSEN)
def test_bits_are_those_of_the_layers_apart(chosen: str) -> None:
    assert all(torch.equal(a, b) for a, b in pairs_of(chosen))


@pytest.mark.usefixtures("sums_of_tensors")
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


def split_steps(
    chosen: str, change: Callable[[Layer], object], *offered: str
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Return what ``steps`` does with a backend that casts halves of a gradient where it computes
    them, if that is ``offered``, with the counts of NaN and inf, and the calls of the backend."""
    layer = Layer()
    change(layer)
    with fused_toy.installed(*offered, variants=("split", "counted")) as calls:
        results = [each for each in steps(layer, chosen, is_joined=True) if each is not None]
    counts = [each for one in layer.children() for each in one._bindings.nonfinite.values()]  # type: ignore[union-attr,operator]  # layers
    return [*map(bits, (*results, *counts))], calls


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone().view(torch.uint8) if x.dim() else x.clone()


HALVES = "activation_backward_quantize"
CHANGES: dict[str, Callable[[Layer], object]] = {
    "nothing": lambda layer: None,
    "frozen gate and up": lambda layer: [
        each.requires_grad_(False) for each in (layer.gate.weight, layer.up.weight)
    ],
    "biases": lambda layer: [with_bias(layer, name) for name in ("gate", "up")],
    "counted": lambda layer: with_inf(layer),
}


def with_inf(layer: Layer) -> None:
    fp8core.clear_found_inf(layer)
    with torch.no_grad():
        layer.up.weight[3, 5] = torch.inf


def with_bias(layer: Layer, name: str) -> None:
    linear = fp8core.Linear(WIDTH, INNER, name=name, device=DEVICE, params_dtype=torch.bfloat16)
    setattr(layer, name, linear)
    with torch.no_grad():
        for parameter in linear.parameters():
            nn.init.normal_(parameter, std=0.2)
    branch = [layer.second, (layer.gate, layer.up), activation_shape("swiglu"), layer.down]
    layer.before = Splice([layer.first, (layer.q, layer.k)], [layer])
    layer.behind = Splice([layer.o, AddShape(), branch], [layer])


@pytest.mark.parametrize(("chosen", "change"), pairs([*CHOSEN, "delayed"], [*CHANGES]))
def test_gate_and_up_are_cast_where_their_gradients_are_computed(chosen: str, change: str) -> None:
    expected, _ = split_steps(chosen, CHANGES[change])
    results, calls = split_steps(chosen, CHANGES[change], HALVES)
    assert calls[HALVES] == 3
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.up.weight.requires_grad_(False),
        lambda layer: with_bias(layer, "up"),
    ],
    ids=["one frozen", "one bias"],
)
def test_linears_that_differ_cast_their_gradients_apart(change: Callable[[Layer], object]) -> None:
    expected, _ = split_steps("delayed", change)
    results, calls = split_steps("delayed", change, HALVES)
    assert not calls[HALVES]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def grads_of_input(
    layers: list[fp8core.Linear], x: torch.Tensor, dy: torch.Tensor, *, is_joined: bool
) -> torch.Tensor:
    x = x.detach().requires_grad_()
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        if is_joined:
            y: Any = Splice([tuple(layers)], [nn.ModuleList(layers)]).run(x)
        else:
            y = torch.cat([layer(x) for layer in layers], -1)
        (grad,) = torch.autograd.grad(y, x, dy)
    return grad


def gradient_in_float64(
    layer: fp8core.Linear, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return dgrad of the codes that ``layer`` multiplies, the sums of the magnitudes of its terms,
    and the share of these that its backend says a product may lose."""
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        (link,) = bind(layer, DEVICE, dy.dtype).links
    choice: Any = link.choices["dgrad"]
    desc, run = choice.desc, partial(table.resolve, device=DEVICE)
    a = run(QuantizeDesc(dy.dtype, desc.a, None)).run(dy).rowwise
    b = run(QuantizeDesc(dy.dtype, None, desc.b)).run(layer.weight.detach()).columnwise
    rows, columns = (
        run(DequantizeDesc(spec)).run(each).double() for spec, each in ((desc.a, a), (desc.b, b))
    )
    figures = find(choice.backend, DEVICE.type).numerics(desc)
    lost = figures.sum_error + rows.shape[1] * figures.sum_error_per_term
    return rows @ columns.t(), rows.abs() @ columns.abs().t(), lost


@pytest.mark.parametrize("rows", [64, 37, 8])
def test_siblings_round_the_sum_of_their_gradients_once_a_product(rows: int) -> None:
    """Each element within its bound, and the worst row better than that of a sum of tensors."""
    torch.manual_seed(3)
    widths = (64, 32, 48)
    own: dict[str, Any] = {"bias": False, "device": DEVICE, "params_dtype": torch.bfloat16}
    layers = [fp8core.Linear(WIDTH, width, **own) for width in widths]
    x, dy = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (WIDTH, sum(widths)))
    joined, apart = (grads_of_input(layers, x, dy, is_joined=way) for way in (True, False))
    products = [*map(gradient_in_float64, layers, dy.split(widths, 1))]
    (q, _, _), (k, _, _), (v, _, _) = products
    exact, share = q + k + v, max(share for *_, share in products)
    lost: Any = sum(share * sizes for _, sizes, share in products)
    # Three results are rounded by half an ulp of bfloat16, and two are terms of the next sum.
    rounded = v.abs() + (v + k).abs() + exact.abs() + 3 * lost
    bound = 1.02 * (2.0**-8 * rounded + lost + share * rounded)
    assert ((joined.double() - exact).abs() <= bound).all()
    if share < 2.0**-16:  # of sums in float32; others may lose as much as a rounding
        errors = [(each.double() - exact).norm(dim=1) for each in (joined, apart)]
        assert errors[0].max() <= errors[1].max()
        assert errors[0].norm() < errors[1].norm()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a recorder of CPUs")
@pytest.mark.parametrize("chosen", ["delayed", "current", "block"])
def test_repeated_steps_add_in_their_products(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording_backend.install(monkeypatch)
    recording_backend.RECORDER.problems.clear()
    results, layer = [], Layer()
    for name, each in ((recording_backend.NAME, layer), ("reference", Layer())):
        with fp8core.use_backend(name):
            results.append(steps(each, chosen, is_joined=True, count=5))
    assert all(map(torch.equal, *results))
    assert not recording_backend.RECORDER.problems
    ((chain, *_),) = layer.behind._chains.values()
    assert chain is not None
    programs = [each for each in chain._programs.values() if isinstance(each, Repeated)]
    assert [each.is_recorded for each in programs] == [(True, True)]
