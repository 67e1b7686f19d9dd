"""Layers, their options, and the ways to run them that give the same bits.

options = LAYERS["Linear"].options()[0]
run("Linear", "current", options, hooked)  # has the results of the plain way
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fp8core
from fp8core import cpu_offload, ops, recipe
from fp8core.chain import node
from fp8core.chain import run as chain
from fp8core.modules.composition import Composition, LayerCall
from fp8core.modules.memo import Bindings
from fp8core.recipe.plan import HOLDING
from tests.pairs import pairs
from tests.recording_backend import NAME as RECORDING

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
BF16 = torch.bfloat16
STEPS, MICROBATCHES = 3, 2
LENGTH, BATCH, HIDDEN, FFN, HEADS = 16, 2, 64, 96, 4
HEAD = HIDDEN // HEADS
RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    **{name: recipe.by_name(name) for name in recipe.names()},
    "delayed": recipe.DelayedScaling(amax_history_len=2, fp8_dpa=True),
    "current": recipe.Float8CurrentScaling(fp8_dpa=True),
}
Options = dict[str, Any]

# --- layers ---


class Layer(NamedTuple):
    """How a layer is made, the shapes of its inputs, and what its options may be.

    Of the options, those of ``OUTSIDE`` are this module's: the dtype of parameters and inputs,
    whether weights are stored quantized, what needs a gradient, what is held for backward, and
    whether positions are rotated. The plain way has none of ``NOT_PLAIN``.
    """

    make: Callable[..., torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[Sequence[Options], ...]
    keep: Callable[[Options], bool] = lambda options: True

    def options(self) -> list[Options]:
        """Combinations in which every pair of two axes' values occurs."""

        def is_valid(*values: Options) -> bool:
            return self.keep(merged(values))

        return [merged(values) for values in pairs(*self.axes, keep=is_valid)]


def merged(values: Sequence[Options]) -> Options:
    result: Options = {}
    for each in values:
        result.update(each)
    return result


def axis(name: str, *values: Any) -> list[Options]:
    """The values of one option; False and True if none are named."""
    return [{name: value} for value in values or (False, True)]


class Groups(fp8core.GroupedLinear):
    """Three groups, the second one without a row."""

    def forward(self, input: torch.Tensor, **arguments: Any) -> Any:  # type: ignore[override]  # no sizes
        return super().forward(input, [5, 0, input.shape[0] - 5], **arguments)


class Operations(ops.Sequential):
    """Operations of which one takes another tensor."""

    def __init__(self, bias: bool, params_dtype: torch.dtype, device: torch.device) -> None:
        placed: Options = {"dtype": params_dtype, "device": device}
        super().__init__(
            ops.Linear(HIDDEN, FFN, bias=bias, **placed),
            ops.AddExtraInput(),
            ops.LayerNorm(FFN, **placed),
            ops.SwiGLU(),
            ops.Quantize(forward=True, backward=True),
            ops.Linear(FFN // 2, HIDDEN, bias=bias, **placed),
        )

    def forward(self, input: torch.Tensor, **arguments: Any) -> Any:  # type: ignore[override]  # makes the extra one
        return super().forward(input, torch.ones(input.shape[0], FFN).to(input), **arguments)


ROWS = (LENGTH * BATCH, HIDDEN)
UNEVEN_ROWS = (21, HIDDEN)  # are padded
SEQUENCES = (LENGTH, BATCH, HIDDEN)
OUTSIDE = ("is_stored", "trained", "holding", "is_rotated")
NOT_PLAIN = ("holding", "checkpoint", "save_original_input", "delay_wgrad_compute")
"""Options by which backward computes again what forward did, or leaves weight gradients for later;
all give the bits of a layer without them."""
WEIGHTS = (
    axis("params_dtype", torch.float32, BF16),
    axis("is_stored"),
    axis("trained", "all", "parameters", "inputs"),
    axis("holding", *HOLDING),
)
LINEAR = (
    *(*WEIGHTS, axis("bias"), axis("return_bias"), axis("fuse_wgrad_accumulation")),
    axis("delay_wgrad_compute"),
)
NORM = (axis("normalization", "LayerNorm", "RMSNorm"), axis("zero_centered_gamma"))
PROJECTED = (
    *WEIGHTS,
    [*NORM[0], {"zero_centered_gamma": True}],
    axis("bias"),
    [{}, {"fuse_qkv_params": True}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}],
)
ATTENTION: list[Options] = [
    {"window_size": (3, 0)},
    {"num_gqa_groups": 2},
    {"softmax_type": "learnable", "is_rotated": True},
    {"softmax_type": "off-by-one", "num_gqa_groups": 2},
]


