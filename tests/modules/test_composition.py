"""Layers of layers as chains: what cuts them, and what ``fp8_mha`` hands over in between.

Under ``fp8_mha`` what crosses the projections of attention is quantized once, and nothing changes:
the reference backend's gradients of attention do not depend on the rounding of its result, so that
outputs, gradients and delayed state equal those of ``fp8_dpa`` bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import AttentionBackwardDesc
from fp8core.modules import composition
from fp8core.modules.calls.bind import bind
from fp8core_backends.reference.backend import ReferenceBackend
from tests import ways
from tests.pairs import pairs

BF16 = torch.bfloat16
HIDDEN, HEADS, GROUPS, TOKENS = 64, 4, 2, 32
RECIPES = {
    "current": lambda **options: recipe.Float8CurrentScaling(**options),
    "delayed": lambda **options: recipe.DelayedScaling(amax_history_len=3, **options),
}
LAYERS: dict[str, dict[str, Any]] = {
    "split": {},
    "fused": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "interleaved": {"fuse_qkv_params": True, "num_gqa_groups": GROUPS},
    "without_norm": {"input_layernorm": False},
    "norms_of_heads": {"qk_norm_type": "RMSNorm"},
    "normalized": {"return_layernorm_output": True},
    "return_bias": {"return_bias": True},
    "cross": {"attention_type": "cross"},
    "learnable": {"softmax_type": "learnable"},
    "dropout": {"attention_dropout": 0.3},
    "bshd": {"qkv_format": "bshd", "attn_mask_type": "no_mask"},
    "rotated": {},
    "padded": {},
    "padded, interleaved": {"fuse_qkv_params": True, "num_gqa_groups": GROUPS},
}


def made(name: str = "split", **more: Any) -> te.MultiheadAttention:
    torch.manual_seed(1)
    options = {
        "num_gqa_groups": GROUPS,
        "attention_dropout": 0.0,
        "input_layernorm": True,
        "params_dtype": BF16,
        **LAYERS[name],
        **more,
    }
    layer = te.MultiheadAttention(HIDDEN, HEADS, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return layer


def call(name: str) -> dict[str, Any]:
    if name == "cross":
        return {"encoder_output": torch.randn(24, 2, HIDDEN).to(BF16)}
    if name == "bshd":
        bias = torch.randn(1, HEADS, 1, 1).to(BF16)
        return {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    if name == "rotated":
        return {"rotary_pos_emb": te.RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS)}
    return {"tokens": 5} if name.startswith("padded") else {}


def step(
    layer: te.MultiheadAttention, chosen: recipe.Recipe, tokens: int = TOKENS, **given: Any
) -> list[torch.Tensor]:
    """Return the outputs, all gradients and the delayed state."""
    torch.manual_seed(2)
    x = torch.randn(tokens, 2, HIDDEN).to(BF16).requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=chosen):
        outputs = layer(x, **given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(3)
    outputs[0].backward(torch.randn(outputs[0].shape).to(BF16))
    assert x.grad is not None
    grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return [*(one.detach() for one in outputs), x.grad, *grads, *layer.buffers()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def count_nodes(y: torch.Tensor) -> int:
    """Return how many nodes of the library lie behind ``y``."""
    seen, left, count = set(), [y.grad_fn], 0
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            count += node.name() == "_NodeBackward"
            left += [one for one, _ in node.next_functions]
    return count


@pytest.mark.parametrize(
    ("name", "family", "backward"), pairs(LAYERS, RECIPES, ["dequantized", "fp8"])
)
def test_three_steps_equal_those_of_fp8_dpa(name: str, family: str, backward: str) -> None:
    ours, theirs, given = made(name), made(name), call(name)
    for _ in range(3):
        pair = [
            step(layer, RECIPES[family](fp8_dpa_backward=backward, **which), **given)
            for layer, which in ((ours, {"fp8_mha": True}), (theirs, {"fp8_dpa": True}))
        ]
        assert_same(*pair)


@pytest.mark.parametrize(("name", "nodes"), [("split", 1), ("without_norm", 1), ("cross", 3)])
def test_layers_run_as_one_chain(name: str, nodes: int) -> None:
    layer, x = made(name), torch.randn(TOKENS, 2, HIDDEN).to(BF16).requires_grad_()
    with te.autocast(recipe=RECIPES["current"](fp8_mha=True)):
        assert count_nodes(layer(x, **call(name))) == nodes
    with te.autocast(recipe=RECIPES["current"](fp8_dpa=True)):
        assert count_nodes(layer(x, **call(name))) == nodes + (2 if nodes == 1 else 1)


def test_rotated_queries_reach_the_projection_in_codes() -> None:
    layer, x = made(), torch.randn(TOKENS, 2, HIDDEN).to(BF16).requires_grad_()
    with te.autocast(recipe=RECIPES["delayed"](fp8_mha=True)):
        y = layer(x, **call("rotated"))
    assert count_nodes(y) == 4  # qkv, q, k, attention and proj


def held(layer: te.MultiheadAttention, chosen: recipe.Recipe) -> list[torch.Tensor]:
    """Return what forward saves, without parameters and input."""
    x, saved = torch.randn(TOKENS, 2, HIDDEN).to(BF16).requires_grad_(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    )
    with hooks, te.autocast(recipe=chosen):
        layer(x)
    known = {one.untyped_storage().data_ptr() for one in (x, *layer.parameters())}
    storages = {one.untyped_storage().data_ptr(): one for one in saved}
    return [one for address, one in storages.items() if address not in known]


def test_attention_holds_no_result_of_its_own() -> None:
    rows = 2 * TOKENS
    codes, plain = (
        held(made(), RECIPES["current"](**{which: True, **UNROUNDED})) for which in RECIPE_FIELDS
    )
    assert not [one for one in codes if one.dtype == BF16]
    assert [one.shape for one in plain if one.dtype == BF16] == [(rows, HIDDEN)]
    sizes = [sum(one.untyped_storage().nbytes() for one in each) for each in (codes, plain)]
    assert sizes[1] - sizes[0] == 2 * rows * HIDDEN
    for which, more in (("fp8_mha", 0), ("fp8_dpa", rows * HIDDEN)):  # codes by another scale
        found = held(made(), RECIPES["current"](**{which: True}))
        assert sum(one.untyped_storage().nbytes() for one in found) == sizes[0] + more


RECIPE_FIELDS = ("fp8_mha", "fp8_dpa")
UNROUNDED = {"fp8_dpa_output": "high_precision"}


@pytest.mark.parametrize("trains", [True, False])
def test_backward_reads_the_codes_of_the_projection(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    plain = ReferenceBackend.attention_backward

    def spy(desc: AttentionBackwardDesc, *given: Any, **keywords: Any) -> Any:
        results.append(given[4].clone())
        return plain(desc, *given, **keywords)

    monkeypatch.setattr(ReferenceBackend, "attention_backward", staticmethod(spy))
    for which in RECIPE_FIELDS:
        layer = made(kv_channels=40 if trains else 56)  # sizes that nothing else is bound for
        layer.proj.requires_grad_(trains)  # without, the projection holds no input
        step(layer, RECIPES["current"](**{which: True, **UNROUNDED}))
    codes, exact = (one.float().flatten(0, 1) for one in results)
    scale = torch.tensor(448.0) / exact.abs().max()
    rounded = (exact * scale).to(torch.float8_e4m3fn).float() / scale
    torch.testing.assert_close(codes, rounded, rtol=2**-8, atol=0.0)
    assert not torch.equal(codes, exact)


@pytest.mark.parametrize(
    ("repeat", "family"),
    [(te.checkpoint, "current"), (te.checkpoint, "delayed"), (torch_checkpoint, "current")],
    ids=["current", "delayed", "by_torch"],
)
def test_a_recompute_repeats_the_chain(repeat: Any, family: str) -> None:
    results = []
    for is_repeated in (False, True):
        layer = made("dropout")
        for _ in range(2):
            torch.manual_seed(4)
            x = torch.randn(TOKENS, 2, HIDDEN).to(BF16).requires_grad_()
            layer.zero_grad()
            with te.autocast(recipe=RECIPES[family](fp8_mha=True)):
                y = repeat(layer, x, use_reentrant=False) if is_repeated else layer(x)
                y.float().square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(one.grad for one in layer.parameters())])
    assert_same(*results)


@pytest.mark.parametrize("child", ["core_attention", "proj", "layernorm_qkv"])
def test_hooks_of_the_layers_still_run(child: str) -> None:
    layer, calls = made(), []
    getattr(layer, child).register_forward_hook(lambda *_: calls.append(child))
    ours = step(layer, RECIPES["delayed"](fp8_mha=True))
    assert calls == [child]
    assert_same(ours, step(made(), RECIPES["delayed"](fp8_mha=True)))


def test_weights_that_are_kept_are_used() -> None:
    chosen = RECIPES["current"](fp8_mha=True)
    layer, x = made().eval(), torch.randn(TOKENS, 2, HIDDEN).to(BF16)
    with te.autocast(recipe=chosen), torch.no_grad():
        wanted = layer(x)
        with te.frozen_weights(layer):
            assert torch.equal(layer(x), wanted)
            assert torch.equal(layer(x), wanted)
        first = layer(x, is_first_microbatch=True)
        assert torch.equal(first, wanted)
        assert torch.equal(layer(x, is_first_microbatch=False), wanted)


def test_a_copy_runs_its_own_layers() -> None:
    layer = made()
    before = step(layer, RECIPES["delayed"](fp8_mha=True))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    after = step(twin, RECIPES["delayed"](fp8_mha=True))
    assert 0.5 < after[0].float().norm() / before[0].float().norm() < 2


def test_a_second_backward_is_refused_by_name() -> None:
    layer, x = made(), torch.randn(TOKENS, 2, HIDDEN).to(BF16).requires_grad_()
    with te.autocast(recipe=RECIPES["current"](fp8_mha=True)):
        y = layer(x)
    y.sum().backward()
    with pytest.raises(te.UnsupportedError, match="a second time"):
        y.sum().backward()


def test_wrong_inputs_are_named() -> None:
    layer = made()
    with te.autocast(recipe=RECIPES["current"](fp8_mha=True)):
        with pytest.raises(te.OperandError, match="input"):
            layer(torch.randn(TOKENS, 2, HIDDEN + 16).to(BF16))
        with pytest.raises(te.OperandError, match="hidden_states is NoneType"):
            layer(None)
        with pytest.raises(te.OperandError, match=r"torch\.float32"):
            layer(torch.randn(TOKENS, 2, HIDDEN))
        with pytest.raises(te.OperandError):
            layer(torch.randn(HIDDEN).to(BF16))


# --- what cuts ---

CUT = {
    "MultiheadAttention": {"layernorm_qkv": 2, "core_attention": 3, "proj": 2},
    "TransformerLayer": {
        "self_attention": 2,
        "self_attention.layernorm_qkv": 3,
        "self_attention.core_attention": 4,
        "self_attention.proj": 3,
        "layernorm_mlp": 2,
    },
}
CHILDREN = [(kind, child) for kind, children in CUT.items() for child in children]
CUT_OPTIONS: ways.Options = {"fuse_qkv_params": True, "params_dtype": BF16}


def options_of(kind: str) -> ways.Options:
    more = {"hidden_dropout": 0.0} if kind == "TransformerLayer" else {"input_layernorm": True}
    return CUT_OPTIONS | more


@contextlib.contextmanager
def hooked(layer: torch.nn.Module, child: str) -> Iterator[Any]:
    layer.get_submodule(child).register_forward_hook(lambda *_: None)
    yield layer


CHOSEN = {
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "codes": recipe.Float8CurrentScaling(fp8_mha=True),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


@functools.cache
def plain(kind: str, name: str) -> ways.Run:
    """The run without a hook, once for all children."""
    return ways.run(kind, name, options_of(kind), ways.plain)


@pytest.mark.parametrize(("which", "name"), pairs(CHILDREN, CHOSEN))
def test_a_layer_with_a_hook_changes_no_bit(
    which: tuple[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, child = which
    monkeypatch.setitem(ways.RECIPES, name, CHOSEN[name])
    ours = ways.run(kind, name, options_of(kind), functools.partial(hooked, child=child))
    for mine, wanted in zip(ours.results, plain(kind, name).results, strict=True):
        assert (mine is None) == (wanted is None)
        assert mine is None or torch.equal(mine, wanted)


@pytest.mark.parametrize(("kind", "child"), CHILDREN)
def test_a_hook_cuts_no_more_than_its_layer(kind: str, child: str) -> None:
    layer = ways.make(kind, "current", options_of(kind))
    x = torch.randn(ways.SEQUENCES).to(BF16).requires_grad_()
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert count_nodes(layer(x)) == 1
        hook = layer.get_submodule(child).register_forward_hook(lambda *_: None)
        for _ in range(3):
            assert count_nodes(layer(x)) == CUT[kind][child]
        hook.remove()
        for _ in range(3):
            assert count_nodes(layer(x)) == 1


def test_dropout_leaves_each_block_a_chain() -> None:
    layer = ways.make("TransformerLayer", "current", {**CUT_OPTIONS, "hidden_dropout": 0.5})
    x = torch.randn(ways.SEQUENCES).to(BF16).requires_grad_()
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert count_nodes(layer(x)) == 2
        assert count_nodes(layer.eval()(x)) == 1


@pytest.mark.parametrize("child", ["self_attention.proj", "layernorm_mlp"])
def test_later_calls_of_what_is_left_are_not_bound(
    child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ways.make("TransformerLayer", "current", options_of("TransformerLayer"))
    layer.get_submodule(child).register_forward_hook(lambda *_: None)
    bound: list[object] = []
    monkeypatch.setattr(composition, "bind", lambda *given: bound.append(given) or bind(*given))
    with te.autocast(recipe=recipe.Float8CurrentScaling()), torch.no_grad():
        for number in range(3):
            layer(torch.randn(ways.SEQUENCES).to(BF16))
            assert bool(bound) == (not number)
            bound.clear()


def test_another_mask_is_another_call() -> None:
    layer, judge = (ways.make("MultiheadAttention", "current", CUT_OPTIONS) for _ in range(2))
    x = torch.randn(ways.SEQUENCES).to(BF16)
    for mask in ("causal", "no_mask", "no_mask", "causal", "causal"):
        with te.autocast(recipe=recipe.Float8CurrentScaling()), torch.no_grad():
            y = layer(x, attn_mask_type=mask)
            with ways.plain(judge):
                assert torch.equal(y, judge(x, attn_mask_type=mask))


def test_a_bias_that_the_projection_adds_is_not_returned_as_well() -> None:
    """A flag that is set on the block alone, after it was made, has no effect."""
    block = te.MultiheadAttention(32, 2, attention_dropout=0.0)
    layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(4, 1, 32)
    expected = [block(x), layer(x)]
    block.return_bias = layer.self_attention.return_bias = True
    assert all(map(torch.equal, [block(x), layer(x)], expected))


@pytest.mark.parametrize("options", [{}, {"fp8_mha": True}])
def test_a_bias_that_only_the_projection_returns_is_returned(options: dict[str, bool]) -> None:
    layer = ways.make("MultiheadAttention", "current", options_of("MultiheadAttention"))
    x = torch.randn(ways.SEQUENCES).to(BF16)
    layer.proj.return_bias = True
    with te.autocast(recipe=recipe.Float8CurrentScaling(**options)), torch.no_grad():
        for _ in range(2):
            y, bias = layer(x)
            assert torch.equal(bias, layer.proj.bias)
            with ways.plain(layer):
                assert torch.equal(y, layer(x)[0])


@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerLayer"])
def test_arguments_are_in_the_order_of_the_signature(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ways.make(kind, "current", options_of(kind))
    names = [*inspect.signature(layer.forward).parameters][1:]
    monkeypatch.setattr(composition.ComposedLayer, "_run", lambda layer, *call: call[:2])
    assert layer.forward("x", **{name: name for name in names}) == ("x", tuple(names))


def test_a_projection_of_another_class_has_no_bias_to_return() -> None:
    layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)

    class Adapter(torch.nn.Module):
        def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
            return x

    layer.self_attention.proj = Adapter()
    assert layer(torch.ones(4, 1, 32)).shape == (4, 1, 32)
