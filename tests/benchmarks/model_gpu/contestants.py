"""Who trains: decoders of torch, torchao, Transformer Engine, transformers and fp8core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional

import fp8core
from fp8core.optimizers import FusedAdam
from fp8core.recipe.plan import HOLDING
from tests.benchmarks.layers_gpu.transformer import attend
from tests.benchmarks.measuring.command import HIGH
from tests.benchmarks.measuring.device import CUDA, Device
from tests.benchmarks.measuring.libraries import (
    EPS,
    decoder_layer,
    llama_config,
    recipe_of,
    under_recipe,
)
from tests.benchmarks.model_gpu.weights import Shape, Shared

__all__ = ["BASE", "COMPILED", "CONTESTANTS", "LOSSES", "Bench", "Contestant"]

BF16 = torch.bfloat16
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
COMPILED = " compiled"
BASE = f"torch {HIGH}"
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Bench(NamedTuple):
    """What the contestants of one length of sequences share."""

    shared: Shared
    device: Device
    sequence: int
    loss: Loss

    @property
    def sizes(self) -> tuple[Shape, int, torch.device]:
        """The shape of the decoder, the length of its sequences, and where it is."""
        return self.shared.shape, self.sequence, self.device.torch_device

    def optimizer(self, model: torch.nn.Module, *, is_own: bool = False) -> torch.optim.Optimizer:
        """Return torch's AdamW, or fp8core's, over the shared averages."""
        on_device = self.device is CUDA
        optimizer: torch.optim.Optimizer = own_adam(model) if is_own else adamw(model, on_device)
        for parameter, name in self.shared.of(model):
            state = {key: tensors[name] for key, tensors in self.shared.averages.items()}
            if not is_own:
                state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
            optimizer.state[parameter] = state
        return optimizer


def adamw(model: torch.nn.Module, is_fused: bool) -> torch.optim.AdamW:
    """Return torch's AdamW."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=is_fused
    )


def own_adam(model: torch.nn.Module, *, master_weights: bool = False) -> FusedAdam:
    """Return fp8core's AdamW with averages in bfloat16, as torch has them."""
    return FusedAdam(
        model.parameters(),
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        exp_avg_dtype=BF16,
        exp_avg_sq_dtype=BF16,
        master_weights=master_weights,
    )


