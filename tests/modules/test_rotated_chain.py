"""Layers with rotary embedding as one chain: the same bits as layers that run one by one."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import OpDesc, PackedRotaryDesc
from fp8core.chain.packed_attention import RotatedAttentionProgram
from fp8core.modules.sequences import rotary
from fp8core.recipe import Recipe
from fp8core_backends.cuda.recorder import _Log
from fp8core_backends.reference.backend import ReferenceBackend
from tests import recording_backend
from tests.chain.fused_toy import registered
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("first_algorithms")

BF16 = torch.bfloat16
HIDDEN, HEADS, GROUPS, LENGTH, BATCH = 64, 4, 2, 16, 2
HEAD = HIDDEN // HEADS
RECIPES: dict[str, Callable[[], Recipe]] = {
    "current": lambda: recipe.Float8CurrentScaling(),
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=2),
    "block": lambda: recipe.Float8BlockScaling(),
    "least": lambda: recipe.DelayedScaling(amax_history_len=2, holding="least"),
    "fastest": lambda: recipe.Float8CurrentScaling(holding="fastest"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "split": {},
    "interleaved rows": {"fuse_qkv_params": True},
    "bshd": {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "layout": "bshd"},
    "interleaved pairs": {"rotary_pos_interleaved": True},
}
FUSED = OPTIONS["interleaved rows"]
KINDS = ("MultiheadAttention", "TransformerLayer")


def made(kind: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    layout = options.pop("layout", "sbhd")
    torch.manual_seed(0)
    shared = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "params_dtype": BF16, **options}
    if kind == "MultiheadAttention":
        more = {"input_layernorm": True, "qkv_format": layout}
        return te.MultiheadAttention(HIDDEN, HEADS, **more, **shared)
    more = {"hidden_dropout": 0.0, "attn_input_format": layout}
    return te.TransformerLayer(HIDDEN, 96, HEADS, **more, **shared)


def apart(layer: Any) -> Any:
    """Return ``layer``, whose parts run one by one."""
    block = getattr(layer, "self_attention", layer)
    for part in (block.core_attention, block.proj, block.layernorm_qkv):
        part.register_forward_hook(lambda *_: None)
    return layer


def angles_of(positions: int = LENGTH, size: int = HEAD) -> torch.Tensor:
    return te.RotaryPositionEmbedding(size)(positions)


def step(layer: Any, chosen: Recipe | None, angles: Any, seed: int) -> list[torch.Tensor]:
    """Return output, gradients and delayed state."""
    torch.manual_seed(seed)
    block = getattr(layer, "self_attention", layer)
    first = (LENGTH, BATCH) if block.qkv_format == "sbhd" else (BATCH, LENGTH)
    x = torch.randn(*first, HIDDEN).to(BF16).requires_grad_()
    layer.zero_grad()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, rotary_pos_emb=angles)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *(one.grad for one in layer.parameters()), *layer.buffers()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def num_nodes(layer: Any, angles: Any, chosen: Recipe | None) -> int:
    """Return how many nodes of autograd a call has."""
    x = torch.randn(LENGTH, BATCH, HIDDEN).to(BF16).requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, rotary_pos_emb=angles)
    left = [y.grad_fn]
    nodes = set()
    while left:
        node = left.pop()
        if node is not None and node not in nodes and "AccumulateGrad" not in node.name():
            nodes.add(node)
            left += [one for one, _ in node.next_functions]
    return len(nodes)


@pytest.mark.parametrize(("kind", "name", "chosen"), pairs(KINDS, OPTIONS, RECIPES))
def test_steps_equal_those_of_the_parts(kind: str, name: str, chosen: str) -> None:
    ours, theirs = made(kind, OPTIONS[name]), apart(made(kind, OPTIONS[name]))
    tables = [angles_of(), angles_of(), angles_of() * 0.5, angles_of(LENGTH + 3, HEAD // 2)]
    for seed, angles in enumerate(tables):
        pair = [step(layer, RECIPES[chosen](), angles, seed) for layer in (ours, theirs)]
        assert_same(*pair)


@pytest.mark.parametrize(("kind", "chosen"), pairs(KINDS, ["current", "delayed"]))
def test_recorded_steps_equal_those_of_the_parts(
    kind: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording_backend.install(monkeypatch)
    recording_backend.RECORDER.problems.clear()
    ours, theirs = (make(made(kind, {})) for make in (lambda layer: layer, apart))
    for seed in range(6):
        angles = angles_of() * (1 + seed % 2)
        with te.use_backend(recording_backend.NAME):
            result = step(ours, RECIPES[chosen](), angles, seed)
        with te.use_backend("reference"):
            assert_same(result, step(theirs, RECIPES[chosen](), angles, seed))
    assert not recording_backend.RECORDER.problems


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_node(kind: str) -> None:
    chosen, angles = RECIPES["current"](), angles_of()
    assert num_nodes(made(kind, FUSED), angles, chosen) == 1
    assert num_nodes(made(kind, FUSED), (angles, angles), chosen) == 1
    assert num_nodes(made(kind, FUSED), (angles, angles.clone()), chosen) > 1
    # In high precision the chain would hold the rows beside the rotated parts.
    assert num_nodes(made(kind, FUSED), angles, None) > 1


def test_two_tensors_of_angles_are_taken_one_by_one() -> None:
    ours, theirs = made("TransformerLayer", {}), apart(made("TransformerLayer", {}))
    pair = angles_of(), 2 * angles_of()
    for seed in range(2):
        assert_same(*[step(each, RECIPES["delayed"](), pair, seed) for each in (ours, theirs)])


@pytest.mark.parametrize("kind", KINDS)
def test_angles_that_do_not_fit_are_refused_after_others_that_did(kind: str) -> None:
    layer, chosen = made(kind, {}), RECIPES["current"]()
    for seed in range(3):
        step(layer, chosen, angles_of(), seed)
    with pytest.raises(te.OperandError, match=r"a sequence reaches position 15"):
        step(layer, chosen, angles_of(LENGTH - 1), 0)
    with pytest.raises(te.OperandError, match=r"expected \[positions, 1, 1, r\]"):
        step(layer, chosen, angles_of().squeeze(), 0)
    with pytest.raises(te.UnsupportedError, match="freqs requires a gradient"):
        step(layer, chosen, angles_of().requires_grad_(), 0)
    with pytest.raises(te.OperandError):
        step(layer, chosen, ("rotated", LENGTH, 1, 1, HEAD), 0)
    half = step(layer, chosen, angles_of().half(), 0)
    assert_same(half, step(apart(made(kind, {})), chosen, angles_of().half(), 0))


def test_what_forward_holds_is_what_the_parts_hold() -> None:
    def held(layer: Any) -> int:
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = torch.randn(LENGTH, BATCH, HIDDEN).to(BF16).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, te.autocast(recipe=RECIPES["fastest"]()):
            y = layer(x, rotary_pos_emb=angles)
        del y
        return sum(found.values())

    angles = angles_of()
    assert held(made("TransformerLayer", {})) <= held(apart(made("TransformerLayer", {})))


def test_a_checkpoint_repeats_the_chain() -> None:
    results = []
    for is_repeated in (False, True):
        layer, angles = made("TransformerLayer", {}), angles_of()
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(LENGTH, BATCH, HIDDEN).to(BF16).requires_grad_()
            layer.zero_grad()
            with te.autocast(recipe=RECIPES["delayed"]()):
                keywords = {"rotary_pos_emb": angles}
                call = te.checkpoint if is_repeated else lambda layer, x, **rest: layer(x, **rest)
                y = call(layer, x, **keywords)
                y.float().square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(one.grad for one in layer.parameters())])
    assert_same(*results)


class Apart(ReferenceBackend):
    """The reference, which rotates queries and keys one after the other."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        is_packed = isinstance(desc, PackedRotaryDesc)
        return "one tensor a call" if is_packed else super().unsupported(desc, device)


