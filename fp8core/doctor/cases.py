"""The tensors of the self-test, and the calls of operations with them.

They are small: 256 tokens in two groups of 128, 128 input features and 384 output features, which
the blocks of every recipe divide; as all sizes differ, swapped ones give an error. The rows of
tensors that are cast span four decades.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    AttentionDesc,
    Backend,
    DequantizeDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    RotaryDesc,
)
from fp8core.torch_ops.private import pytree

__all__ = [
    "CPU",
    "IN_FEATURES",
    "OFFSETS",
    "TOKENS",
    "Bench",
    "attention_arguments",
    "norm_arguments",
    "operand_to",
    "pointwise_arguments",
    "quantize_keywords",
    "rotary_arguments",
    "rotary_positions",
    "tensor",
]

TOKENS, IN_FEATURES, OUT_FEATURES = 256, 128, 384
SIZES = {
    "input": (TOKENS, IN_FEATURES),
    "weight": (OUT_FEATURES, IN_FEATURES),
    "grad_output": (TOKENS, OUT_FEATURES),
}
CPU = torch.device("cpu")
OFFSETS = (0, 128, TOKENS)
DELAYED_AMAX = 512.0  # above the amax of every tensor; the same for a tensor and its groups
SEED = 20


def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor called ``name`` on the CPU, from a fixed seed; rows of ``weight`` have one
    magnitude."""
    generator = torch.Generator().manual_seed(SEED + list(SIZES).index(name))
    rows, columns = SIZES[name]
    x = torch.randn(rows, columns, generator=generator)
    if name != "weight":
        x *= torch.logspace(-2, 2, rows)[:, None]
    return x.to(dtype)