def is_linear(options: Options) -> bool:
    """A weight that is stored or frozen has no ``main_grad``; without a bias none is returned."""
    fused = options["fuse_wgrad_accumulation"]
    return (options["bias"] or not options["return_bias"]) and not (
        fused and (options["is_stored"] or options["trained"] == "inputs")
    )


def is_projected(options: Options) -> bool:
    """Three weights would share their scales; torch's dropout of bfloat16 on a CPU has another
    gradient in a graph than outside."""
    is_one_weight = not options["is_stored"] or options.get("fuse_qkv_params", False)
    return is_one_weight and (
        not options.get("hidden_dropout") or options["params_dtype"] == torch.float32
    )


MAIN = {
    "Linear": Layer(
        functools.partial(fp8core.Linear, HIDDEN, FFN),
        (ROWS,),
        (*LINEAR, axis("save_original_input")),
        is_linear,
    ),
    "LayerNormMLP": Layer(
        functools.partial(fp8core.LayerNormMLP, HIDDEN, FFN),
        (ROWS,),
        (
            *(*LINEAR, *NORM, axis("activation", "gelu", "swiglu")),
            *(axis("return_layernorm_output"), axis("checkpoint")),
        ),
        is_linear,
    ),
    "DotProductAttention": Layer(
        functools.partial(fp8core.DotProductAttention, HEADS, HEAD),
        ((LENGTH, BATCH, HEADS, HEAD),) * 3,
        (
            axis("params_dtype", torch.float32, BF16),
            axis("attn_mask_type", "causal", "no_mask"),
            axis("window_size", None, (3, 0)),
            axis("softmax_type", "vanilla", "off-by-one", "learnable"),
            axis("softcap", 0.0, 2.0),
            axis("return_max_logit"),
            axis("qkv_format", "sbhd", "bshd"),
        ),
    ),
    "TransformerLayer": Layer(
        functools.partial(fp8core.TransformerLayer, HIDDEN, FFN, HEADS, attention_dropout=0.0),
        (SEQUENCES,),
        (
            *(*PROJECTED, ATTENTION, axis("activation", "gelu", "swiglu")),
            [
                {"hidden_dropout": 0.0},
                {"hidden_dropout": 0.1, "attention_dropout": 0.1, "drop_path_rate": 0.2},
            ],
            [
                {"self_attn_mask_type": "no_mask"},
                {"attn_input_format": "bshd", "output_layernorm": True},
                {"parallel_attention_mlp": True},
                {"apply_residual_connection_post_layernorm": True},
            ],
        ),
        is_projected,
    ),
}
MORE = {
    "LayerNormLinear": Layer(
        functools.partial(fp8core.LayerNormLinear, HIDDEN, FFN),
        (UNEVEN_ROWS,),
        (*LINEAR, *NORM, axis("return_layernorm_output")),
        is_linear,
    ),
    "GroupedLinear": Layer(
        functools.partial(Groups, 3, HIDDEN, FFN),
        (UNEVEN_ROWS,),
        (*LINEAR, axis("save_original_input")),
        is_linear,
    ),
    "MultiheadAttention": Layer(
        functools.partial(fp8core.MultiheadAttention, HIDDEN, HEADS, attention_dropout=0.0),
        (SEQUENCES,),
        (*PROJECTED, ATTENTION, axis("input_layernorm")),
        is_projected,
    ),
    "Sequential": Layer(Operations, (UNEVEN_ROWS,), (WEIGHTS[0], *WEIGHTS[2:], axis("bias"))),
}
LAYERS = {**MAIN, **MORE}


def make(kind: str, name: str, options: Options) -> torch.nn.Module:
    """Return the layer ``kind`` with ``options``, for training under the recipe ``name``."""
    arguments = {key: value for key, value in options.items() if key not in OUTSIDE}
    if kind == "DotProductAttention":
        del arguments["params_dtype"]
    torch.manual_seed(1)
    chosen, is_stored = RECIPES[name], options.get("is_stored", False)
    with fp8core.quantized_model_init(enabled=is_stored and chosen is not None, recipe=chosen):
        layer = LAYERS[kind].make(**arguments, device=DEVICE)
    for parameter in layer.parameters():
        parameter.requires_grad_(options.get("trained") != "inputs")
        if options.get("fuse_wgrad_accumulation") and parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    return layer


