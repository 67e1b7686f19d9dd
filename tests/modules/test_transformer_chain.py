"""A Transformer layer that runs as one chain has the bits of its layers run one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fp8core
from fp8core import recipe
from fp8core.chain.repeated import Repeated
from fp8core.errors import UnsupportedError
from fp8core.modules import transformer_chain
from fp8core.modules.transformer_chain import TransformerChain
from tests.pairs import turns
from tests.recording_backend import install

torch.set_num_threads(1)
SEQUENCES, LENGTH, HIDDEN, FFN, HEADS = 2, 16, 64, 96, 4
RECIPES = ("delayed", "current", "block", "mxfp8")
OPTIONS: dict[str, dict[str, Any]] = {
    "one weight": {"fuse_qkv_params": True},
    "one weight, one after the other": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "groups": {"num_gqa_groups": 2, "fuse_qkv_params": True},
    "rmsnorm swiglu": {
        **{"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
        "fuse_qkv_params": True,
    },
}


def make(seed: int = 0, **options: Any) -> fp8core.TransformerLayer:
    torch.manual_seed(seed)
    given: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | options
    layer = fp8core.TransformerLayer(HIDDEN, FFN, HEADS, **given)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def inputs(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SEQUENCES, length, HIDDEN, generator=generator).requires_grad_()


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have layers of a Transformer layer run by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerChain, "run", lambda *given: None)
        yield


def step(layer: Any, x: torch.Tensor, name: str = "current", **given: Any) -> list[Any]:
    """Return the output, all gradients, and what the layer holds for later steps."""
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x, **given)
    wanted = [one for one in (x, *layer.parameters()) if one.requires_grad]
    grads: tuple[Any, ...] = ()
    if y.requires_grad:
        grads = torch.autograd.grad(y, wanted, torch.ones_like(y) / 3, allow_unused=True)
    return [y.detach(), *grads, *(buffer.clone() for buffer in layer.buffers())]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one is None) == (other is None), number
        if one is not None:
            assert torch.equal(one, other), number
            assert one.stride() == other.stride(), number


def nodes_of(y: torch.Tensor) -> set[str]:
    """Return the names of the autograd nodes before ``y``."""
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def is_one_chain(layer: Any, x: torch.Tensor, name: str = "current", **given: Any) -> bool:
    with fp8core.autocast(recipe=recipe.by_name(name)):
        return nodes_of(layer(x, **given)) == {"_ChainBackward", "AccumulateGrad"}


def test_one_weight_makes_one_chain() -> None:
    """Else torch puts three weights together before it. tests/test_ways.py compares the bits."""
    for option, name in turns(OPTIONS, RECIPES):
        assert is_one_chain(make(**OPTIONS[option]), inputs(), name), (option, name)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_modes_sizes_and_what_is_trained_may_change(name: str) -> None:
    ours, theirs = make(), make()

    def both(change: Callable[[Any], Any]) -> None:
        change(ours)
        change(theirs)

    def compare(x: torch.Tensor) -> None:
        with one_by_one():
            expected = step(theirs, x, name)
        assert_same(step(ours, x, name), expected)

    compare(inputs(0))
    compare(inputs(1, length=8))
    compare(inputs(2).detach())
    with torch.no_grad():
        compare(inputs(3))
    both(lambda layer: layer.eval())
    compare(inputs(4))
    both(lambda layer: layer.train())
    compare(inputs(5))
    both(lambda layer: layer.layernorm_mlp.requires_grad_(False))
    compare(inputs(6))
    both(lambda layer: layer.requires_grad_(False))
    compare(inputs(7))
    both(lambda layer: layer.requires_grad_(True))
    both(lambda layer: setattr(layer.self_attention.core_attention, "attn_mask_type", "no_mask"))
    compare(inputs(8))
    both(lambda layer: setattr(layer.self_attention.core_attention, "softmax_scale", 1.0))
    compare(inputs(9))
    both(lambda layer: layer.load_state_dict(make(3).state_dict(), strict=False))
    compare(inputs(10))
    both(lambda layer: layer.layernorm_mlp.unbind())
    compare(inputs(11))
    compare(inputs(0, length=0))


class TwiceProjected(torch.nn.Module):
    def __init__(self, proj: torch.nn.Module) -> None:
        super().__init__()
        self.proj = proj
        self.return_bias = False

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return 2 * self.proj(x, is_first_microbatch)


DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda layer: layer.self_attention.proj.register_forward_hook(
        lambda module, given, output: output * 2
    ),
    "a hook of attention": lambda layer: layer.self_attention.register_forward_pre_hook(
        lambda module, given: None
    ),
    "a hook of the gradient": lambda layer: layer.layernorm_mlp.register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] * 2, *grad_input[1:])
    ),
    "a forward of its own": lambda layer: setattr(
        layer.self_attention.core_attention,
        "forward",
        lambda query, key, value, mask, **given: value.flatten(-2),
    ),
    "a module of another class": lambda layer: setattr(
        layer.self_attention, "proj", TwiceProjected(layer.self_attention.proj)
    ),
    "dropout": lambda layer: setattr(layer, "hidden_dropout", 0.5),
    "dropped paths": lambda layer: setattr(
        layer, "drop_path", fp8core.modules.residual.DropPath(0.5, "sbhd")
    ),
    "dropout of attention": lambda layer: setattr(
        layer.self_attention.core_attention, "attention_dropout", 0.5
    ),
    "a delayed weight gradient": lambda layer: layer.layernorm_mlp._delay_wgrads(),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_a_layer_does_besides_counts(change: str) -> None:
    ours, theirs = make(), make()
    for layer in (ours, theirs):
        step(layer, inputs(0))
        DIFFERENT[change](layer)
        layer.layernorm_mlp.unbind()
    for seed in range(2):
        torch.manual_seed(8)
        result = step(ours, inputs(seed))
        torch.manual_seed(8)
        with one_by_one():
            assert_same(result, step(theirs, inputs(seed)))


ARGUMENTS: dict[str, dict[str, Any]] = {
    "mask type": {"self_attn_mask_type": "no_mask"},
    "window": {"window_size": (2, 0)},
    "microbatch": {"is_first_microbatch": True},
    "checkpoint": {"checkpoint_core_attention": True},
    "rotation": {"rotary_pos_emb": torch.randn(LENGTH, 1, 1, HIDDEN // HEADS)},
    "alibi": {"core_attention_bias_type": "alibi"},
    "cap": {"softcap": 2.0},
}


def test_arguments_of_a_call_count() -> None:
    for argument in ARGUMENTS:
        ours, theirs = make(attn_input_format="bshd"), make(attn_input_format="bshd")
        for given in ({}, ARGUMENTS[argument], {}):
            with one_by_one():
                expected = step(theirs, inputs(1), **given)
            assert_same(step(ours, inputs(1), **given), expected)


def test_the_last_call_is_repeated_without_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make()
    step(ours, inputs(0))
    with one_by_one():
        step(theirs, inputs(0))
        expected = step(theirs, inputs(1))
    with monkeypatch.context() as patch:
        patch.setattr(transformer_chain, "bind", None)
        assert_same(step(ours, inputs(1)), expected)
    again = copy.deepcopy(ours)
    assert again._chain._repeat is None
    assert_same(step(again, inputs(1)), expected)


def test_what_high_precision_offers_is_left_to_the_layers() -> None:
    layer = make(fuse_qkv_params=True)
    y = layer(inputs())
    assert len(nodes_of(y)) > 2
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling(fp8_dpa=True)):
        assert len(nodes_of(layer(inputs()))) > 2
    with fp8core.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        assert len(nodes_of(layer(inputs()))) > 2
    assert is_one_chain(layer, inputs())


def test_a_recipe_that_draws_numbers_is_left_to_the_layers() -> None:
    layer = make(fuse_qkv_params=True, params_dtype=torch.bfloat16)
    x = inputs().detach().bfloat16().requires_grad_()
    for _ in range(2):
        with fp8core.autocast(recipe=recipe.by_name("nvfp4")):
            assert len(nodes_of(layer(x))) > 2
    assert layer._chain._refused is not None
    with fp8core.autocast(recipe=recipe.by_name("current")):
        assert len(nodes_of(layer(x))) == 2


def test_a_monitor_sees_each_layer() -> None:
    ours, theirs = make(fuse_qkv_params=True), make(fuse_qkv_params=True)
    step(ours, inputs())
    with fp8core.monitor(ours) as report:
        step(ours, inputs())
    with one_by_one(), fp8core.monitor(theirs) as expected:
        step(theirs, inputs())
    assert str(report) == str(expected)
    assert_same(step(ours, inputs()), step(theirs, inputs()))


def test_a_trace_and_a_transform_see_the_layers() -> None:
    layer, x = make(fuse_qkv_params=True), inputs().detach()
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        traced = make_fx(lambda x: layer(x))(x)
        with one_by_one():
            expected = make_fx(lambda x: layer(x))(x)
        assert traced.code == expected.code
        assert layer._chain._repeat is None
        assert not layer._chain._known
        with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap"):
            torch.func.vmap(layer)(x[None])
    assert is_one_chain(layer, inputs())


def test_a_second_derivative_is_refused() -> None:
    layer, x = make(fuse_qkv_params=True), inputs()
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    refused = r"TransformerLayer\(64, 96\): a second derivative"
    with pytest.raises(UnsupportedError, match=refused):
        torch.autograd.backward(grad, torch.ones_like(grad))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a backend compute that records runs and repeats them."""
    install(monkeypatch)
    with fp8core.use_backend("recording"):
        yield


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_layer_is_recorded_both_ways(name: str) -> None:
    layer = make(fuse_qkv_params=True)
    for seed in range(3):
        step(layer, inputs(seed), name)
    (known,) = layer._chain._known.values()
    (program,) = known.links._programs.values()
    assert isinstance(program, Repeated)
    assert program.is_recorded == (True, True)