def _plain(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotary_arguments(desc: RotaryDesc) -> list[torch.Tensor]:
    """Return x, two sequences with four heads of 32, and the angles of 24 elements, on the CPU."""
    sizes = {"sbhd": (TOKENS // 2, 2), "bshd": (2, TOKENS // 2), "thd": (TOKENS,)}[desc.layout]
    x = _plain(*sizes, 4, 32, dtype=desc.dtype, seed=5)
    factors = torch.logspace(0, -4, 12).repeat(2)
    return [x, (torch.arange(TOKENS)[:, None] * factors)[:, None, None, :]]


def rotary_positions(desc: RotaryDesc) -> dict[str, torch.Tensor]:
    """Return the keywords of ``rotary``, on the CPU."""
    keywords = {"start_positions": torch.tensor([0, 7], dtype=torch.int32)}
    if desc.layout == "thd":
        keywords["cu_seqlens"] = torch.tensor(OFFSETS, dtype=torch.int32)
    return keywords


def attention_arguments(desc: AttentionDesc) -> list[torch.Tensor]:
    """Return q, k and v of one sequence, and a gradient of the result, on the CPU."""
    sizes = (
        (desc.heads, desc.head_dim),
        (desc.groups, desc.head_dim),
        (desc.groups, desc.head_dim_v),
        (desc.heads, desc.head_dim_v),
    )
    return [_plain(64, 1, *size, dtype=desc.dtype, seed=5 + at) for at, size in enumerate(sizes)]


def norm_arguments(desc: NormDesc | NormBackwardDesc, judge: Backend) -> list[Any]:
    """Return the arguments of ``norm`` or ``norm_backward``, on the CPU."""
    norm = desc if isinstance(desc, NormDesc) else desc.norm
    x = _plain(TOKENS, IN_FEATURES, dtype=norm.dtype, seed=1)
    weight = _plain(IN_FEATURES, dtype=norm.dtype, seed=2)
    bias = _plain(IN_FEATURES, dtype=norm.dtype, seed=3) if norm.kind == "layernorm" else None
    if isinstance(desc, NormDesc):
        return [x, weight] if bias is None else [x, weight, bias]
    grad = _plain(TOKENS, IN_FEATURES, dtype=norm.dtype, seed=4)
    statistics = judge.bind(norm, CPU)(x, weight, bias)[1:]
    return [grad, x, weight, *statistics]


def pointwise_arguments(desc: ActivationDesc | ActivationBackwardDesc) -> list[torch.Tensor]:
    """Return the arguments of ``activation`` or ``activation_backward``, on the CPU."""
    wide = 2 if desc.name in GATED else 1
    x = _plain(TOKENS, wide * IN_FEATURES, dtype=desc.dtype, seed=5)
    if isinstance(desc, ActivationDesc):
        return [x]
    return [_plain(TOKENS, IN_FEATURES, dtype=desc.dtype, seed=6), x]


def operand_to(operand: Operand, device: torch.device) -> Operand:
    """Return ``operand`` on ``device``."""
    return Operand(*(None if part is None else part.to(device) for part in operand))  # type: ignore[arg-type]  # data is never None


def quantize_keywords(desc: QuantizeDesc, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the keywords that the specs of ``desc`` need: ``scale``, ``rng``, or none."""
    halves = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    keywords: dict[str, torch.Tensor] = {}
    if any(spec.delayed for spec in halves):
        groups = len(OFFSETS) - 1 if desc.grouped else 1
        keywords["scale"] = torch.full((groups,), halves[0].target / DELAYED_AMAX, device=device)
    if any(spec.stochastic for spec in halves):
        keywords["rng"] = torch.tensor([SEED, 0])
    return keywords


def _quantized(
    who: Backend, device: torch.device, desc: QuantizeDesc, x: torch.Tensor
) -> Quantized:
    offsets = [torch.tensor(OFFSETS, device="cpu")] if desc.grouped else []
    keywords = quantize_keywords(desc, device)
    quantized: Quantized = who.bind(desc, device)(x.to(device), *offsets, **keywords)
    return quantized


@dataclass(frozen=True, slots=True)
class Bench:
    """A backend on its device, and the reference that judges it on the CPU."""

    tested: Backend
    judge: Backend
    device: torch.device

    @property
    def is_judge(self) -> bool:
        """Whether the tested backend is the judge, on the CPU."""
        return self.tested is self.judge and self.device.type == "cpu"

    def bind(self, desc: OpDesc) -> Callable[..., Any]:
        """Bind ``desc`` with the tested backend, on its device."""
        return self.tested.bind(desc, self.device)

    def to_device(self, tree: Any) -> Any:
        """Return a copy of ``tree`` whose tensors are on the device of the tested backend."""
        return pytree.tree_map_only(torch.Tensor, lambda x: x.clone().to(self.device), tree)

    def quantized(self, desc: QuantizeDesc, x: torch.Tensor) -> Quantized:
        """Quantize ``x`` (any device) with the tested backend; the result is on its device."""
        return _quantized(self.tested, self.device, desc, x)

    def expected(self, desc: QuantizeDesc, x: torch.Tensor) -> Quantized:
        """Quantize ``x`` with the judge, on the CPU."""
        return _quantized(self.judge, CPU, desc, x)

    def values(self, spec: OperandSpec | None, operand: Operand) -> torch.Tensor:
        """Return the values of ``operand``, float64 on the CPU, as the judge dequantizes them.

        They are still transformed if the operand's spec has a transform.
        """
        here = operand_to(operand, CPU)
        if spec is None:
            return here.data.double()
        decoded: torch.Tensor = self.judge.bind(DequantizeDesc(spec), CPU)(here)
        return decoded.double()

    def operand(
        self, spec: OperandSpec | None, x: torch.Tensor, *, columnwise: bool, grouped: bool
    ) -> Operand | None:
        """Quantize ``x`` with the tested backend, without stochastic rounding.

        Returns None if the backend does not support that cast.
        """
        x = x.to(self.device)
        if spec is None:
            return Operand(x.t() if columnwise else x)
        plain = replace(spec, stochastic=False)  # so that a group alone rounds as in the tensor
        row, column = (None, plain) if columnwise else (plain, None)
        desc = QuantizeDesc(x.dtype, row, column, grouped)
        if self.tested.unsupported(desc, self.device) is not None:
            return None
        operands = self.quantized(desc, x)
        return operands.columnwise if columnwise else operands.rowwise