# --- ways ---

Call = Callable[..., Any]
Way = Callable[[torch.nn.Module], contextlib.AbstractContextManager[Call]]


def one_by_one(chains: Composition, call: LayerCall, value: Any) -> Any:
    """Run the layers of a larger one by themselves."""
    for at in range(len(call.items)):
        value = call.alone(at, value)
    return value


@contextlib.contextmanager
def plain(layer: torch.nn.Module) -> Iterator[Call]:
    with pytest.MonkeyPatch.context() as patch:
        nothing = property(lambda bindings: None, lambda bindings, memo: None)
        patch.setattr(Bindings, "memo", nothing)
        for module in (chain, node):
            patch.setattr(module, "likeness_to", lambda *tensors: None)
        patch.setattr(Composition, "run", one_by_one)
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
    def call(*inputs: torch.Tensor, **keywords: Any) -> Any:
        return fp8core.checkpoint(layer, *inputs, use_reentrant=False, **keywords)

    yield call


@contextlib.contextmanager
def checkpointed_reentrantly(layer: torch.nn.Module) -> Iterator[Call]:
    def call(*inputs: torch.Tensor, **keywords: Any) -> Any:
        return fp8core.checkpoint(layer, *inputs, use_reentrant=True, **keywords)

    yield call


@contextlib.contextmanager
def offloaded(layer: torch.nn.Module) -> Iterator[Call]:
    context, sync = fp8core.get_cpu_offload_context(True, num_layers=1, model_layers=2)

    def call(*inputs: torch.Tensor, **keywords: Any) -> Any:
        with context:
            outputs = layer(*inputs, **keywords)
        if isinstance(outputs, tuple):
            return sync(outputs[0]), *outputs[1:]
        return sync(outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_offload, "MIN_ELEMENTS", 64)
        yield call


@contextlib.contextmanager
def microbatched(layer: torch.nn.Module) -> Iterator[Call]:
    is_first = itertools.cycle((True, False))

    def call(*inputs: torch.Tensor, **keywords: Any) -> Any:
        return layer(*inputs, is_first_microbatch=next(is_first), **keywords)

    yield call


@contextlib.contextmanager
def recorded(layer: torch.nn.Module) -> Iterator[Call]:
    with fp8core.use_backend(RECORDING if DEVICE.type == "cpu" else None):
        yield layer


@contextlib.contextmanager
def compiled(layer: torch.nn.Module) -> Iterator[Call]:
    torch.compiler.reset()
    yield torch.compile(layer, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(plain, remembered, hooked, monitored, checkpointed, checkpointed_reentrantly),
        *(offloaded, microbatched, recorded, compiled),
    )
}


_HAVE_ATTENTION = ("DotProductAttention", "MultiheadAttention", "TransformerLayer")


def is_offered(kind: str, name: str, way: str, options: Options) -> bool:
    """Whether the library runs the layer with the options in that way."""
    match way:
        case "monitored":  # monitors watch GEMMs
            return kind != "DotProductAttention"
        case "microbatched":
            return kind != "DotProductAttention"
        case "checkpointed_reentrantly":  # torch's looks at tensors alone, not into lists of them
            has_lists = kind == "GroupedLinear" and options["return_bias"]
            return options.get("trained") != "parameters" and not has_lists
        case "compiled":
            # torch 2.13 loses the seed of a recompute in a graph, and delayed scales have moved on.
            draws_again = name in ("nvfp4", "delayed") and options.get("checkpoint")
            is_fused = options.get("fuse_wgrad_accumulation")
            is_late = options.get("delay_wgrad_compute")
            drops = options.get("attention_dropout")  # draws other numbers in a graph
            # Attention in FP8 by delayed scales is refused.
            is_refused = name == "delayed" and kind in _HAVE_ATTENTION
            return not (is_fused or is_late or draws_again or drops or is_refused)
    return True


