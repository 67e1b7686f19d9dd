"""Compiled layers of transformers run the chain of eager, attention included: with its operations
and its bits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import fp8core
from fp8core.backend_api import FusedDesc, NormBackwardDesc, OpDesc, variant_of
from fp8core.backend_api.spec import GRAPH_VARIANTS
from fp8core.conformance.calls import OpCall
from fp8core.conformance.laws.fused import pair
from tests import recording_backend
from tests.chain.fused_toy import registered
from tests.conversion.hugging_face import TOKENS
from tests.conversion.test_decoder import model_of

pytestmark = [
    pytest.mark.usefixtures("first_algorithms"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
BF16 = torch.bfloat16
CALLS: Counter[str] = Counter()


class Fusing(recording_backend.Backend):
    """Has the fusions and variants of CUDA's backend, and counts the calls of operations."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if not isinstance(desc, FusedDesc):
            return super().unsupported(desc, device)
        if desc.quantize.grouped or desc.quantize.chunked:
            return "no groups, no chunks"
        return "no gradients of norms" if isinstance(desc.producer, NormBackwardDesc) else None

    def bind(self, desc: OpDesc, device: torch.device) -> Any:
        variant = variant_of(desc)
        name = f"{desc.op} {variant}" if variant in GRAPH_VARIANTS else desc.op
        bind = super().bind

        def part(own: OpDesc, *given: Any, **named: Any) -> Any:
            return bind(own, device)._run(*given, **named)

        def fused(*given: Any, **named: Any) -> Any:
            return pair(part, OpCall(desc, given, named))

        is_fused = isinstance(desc, FusedDesc)
        run = recording_backend.Operation(fused) if is_fused else bind(desc, device)

        def counted(*given: Any, **named: Any) -> Any:
            CALLS[name] += 1
            return run(*given, **named)

        return counted


@pytest.fixture(autouse=True)
def _fusing() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    CALLS.clear()
    with registered(100, fusing=Fusing):
        yield
    torch._dynamo.reset()


def models(recipe: str, family: str = "Llama", **options: Any) -> tuple[Any, Any]:
    """A converted model, and a copy of it whose layers are compiled."""
    model = model_of(family, BF16).train()
    model.config.use_cache = False
    fp8core.convert(model, recipe, rms_norms=True)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.compile(**{"backend": "aot_eager", "fullgraph": True, "dynamic": False, **options})
    return model, other


def step(model: Any, tokens: torch.Tensor, **keywords: Any) -> list[torch.Tensor]:
    """Return the logits, gradients and delayed states of a step of training."""
    model.zero_grad()
    logits = model(tokens, **keywords).logits
    logits.float().sin().sum().backward()
    return [
        logits.detach(),
        *(own.grad.clone() for own in model.parameters()),
        *(own.clone() for own in model.buffers()),
    ]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_compiled_layer_calls_a_backend_as_one_of_eager_does(recipe: str) -> None:
    """Before a run is repeated, which calls nothing: in the first step."""
    tokens = TOKENS.repeat(4, 1)  # more rows than results of few rows have
    model, other = models(recipe)
    CALLS.clear()
    ours, eager = step(model, tokens), CALLS.copy()
    CALLS.clear()
    assert_same(ours, step(other, tokens))
    assert eager == CALLS
    one_a_layer = ("activation_backward_quantize split", "attention", "attention_backward")
    assert [eager[name] for name in one_a_layer] == [2, 2, 2]
    assert (eager["norm_backward added"], eager["rotary packed"]) == (4, 4)
    assert not eager["activation_backward"] + eager["rotary"]
    for number in range(1, 4):
        assert_same(*(step(each, tokens.roll(number)) for each in (model, other)))
    assert counters["stats"]["unique_graphs"] == (1 if recipe != "delayed" else 2)


def test_a_graph_has_no_operator_of_torch_that_computes_for_a_gradient_but_sums() -> None:
    """What is added, put together or rotated in a graph is, where eager does it in a kernel."""
    found: list[Counter[str]] = []

    def noting(graph: Any, inputs: Any) -> Any:
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.append(Counter(name.removesuffix(".default") for name in names))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=noting, bw_compiler=noting)
    _, other = models("current", backend=backend)
    step(other, TOKENS.repeat(4, 1))
    forward, backward = found
    assert forward["aten.add.Tensor"] == 2  # the residual sums
    assert (forward["fp8core.angles"], forward["aten.atan2"]) == (1, 0)  # torch's bits
    moving = ("aten.add.Tensor", "aten.cat", "aten.clone", "aten.transpose.int")
    assert not sum(backward[name] for name in moving)


