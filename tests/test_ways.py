"""Every way to run a layer gives the bits of the plain one: outputs, gradients and buffers.

The plain way remembers no call, and a Transformer layer runs its layers one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.chain import run as chain
from fp8core.cpu_offload import selection
from fp8core.modules.transformer_chain import TransformerChain
from tests.recording_backend import NAME as RECORDING
from tests.recording_backend import Program, install

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
BF16 = torch.bfloat16
STEPS, MICROBATCHES = 3, 2
LENGTH, BATCH, HIDDEN, FFN, HEADS = 16, 2, 64, 96, 4
RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    **{name: recipe.by_name(name) for name in recipe.names()},
    "delayed": recipe.DelayedScaling(amax_history_len=2, fp8_dpa=True),
    "current": recipe.Float8CurrentScaling(fp8_dpa=True),
}


class Layer(NamedTuple):
    """How a layer is made with some options, and its inputs."""

    make: Callable[..., torch.nn.Module]
    options: tuple[dict[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...]


ROWS = (LENGTH * BATCH, HIDDEN)
SEQUENCES = (LENGTH, BATCH, HIDDEN)
HEAD = (LENGTH, BATCH, HEADS, HIDDEN // HEADS)
LAYERS = {
    "Linear": Layer(fp8core.Linear, ({}, {"bias": False, "params_dtype": BF16}), (ROWS,)),
    "LayerNormMLP": Layer(
        fp8core.LayerNormMLP,
        (
            {"activation": "swiglu", "normalization": "RMSNorm", "params_dtype": BF16},
            {"bias": False, "zero_centered_gamma": True},
        ),
        (ROWS,),
    ),
    "DotProductAttention": Layer(
        fp8core.DotProductAttention, ({"attn_mask_type": "causal"}, {}), (HEAD,) * 3
    ),
    "TransformerLayer": Layer(
        fp8core.TransformerLayer,
        (
            {"fuse_qkv_params": True, "params_dtype": BF16, "activation": "swiglu"},
            {"num_gqa_groups": 2, "normalization": "RMSNorm", "bias": False, "hidden_dropout": 0.1},
        ),
        (SEQUENCES,),
    ),
}


ARGUMENTS = {
    "Linear": {"in_features": HIDDEN, "out_features": FFN},
    "LayerNormMLP": {"hidden_size": HIDDEN, "ffn_hidden_size": FFN},
    "DotProductAttention": {"num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS},
    "TransformerLayer": {
        **{"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS},
        # torch's dropout of bfloat16 on a CPU has another gradient in a graph than outside.
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    },
}


class Run(NamedTuple):
    """All that three steps made, and the bytes that forward kept for backward in the last one."""

    results: list[torch.Tensor | None]
    held: int


Call = Callable[..., torch.Tensor]
Way = Callable[[torch.nn.Module], contextlib.AbstractContextManager[Call]]


@contextlib.contextmanager
def plain(layer: torch.nn.Module) -> Iterator[Call]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "likeness_to", lambda *tensors: None)
        patch.setattr(TransformerChain, "run", lambda *given: None)
        yield layer


@contextlib.contextmanager
def remembered(layer: torch.nn.Module) -> Iterator[Call]:
    yield layer


@contextlib.contextmanager
def hooked(layer: torch.nn.Module) -> Iterator[Call]:
    for module in layer.modules():
        module.register_forward_pre_hook(lambda module, args: None)
        module.register_forward_hook(lambda module, args, output: None)
        module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    yield layer


@contextlib.contextmanager
def monitored(layer: torch.nn.Module) -> Iterator[Call]:
    with fp8core.monitor(layer):
        yield layer


@contextlib.contextmanager
def checkpointed(layer: torch.nn.Module) -> Iterator[Call]:
    def call(*inputs: torch.Tensor, **keywords: Any) -> torch.Tensor:
        y: torch.Tensor = fp8core.checkpoint(layer, *inputs, use_reentrant=False, **keywords)
        return y

    yield call


@contextlib.contextmanager
def offloaded(layer: torch.nn.Module) -> Iterator[Call]:
    context, sync = fp8core.get_cpu_offload_context(True, num_layers=1, model_layers=2)

    def call(*inputs: torch.Tensor, **keywords: Any) -> torch.Tensor:
        with context:
            y = layer(*inputs, **keywords)
        made: torch.Tensor = sync(y)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "MIN_ELEMENTS", 64)
        yield call


@contextlib.contextmanager
def microbatched(layer: torch.nn.Module) -> Iterator[Call]:
    is_first = itertools.cycle((True, False))
    takes_it = not isinstance(layer, fp8core.DotProductAttention)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(
            *inputs, **{"is_first_microbatch": next(is_first)} if takes_it else {}
        )
        return y

    yield call


@contextlib.contextmanager
def recorded(layer: torch.nn.Module) -> Iterator[Call]:
    with fp8core.use_backend(RECORDING if DEVICE.type == "cpu" else None):
        yield layer


@contextlib.contextmanager
def compiled(layer: torch.nn.Module) -> Iterator[Call]:
    torch.compiler.reset()
    yield torch.compile(layer, backend="aot_eager")


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(plain, remembered, hooked, monitored, checkpointed, offloaded, microbatched, recorded),
        compiled,
    )
}


def arguments(kind: str, name: str) -> dict[str, Any]:
    """Return the options of a layer: recipes take turns, so that each option is run."""
    options = LAYERS[kind].options[list(RECIPES).index(name) % 2]
    return {
        **ARGUMENTS[kind],
        **options,
        **({"device": DEVICE} if kind != "DotProductAttention" else {}),
    }


@contextlib.contextmanager
def keeping(layer: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage that autograd keeps and no parameter has, by address."""
    storages: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)