@contextlib.contextmanager
def captured(
    layer: torch.nn.Module, samples: tuple[torch.Tensor, ...], chosen: recipe.Recipe | None
) -> Iterator[Call]:
    """In CUDA graphs, each in an autocast of its own."""
    graphed = fp8core.make_graphed_callables(
        layer, samples, enabled=chosen is not None, recipe=chosen
    )

    def call(*inputs: torch.Tensor) -> Any:
        with fp8core.autocast(enabled=False):
            return graphed(*inputs)

    yield call


def capturable(options: Options) -> Options:
    """The options without what a graph lacks: it draws other numbers than the calls, saves no state
    of generators, and takes and returns no tensor but its inputs and results."""
    lacking = {
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "drop_path_rate": 0.0},
        **{"checkpoint": False, "is_rotated": False, "trained": "all", "is_stored": False},
        **{"fuse_wgrad_accumulation": False, "return_bias": False, "return_max_logit": False},
        "delay_wgrad_compute": False,
    }
    return {name: lacking.get(name, value) for name, value in options.items()}


# --- training ---


class Run(NamedTuple):
    """All that the steps made, and the bytes that forward kept for backward in the last one."""

    results: list[torch.Tensor | None]
    held: int


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
        for part in own_tensors(parameter):
            storages.pop(part.untyped_storage().data_ptr(), None)


def own_tensors(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    if isinstance(parameter, fp8core.QuantizedTensor):
        return parameter.tensors()
    return (parameter,)


def inputs(kind: str, options: Options, step: int) -> list[torch.Tensor]:
    """Return the inputs of one call in that step."""
    needs_grad = options.get("trained") != "parameters"
    return [
        (torch.randn(shape) * 2**step)
        .to(DEVICE, options["params_dtype"])
        .requires_grad_(needs_grad)
        for shape in LAYERS[kind].shapes
    ]


def keywords(options: Options) -> Options:
    if not options.get("is_rotated"):
        return {}
    return {"rotary_pos_emb": fp8core.RotaryPositionEmbedding(HEAD)(LENGTH).to(DEVICE)}


def update(layer: torch.nn.Module) -> list[torch.Tensor | None]:
    """Take a step down the gradients, which are returned."""
    grads = []
    for parameter in layer.parameters():
        fused = getattr(parameter, "main_grad", None)
        grad = parameter.grad if fused is None else fused
        assert fused is None or parameter.grad is None
        grads.append(copy(grad))
        if grad is not None:
            with torch.no_grad():
                parameter.sub_(0.1 * grad)
        if fused is not None:
            fused.zero_()
        parameter.grad = None
    return grads


def run(kind: str, name: str, options: Options, way: Way, microbatches: int = MICROBATCHES) -> Run:
    """Train a layer for three steps of some microbatches."""
    if way is plain:
        options = {key: value for key, value in options.items() if key not in NOT_PLAIN}
    chosen, layer, arguments = RECIPES[name], make(kind, name, options), keywords(options)
    if chosen is not None:
        chosen = dataclasses.replace(chosen, holding=options.get("holding", "fastest"))
    results: list[torch.Tensor | None] = []
    with way(layer) as call:
        for step in range(STEPS):
            torch.manual_seed(2 + step)
            batches = [inputs(kind, options, step) for _ in range(microbatches)]
            with (
                keeping(layer) as held,
                fp8core.autocast(enabled=chosen is not None, recipe=chosen),
            ):
                outputs = [call(*batch, **arguments) for batch in batches]
            for returned in reversed(outputs):
                drawn = [(y, torch.randn(y.shape).to(y)) for y in tensors(returned)]
                wanted = [(y, grad) for y, grad in drawn if y.requires_grad]
                torch.autograd.backward(*zip(*wanted, strict=True))
                if options.get("delay_wgrad_compute"):
                    layer.backward_dw()
            results += [copy(y) for each in outputs for y in tensors(each)]
            results += [copy(x.grad) for batch in batches for x in batch]
            results += update(layer)
    results += [part for parameter in layer.parameters() for part in own_tensors(parameter)]
    return Run([*results, *layer.buffers()], sum(held.values()))


def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Of what a graph or ``main_grad`` writes again."""
    return None if tensor is None else tensor.detach().clone(memory_format=torch.preserve_format)


def tensors(returned: Any) -> list[torch.Tensor]:
    return [y for y in tree_leaves(returned) if y is not None]
