"""Plans, the decisions of a recipe for a layer: how each of its tensors is quantized, no more.

Every kind of layer has a kind of :class:`Plan`: the tensors it quantizes, and which of them have
slots in its delayed state. A linear layer is three GEMMs over three tensors, each quantized along
the dimension contracted:

====================== ======================= =======================
GEMM                   a ``[m, k]``            b ``[n, k]``
====================== ======================= =======================
fprop  y  = x w^T      input, rowwise          weight, rowwise
dgrad  dx = dy w       grad_output, rowwise    weight, columnwise
wgrad  dw = dy^T x     grad_output, columnwise input, columnwise
====================== ======================= =======================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import OperandSpec

AmaxAlgorithm: TypeAlias = str | Callable[[torch.Tensor], torch.Tensor]
"""``"max"``, ``"most_recent"``, or ``f(amax_history [length, slots]) -> amax [slots]``, where row 0
of the history holds the newest amaxes, the others older ones, the oldest first."""

ScalingAlgorithm: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor
]
"""``f(amax [slots], scale [slots], fp8_max [slots], recipe) -> scale [slots]``."""


@dataclass(frozen=True, slots=True)
class LayerRole:
    """The role of a layer in its model: ``kind`` is ``"linear"``, ``"layernorm_linear"``,
    ``"layernorm_mlp"``, ``"grouped_linear"``, ``"sequential"``, or the kind of another layer;
    ``name`` is its path in the model where the model was prepared or the layer was given one."""

    kind: str = "linear"
    name: str | None = None


class TensorPlan(NamedTuple):
    """The specs of a tensor in the orientations of its two GEMMs; None: it is not quantized."""

    rowwise: OperandSpec | None
    columnwise: OperandSpec | None

    @property
    def is_delayed(self) -> bool:
        """Whether a scale of the tensor is delayed."""
        return any(spec is not None and spec.delayed for spec in self)


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The operands of one GEMM (None: high precision), and how it may accumulate."""

    a: OperandSpec | None = None
    b: OperandSpec | None = None
    fast_accumulation: bool = False


@dataclass(frozen=True, slots=True)
class DelayedPlan:
    """How delayed scales follow the amaxes; see the table of DelayedScaling in docs.

    ``scale = max * 2^-margin / amax`` over the last ``history_len`` updates.
    """

    history_len: int
    margin: float
    amax_algorithm: AmaxAlgorithm
    scaling_algorithm: ScalingAlgorithm | None
    reduce_amax: bool


class SlotNames(NamedTuple):
    """The tensors that have a slot in the forward and in the backward delayed state, in order.

    Scales and amax histories are stored in this order; a layer that computes its plan several
    times, as one GEMM a group, stores as many of these one after the other.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]


class Plan:
    """How a layer computes. A kind of layer derives a frozen dataclass from it, all of whose fields
    have defaults; with the defaults nothing is quantized."""

    __slots__ = ()
    slots: ClassVar[SlotNames] = SlotNames((), ())
    # Whether a recipe that returns a LinearPlan for such a layer leaves it in high precision.
    is_left_out: ClassVar[bool] = False

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """How each tensor is quantized, by name. A tensor that has a slot and is not named here is
        not quantized, and its slot stays unused."""
        raise NotImplementedError

    @property
    def delayed(self) -> DelayedPlan | None:
        """How the delayed scales follow the amaxes; None if no tensor has a delayed scale."""
        raise NotImplementedError

    @property
    def nonfinite(self) -> str:
        """The treatment of a tensor with NaN or inf in a cast, one of :data:`NONFINITE`.

        ``"saturate"``: the codes that the format has for them, inf becoming its largest value.
        ``"propagate"``: also scales of NaN, so that every result that depends on the tensor is NaN.
        """
        raise NotImplementedError

    @property
    def is_high_precision(self) -> bool:
        """Whether nothing is quantized."""
        return all(spec is None for tensor in self.tensors.values() for spec in tensor)


HOLDING: Mapping[str, tuple[str, ...]] = {
    "fastest": (),
    "balanced": ("weight",),
    "least": ("weight", "attention", "norm", "activation"),
}
"""What a recipe's ``holding`` has backward make again, of what it would hold since forward.

