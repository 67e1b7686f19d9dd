"""The activations as operations of a chain.

With ``cache_quantized_input`` backward reads the input as e4m3 codes with one scale, half of its
memory in bfloat16; SiTUGLU and the activations with scales do not offer it. With
``glu_interleave_size`` the two halves of a gated activation come in alternating blocks of so many
columns, to which ``interleave_glu_tensor`` brings a weight's rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from fp8core.chain.activation import ScaledActivationShape, activation_shape
from fp8core.chain.shape import LinkShape
from fp8core.chain.simple import DeinterleaveShape
from fp8core.errors import OperandError
from fp8core.modules.calls.parameters import check_size, refuse_arguments
from fp8core.modules.layers.operation import Operation


class _Activation(Operation):
    """An activation, whose halves may come in blocks: a shape before its own puts them together."""

    _blocks: tuple[LinkShape, ...] = ()
    _shape: LinkShape

    def _take_blocks(self, size: int | None) -> None:
        """Have the halves come in blocks of ``size`` columns; None: each as a whole."""
        if size is not None:
            name = f"ops.{type(self).__name__}"
            self._blocks = (DeinterleaveShape(check_size(name, "glu_interleave_size", size)),)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (*self._blocks, self._shape)


class _Named(_Activation):
    """An activation of the backends, by the name of the class unless it has another."""

    activation: str

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "activation" not in vars(cls):
            cls.activation = cls.__name__.lower()

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(None)
        self.cache_quantized_input = bool(cache_quantized_input)
        self._set_shape()

    def _set_shape(self, params: dict[str, float] | None = None) -> None:
        caches = self.cache_quantized_input
        self._shape = activation_shape(self.activation, params, caches_codes=caches)


class GELU(_Named):
    """GELU, tanh approximation."""


class ErfGELU(_Named):
    """``x P(x)``, with the normal distribution function ``P``: GELU itself."""


class GEGLU(_Named):
    """``gelu(a) * b`` of the two halves of each row."""


class GLU(_Named):
    """``sigmoid(a) * b``."""


class QGELU(_Named):
    """``x sigmoid(1.702 x)``."""


class QGEGLU(_Named):
    """``qgelu(a) * b``."""


class ReLU(_Named):
    """``max(x, 0)``."""


class ReGLU(_Named):
    """``relu(a) * b``."""


class SReLU(_Named):
    """``max(x, 0)^2``."""


class SReGLU(_Named):
    """``srelu(a) * b``."""


class SiLU(_Named):
    """``x sigmoid(x)``."""


class SwiGLU(_Named):
    """``silu(a) * b``."""

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self._take_blocks(glu_interleave_size)


class ClampedSwiGLU(_Named):
    """``min(a, limit) sigmoid(alpha min(a, limit)) * (clamp(b, -limit, limit) + offset)``, where
    ``glu_linear_offset`` is the offset; the defaults are those of GPT-OSS."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self._take_blocks(glu_interleave_size)
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self._set_shape(params)


def _positive(owner: str, name: str, value: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise OperandError(f"ops.{owner}({name}={value!r}): expected a positive number.")
    return float(value)


class SiTUGLU(_Activation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``, computed by torch's operators.

    Source: the technical report of Kimi K3, as Transformer Engine 2.20.2 cites it.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(None)
        names = ("cache_quantized_input",)
        refuse_arguments(SiTUGLU.__init__, locals(), names, owner="ops.SiTUGLU")
        betas = (_positive("SiTUGLU", "beta1", beta1), _positive("SiTUGLU", "beta2", beta2))
        self._take_blocks(glu_interleave_size)
        self._shape = ScaledActivationShape("situglu", betas, has_scales=False)


class _Scaled(_Activation):
    """An activation whose rows are multiplied by an extra input, of the shape of the input without
    its last dimension: rounded once, from float32."""

    num_extra_inputs = 1
    scaled: str

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(None)
        names = ("activation_recompute_in_mlp",)
        owner = f"ops.{type(self).__name__}"
        refuse_arguments(_Scaled.__init__, locals(), names, owner=owner)
        self._take_blocks(glu_interleave_size)
        self._take_params()

    def _take_params(self, *params: float) -> None:
        self._shape = ScaledActivationShape(self.scaled, params, has_scales=True)


class ScaledSwiGLU(_Scaled):
    """``silu(a) * b * scale`` with a scale for each row."""

    scaled = "swiglu"


class ScaledSiTUGLU(_Scaled):
    """:class:`SiTUGLU` with a scale for each row."""

    scaled = "situglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        owner = "ScaledSiTUGLU"
        self._take_params(_positive(owner, "beta1", beta1), _positive(owner, "beta2", beta2))


class ScaledClampedQGeGLU(_Scaled):
    """:class:`ClampedSwiGLU` with a scale for each row."""

    scaled = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self._take_params(*activation_shape(self.scaled, params).params)


class ScaledSReLU(_Scaled):
    """``max(x, 0)^2 * scale`` with a scale for each row."""

    scaled = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledTanhSReLU(_Scaled):
    """``(c tanh(max(x, 0) / c))^2 * scale`` with a scale for each row, computed by torch's
    operators; ``tanh_clamp_scale`` is c."""

    scaled = "tanh_srelu"

    def __init__(
        self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self._take_params(_positive("ScaledTanhSReLU", "tanh_clamp_scale", tanh_clamp_scale))


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return ``tensor [2 n, ...]``, a weight or bias, with its halves in alternating blocks.

    ``[a, b]`` becomes ``[a0, b0, a1, b1, ...]`` of ``interleave_size`` rows each, the order that
    activations with ``glu_interleave_size`` take.

    >>> interleave_glu_tensor(torch.arange(8), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Raises:
        OperandError: the rows are no pairs of blocks.
    """
    count = _num_pairs(tensor, interleave_size)
    blocks = tensor.reshape(2, count, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return the tensor whose :func:`interleave_glu_tensor` is ``tensor``.

    >>> deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    count = _num_pairs(tensor, interleave_size)
    blocks = tensor.reshape(count, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def _num_pairs(tensor: torch.Tensor, size: int) -> int:
    """Return how many pairs of blocks of ``size`` rows ``tensor`` has."""
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not is_size or not tensor.dim() or tensor.shape[0] % (2 * size):
        raise OperandError(
            f"interleave_size={size!r} of a tensor {list(tensor.shape)}: expected an integer >= 1 "
            f"whose double divides the first dimension."
        )
    return tensor.shape[0] // (2 * size)