CALLS_APART = {
    "a mask": {"attention_mask": (TOKENS != 5).long()},
    "positions of each sequence": {
        "position_ids": torch.stack((torch.arange(16), torch.arange(3, 19)))
    },
    "deterministic algorithms": {},
}


@pytest.mark.parametrize("what", CALLS_APART)
def test_other_calls_of_a_compiled_layer_attend_as_transformers_does(what: str) -> None:
    model, other = models("current")
    assert_same(step(model, TOKENS), step(other, TOKENS))
    CALLS.clear()
    torch.use_deterministic_algorithms(what == "deterministic algorithms")
    try:
        assert_same(*(step(each, TOKENS, **CALLS_APART[what]) for each in (model, other)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not CALLS["attention"]
    assert_same(step(model, TOKENS), step(other, TOKENS))


def test_without_a_recorder_a_compiled_layer_attends_as_eager_does() -> None:
    model, other = models("current")
    with fp8core.use_backend("reference"):
        assert_same(step(model, TOKENS), step(other, TOKENS))
    assert not CALLS["attention"]


@pytest.mark.parametrize("family", ["Qwen2", "Mixtral", "Qwen3"])
def test_compiled_layers_of_other_families_equal_eager(family: str) -> None:
    model, other = models("delayed", family, fullgraph=family != "Mixtral")
    for number in range(3):
        assert_same(*(step(each, TOKENS.roll(number)) for each in (model, other)))


def test_an_evaluation_of_a_compiled_layer_attends_in_its_chain() -> None:
    model, other = models("current")
    step(model, TOKENS)
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
        CALLS.clear()
        assert torch.equal(other.eval()(TOKENS).logits, expected)
    assert CALLS["attention"] == 2


def stored_models(recipe: str, backend: Any = "aot_eager") -> tuple[Any, Any]:
    """A model with stored weights, and a copy of it that is compiled."""
    model = model_of("Llama", BF16).eval()
    model.config.use_cache = False
    fp8core.quantize_(model, recipe)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return model, other


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    return result


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block"])
def test_a_graph_takes_the_plain_tensors_of_stored_weights(recipe: str) -> None:
    """torch takes a subclass apart in each call of a graph."""
    taken: list[Any] = []

    def noting(graph: Any, inputs: Any) -> Any:
        taken.extend(inputs)
        return graph

    model, other = stored_models(recipe, noting)
    assert torch.equal(logits_of(model), logits_of(other))
    assert any(each.dtype == torch.uint8 for each in taken)
    assert not any(isinstance(each, fp8core.QuantizedTensor) for each in taken)
    assert counters["stats"]["unique_graphs"] == 1  # one for both layers


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Return what sets an attribute of a model's first layer."""
    owner, _, name = path.rpartition(".")

    def change(model: Any) -> None:
        setattr(model.model.layers[0].get_submodule(owner), name, value)

    return change


def _other_weight(model: Any, kind: Callable[[Any], Any]) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(kind(mlp.gate_proj.weight), requires_grad=False)


def _written(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight.copy_(mlp.gate_proj.weight.dequantize() * 2)


CHANGES: dict[str, Callable[[Any], None]] = {
    "eps": _set("input_layernorm.variance_epsilon", 0.5),
    "the factor of a norm": _set("post_attention_layernorm.zero_centered_gamma", True),
    "an activation": _set("mlp.act_fn", torch.nn.Tanh()),
    "another stored weight": lambda model: _other_weight(model, torch.clone),
    "a weight in high precision": lambda model: _other_weight(model, lambda w: w.dequantize()),
    "a bias": lambda model: setattr(
        model.model.layers[0].self_attn.q_proj,
        "bias",
        torch.nn.Parameter(torch.ones(32, dtype=BF16), requires_grad=False),
    ),
    "a forward": _set("mlp.up_proj.forward", lambda x: torch.ones(*x.shape[:-1], 48, dtype=BF16)),
    "values": _written,
    "a layer": lambda model: model.model.layers[0].mlp.register_module(
        "up_proj", copy.deepcopy(model.model.layers[0].mlp.gate_proj)
    ),
    "a layer of torch": lambda model: model.model.layers[0].mlp.register_module(
        "up_proj", torch.nn.Linear(32, 48, bias=False).to(BF16).requires_grad_(False)
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_graph_of_stored_weights_notices_what_changes_in_a_layer(what: str) -> None:
    model, other = stored_models("current")
    before = logits_of(model)
    assert torch.equal(logits_of(other), before)
    for each in (model, other):
        torch.manual_seed(0)
        CHANGES[what](each)
    after = logits_of(model)
    assert not torch.equal(after, before)
    assert torch.equal(logits_of(other), after)