Each is the codes of a linear that backward multiplies by. ``"weight"``: the weight's columnwise
ones are cast from the weight again. The input's are made again from what the link before has saved
for its own backward: ``"norm"`` and ``"activation"``, which compute again, and ``"attention"``,
whose result is cast again. Where that is not so the codes are held: of an input that nothing before
it holds, of a weight whose codes are kept anyway or that each forward computes, of what several
ranks exchange.
"""

DEFAULT_HOLDING = "balanced"


@dataclass(frozen=True, slots=True)
class LinearPlan(Plan):
    """The three GEMMs of a linear layer; ``delayed`` if any operand is scaled by delayed scales.

    ``remade``: what backward makes again instead of holding it since forward, as in
    ``HOLDING``; without effect on what it takes in high precision. ``dequantizes``: where
    dgrad and wgrad take a tensor in high precision, it is what fprop multiplied, dequantized.
    ``makers``: pairs of a tensor's name and the object of the user that quantizes it.
    """

    # Transformer Engine's slots of one GEMM; those of its two results are never used.
    slots: ClassVar[SlotNames] = SlotNames(
        forward=("input", "weight", "output"), backward=("grad_output", "grad_input")
    )

    fprop: GemmPlan = GemmPlan()
    dgrad: GemmPlan = GemmPlan()
    wgrad: GemmPlan = GemmPlan()
    delayed: DelayedPlan | None = None
    nonfinite: str = "saturate"
    remade: tuple[str, ...] = ()
    dequantizes: bool = False
    makers: tuple[tuple[str, Any], ...] = ()

    @property
    def is_high_precision(self) -> bool:
        """Whether nothing is quantized, nor by an object of the user."""
        return not (self.makers or any(map(any, self.tensors.values())))

    @property
    def stored_by_users(self) -> frozenset[str]:
        """The tensors that objects of the user quantize to storages of their own, for products of
        their own: no spec says how."""
        return frozenset(name for name, _ in self.makers if not any(self.tensors[name]))

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """How the input, the weight and the gradient of the output are quantized, by name."""
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}

    @property
    def input(self) -> TensorPlan:
        """How the input is quantized."""
        return TensorPlan(self.fprop.a, self.wgrad.b)

    @property
    def weight(self) -> TensorPlan:
        """How the weight is quantized."""
        return TensorPlan(self.fprop.b, self.dgrad.b)

    @property
    def grad_output(self) -> TensorPlan:
        """How the gradient of the output is quantized."""
        return TensorPlan(self.dgrad.a, self.wgrad.a)


@dataclass(frozen=True, slots=True)
class AttentionPlan(Plan):
    """The specs of attention: ``qkv`` for queries, keys and values, each with a scale of its own,
    and ``s`` for the weights after the softmax and dropout.

    ``s`` has a delayed scale, or else a constant one: weights are at most ``1 / (1 - dropout)``.
    ``grad_output``, the gradient of the result, and ``dp``, that of the logits, are None where
    backward computes in high precision from the dequantized q, k and v. ``o``, the result, is
    quantized by the scale of the values, which fits it and takes no slot, and dequantized for the
    layer that reads it; None leaves it in high precision.
    """

    slots: ClassVar[SlotNames] = SlotNames(
        forward=("q", "k", "v", "s", "o"), backward=("grad_output", "dp")
    )
    is_left_out: ClassVar[bool] = True

    qkv: OperandSpec | None = None
    s: OperandSpec | None = None
    grad_output: OperandSpec | None = None
    dp: OperandSpec | None = None
    o: OperandSpec | None = None
    delayed: DelayedPlan | None = None
    nonfinite: str = "saturate"

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """How each tensor is quantized, by name; there is one orientation."""
        specs = {
            **dict.fromkeys("qkv", self.qkv),
            "s": self.s,
            "grad_output": self.grad_output,
            "dp": self.dp,
        }
        return {name: TensorPlan(spec, None) for name, spec in specs.items()}


ATTENTION_BACKWARDS = ("dequantized", "fp8")
"""How the backward of low-precision attention computes: see :class:`AttentionPlan`."""

ATTENTION_OUTPUTS = ("fp8", "high_precision")
"""How the result of low-precision attention is stored: see :class:`AttentionPlan`."""

NONFINITE = ("saturate", "propagate")
"""What ``Plan.nonfinite`` may be."""

HIGH_PRECISION = LinearPlan()
"""No quantization in a linear layer."""