def run(kind: str, name: str, way: Way) -> Run:
    """Train the layer ``kind`` for three steps of two microbatches under a recipe."""
    chosen = RECIPES[name]
    torch.manual_seed(1)
    layer = LAYERS[kind].make(**arguments(kind, name))
    dtype = next((parameter.dtype for parameter in layer.parameters()), BF16)
    results: list[torch.Tensor | None] = []
    with way(layer) as call:
        for step in range(STEPS):
            torch.manual_seed(2 + step)
            batches = [
                [
                    (torch.randn(shape) * 2**step).to(DEVICE, dtype).requires_grad_()
                    for shape in LAYERS[kind].shapes
                ]
                for _ in range(MICROBATCHES)
            ]
            with (
                keeping(layer) as held,
                fp8core.autocast(enabled=chosen is not None, recipe=chosen),
            ):
                outputs = [call(*batch) for batch in batches]
            for y in reversed(outputs):
                y.backward(torch.randn_like(y))
            results += [
                *(y.detach() for y in outputs),
                *(x.grad for batch in batches for x in batch),
            ]
            for parameter in layer.parameters():
                results.append(parameter.grad)
                if parameter.grad is not None:
                    parameter.detach().sub_(0.1 * parameter.grad)
                parameter.grad = None
    return Run([*results, *layer.parameters(), *layer.buffers()], sum(held.values()))


@pytest.fixture(autouse=True)
def recording_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@functools.cache
def ran(kind: str, name: str, way: str) -> Run:
    """``run`` once for all tests."""
    return run(kind, name, WAYS[way])


def is_offered(kind: str, name: str, way: str) -> bool:
    """Monitors watch GEMMs; scales that change outside of a graph are refused in one."""
    has_gemm = kind != "DotProductAttention"
    return {"monitored": has_gemm, "compiled": name != "delayed"}.get(way, True)


def cases(*ways: str) -> list[tuple[str, str, str]]:
    return [case for case in itertools.product(LAYERS, RECIPES, ways) if is_offered(*case)]


@pytest.mark.parametrize(("kind", "name", "way"), cases(*(way for way in WAYS if way != "plain")))
def test_a_way_gives_the_bits_of_the_plain_one(kind: str, name: str, way: str) -> None:
    ours, theirs = ran(kind, name, way), ran(kind, name, "plain")
    for at, (mine, wanted) in enumerate(zip(ours.results, theirs.results, strict=True)):
        assert (mine is None) == (wanted is None), at
        if mine is not None and wanted is not None:
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "name", "way"), cases("hooked", "monitored"))
def test_a_watched_layer_holds_what_the_plain_one_holds(kind: str, name: str, way: str) -> None:
    assert ran(kind, name, way).held == ran(kind, name, "plain").held


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts the runs of a backend for the CPU")
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "rowwise"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_calls_are_repeated_from_a_recording(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeats, repeat = [], Program.__call__

    def noted(program: Program, *arguments: Any) -> Any:
        repeats.append(program)
        return repeat(program, *arguments)

    monkeypatch.setattr(Program, "__call__", noted)
    run(kind, name, plain)
    assert not repeats
    run(kind, name, recorded)
    assert len(repeats) > len({*map(id, repeats)}) >= 2  # forward's and backward's


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_remembered_layer_holds_no_more_than_the_plain_one(kind: str, name: str) -> None:
    """A Transformer layer that runs as one chain may hold less than its layers one by one."""
    assert ran(kind, name, "remembered").held <= ran(kind, name, "plain").held
    assert ran(kind, name, "recorded").held == ran(kind, name, "remembered").held


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_checkpoint_holds_the_inputs_alone_and_offloading_nothing(kind: str, name: str) -> None:
    in_bf16 = arguments(kind, name).get("params_dtype", kind) in (BF16, "DotProductAttention")
    element = 2 if in_bf16 else 4
    inputs = MICROBATCHES * element * sum(map(math.prod, LAYERS[kind].shapes))
    assert ran(kind, name, "checkpointed").held == inputs
    assert ran(kind, name, "offloaded").held == 0