@pytest.mark.parametrize("options", ["split", "bshd", "interleaved rows"])
def test_queries_and_keys_are_rotated_in_one_call(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a backend has it, beside values that are copied: the bits of a call for each. So are
    their gradients, unless the rows of the projection have their heads in another order."""
    angles, results, calls = angles_of(), [], Counter[str]()

    class Packs(ReferenceBackend):
        def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
            run = super().bind(desc, device)

            def counting(*given: Any, **named: Any) -> Any:
                calls[options] += 1
                return run(*given, **named)

            return counting if isinstance(desc, PackedRotaryDesc) else run

    chosen = RECIPES["current"]()
    for kind in (Apart, Packs):
        # What rotates is bound to the other backend.
        monkeypatch.setattr(rotary, "_LAYERS", copy.deepcopy(rotary._LAYERS))
        with registered(100, rotating=kind):
            layer = made("TransformerLayer", OPTIONS[options])
            steps = [step(layer, chosen, angles, seed) for seed in range(3)]
            results.append([*itertools.chain(*steps)])
    assert_same(*results)
    assert calls[options] == (3 if options == "interleaved rows" else 6)


@pytest.mark.parametrize("options", ["split", "interleaved rows"])
def test_heads_of_all_are_saved_as_one_tensor(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three views of one memory are what CUDA's recorder cannot tell apart by their addresses."""
    no_source: Any = None
    shapes: list[tuple[int, ...]] = []
    attended = RotatedAttentionProgram._attended

    def noting(self: Any, *given: Any) -> Any:
        result = attended(self, *given)
        _, _, *heads, _ = result[1]
        assert _Log(no_source, None, result[1]).problem is None
        shapes.extend(tuple(one.shape[-2:]) for one in heads)
        return result

    monkeypatch.setattr(RotatedAttentionProgram, "_attended", noting)
    step(made("TransformerLayer", OPTIONS[options]), RECIPES["current"](), angles_of(), 0)
    assert shapes == [(HEADS + 2 * GROUPS, HEAD)]