class Contestant(NamedTuple):
    """Tokens ``[b, s]`` to logits ``[b, s, vocabulary]``, the model, its optimizer and its loss."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Train on ``tokens [b, s + 1]``; return the loss."""
        loss = self.loss(self.logits(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


Make = Callable[[Bench], Contestant]


class TorchLayer(torch.nn.Module):
    """A pre-norm layer of torch's modules, ``[b, s, hidden]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        linear = partial(torch.nn.Linear, bias=False)
        sizes = shape.layer_tensors()
        self.norm1, self.norm2 = (torch.nn.RMSNorm(shape.hidden, EPS) for _ in range(2))
        self.qkv, self.proj, self.fc1, self.fc2 = (
            linear(*reversed(sizes[name])) for name in ("qkv", "proj", "fc1", "fc2")
        )
        self.head, self.heads = shape.head, [shape.heads, shape.groups, shape.groups]

    def forward(
        self, x: torch.Tensor, rotary_pos_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cos, sin = rotary_pos_emb
        packed = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head))
        q, k, v = packed.split(self.heads, dim=-2)
        q, k = (y * cos + torch.cat(y.chunk(2, -1)[::-1], -1) * sin for y in (q, k))
        x = x + self.proj(attend(q, k, v, is_causal=True).flatten(-2))
        gate, up = self.fc1(self.norm2(x)).chunk(2, -1)
        y: torch.Tensor = x + self.fc2(functional.silu(gate) * up)
        return y


class Decoder(torch.nn.Module):
    """Tokens ``[b, s]`` to logits, through layers that take their angles as ``rotary``."""

    def __init__(self, shape: Shape, layers: Sequence[torch.nn.Module], rotary: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers, self.rotary = torch.nn.ModuleList(layers), rotary
        self.norm = torch.nn.RMSNorm(shape.hidden, EPS)
        self.head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.rotary)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def angles_of(shape: Shape, sequence: int, device: torch.device) -> torch.Tensor:
    """Return the rotary angles ``[s, 1, 1, d]`` float32."""
    return fp8core.RotaryPositionEmbedding(shape.head)(sequence).to(device)


def torch_decoder(shape: Shape, sequence: int, device: torch.device) -> Decoder:
    """Return a decoder of torch's modules, bfloat16."""
    angles = angles_of(shape, sequence, device)[:, 0]  # [s, 1, d]
    half = shape.head // 2
    sin = torch.cat([-angles[..., :half].sin(), angles[..., half:].sin()], -1)
    with device:
        layers = [TorchLayer(shape) for _ in range(shape.layers)]
        return Decoder(shape, layers, (angles.cos().to(BF16), sin.to(BF16))).to(BF16)


def decoder_of(library: str, shape: Shape, sequence: int, device: torch.device) -> Decoder:
    """Return a decoder of TransformerLayers of ``te`` or ``fp8core``, bfloat16."""
    options = {"attn_input_format": "bshd", "self_attn_mask_type": "causal", "device": device}
    numbers = range(1, shape.layers + 1)
    layers = [decoder_layer(library, shape, layer_number=number, **options) for number in numbers]
    with device:
        return Decoder(shape, layers, angles_of(shape, sequence, device)).to(BF16)


def compile_layers(model: Any) -> None:
    """Have torch.compile run each layer of a decoder, or of a model of transformers."""
    for layer in getattr(model, "model", model).layers:
        layer.compile(dynamic=False)


def of_torch(bench: Bench, *, is_compiled: bool) -> Contestant:
    """Return torch's modules in bfloat16."""
    model = torch_decoder(*bench.sizes)
    bench.shared.lend(model)
    if is_compiled:
        compile_layers(model)
    return Contestant(model, model, bench.optimizer(model), bench.loss)


def of_torchao(bench: Bench, name: str) -> Contestant:
    """Return torch's modules, the linears of whose layers torchao has changed, compiled."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = torch_decoder(*bench.sizes)
    bench.shared.lend(model)
    convert_to_float8_training(model.layers, config=Float8LinearConfig.from_recipe_name(name))
    compile_layers(model)
    return Contestant(model, model, bench.optimizer(model), bench.loss)


def of_library(
    bench: Bench, library: str, name: str, *, is_compiled: bool = False, is_best: bool = False
) -> Contestant:
    """Return a decoder of TransformerLayers under a recipe; ``is_best``: with fp8core's optimizer
    and cross entropy."""
    model = decoder_of(library, *bench.sizes)
    bench.shared.lend(model)
    if is_compiled:
        compile_layers(model)
    optimizer = bench.optimizer(model, is_own=is_best)
    return Contestant(
        under_recipe(library, name, model), model, optimizer, own_loss if is_best else bench.loss
    )


def of_stored(bench: Bench, name: str) -> Contestant:
    """Return a decoder of TransformerLayers whose weights are stored as a recipe has them."""
    initial = bench.shared.values
    with fp8core.quantized_model_init(recipe=fp8core.recipe.by_name(name)):
        model = decoder_of("fp8core", *bench.sizes)
    optimizer = own_adam(model, master_weights=True)
    for parameter, tensor in bench.shared.of(model):
        with torch.no_grad():
            parameter.copy_(initial[tensor])
        optimizer.initialize_state(parameter)
        optimizer.set_scaled_state(parameter, "master_param", initial[tensor].float())
    return Contestant(under_recipe("fp8core", name, model), model, optimizer, own_loss)


def of_transformers(
    bench: Bench,
    name: str = HIGH,
    *,
    is_compiled: bool = False,
    is_best: bool = False,
    has_liger: bool = False,
) -> Contestant:
    """Return Hugging Face's Llama, converted unless ``name`` is that of no recipe."""
    from transformers import LlamaForCausalLM

    shape, sequence, device = bench.sizes
    config = llama_config(
        shape,
        vocab_size=shape.vocabulary,
        rms_norm_eps=EPS,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=BF16).train()
    bench.shared.lend(model)
    patched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    if has_liger:
        patched = with_liger(model)
    if name != HIGH:
        fp8core.convert(model, recipe_of("fp8core", name))
    if is_compiled:
        compile_layers(model)
    optimizer = bench.optimizer(model, is_own=is_best)
    loss = own_loss if is_best else bench.loss

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with patched():
            result: torch.Tensor = model(tokens).logits
        return result

    return Contestant(logits, model, optimizer, loss)


def with_liger(model: torch.nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """Give ``model``, a Llama, Liger's kernels; return the context in which it has to run.

    Liger puts its functions and classes into the module of transformers, from where every later
    Llama of the process would take them.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    after = vars(modeling_llama)
    changed = {name: value for name, value in after.items() if value is not before.get(name)}
    after.update({name: before[name] for name in changed})
    return lambda: mock.patch.multiple(modeling_llama, **changed)


def own_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return fp8core's mean cross entropy."""
    return fp8core.parallel_cross_entropy(logits, targets, reduce_loss=True)


def torch_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return torch's mean cross entropy, computed in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def bf16_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return torch's mean cross entropy, computed in the dtype of the logits."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


LOSSES: dict[str, Callable[[], Loss]] = {
    "compiled": lambda: torch.compile(torch_loss, dynamic=False),
    "eager": lambda: torch_loss,
    "bf16": lambda: bf16_loss,
}
"""The loss of all contestants but the best ones. Compiled, it holds no logits in float32."""
FP8_RECIPES = ("delayed", "current", "block")
CONTESTANTS: dict[str, Make] = {
    BASE: partial(of_torch, is_compiled=False),
    BASE + COMPILED: partial(of_torch, is_compiled=True),
    **{f"torchao {name}": partial(of_torchao, name=name) for name in ("tensorwise", "rowwise")},
    **{
        f"{library} {name}": partial(of_library, library=library, name=name)
        for library in ("te", "fp8core")
        for name in (HIGH, *FP8_RECIPES)
    },
    **{
        f"fp8core {name} {holding}": partial(
            of_library, library="fp8core", name=f"{name} {holding}"
        )
        for name in FP8_RECIPES
        for holding in HOLDING
    },
    f"fp8core current{COMPILED}": partial(
        of_library, library="fp8core", name="current", is_compiled=True
    ),
    f"hf {HIGH}": of_transformers,
    f"hf {HIGH}{COMPILED}": partial(of_transformers, is_compiled=True),
    f"liger {HIGH}": partial(of_transformers, has_liger=True),
    **{
        f"converted {name}{way}": partial(of_transformers, name=name, is_compiled=way == COMPILED)
        for each in FP8_RECIPES
        for name in (each, f"{each} least")
        for way in ("", COMPILED)
    },
    "best layers": partial(of_library, library="fp8core", name="delayed", is_best=True),
    "best stored": partial(of_stored, name="delayed"),
    "best converted": partial(of_transformers, name="current", is_compiled=True, is_best=True),
}
