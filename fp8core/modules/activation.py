"""The activations as operations of a chain.

``cache_quantized_input`` and ``glu_interleave_size`` are Transformer Engine's, and not offered.
"""

from __future__ import annotations

from fp8core.chain.activation import activation_shape
from fp8core.chain.shape import LinkShape
from fp8core.modules.operation import Operation
from fp8core.modules.refusals import refuse_arguments

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ClampedSwiGLU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SwiGLU",
]


class _Activation(Operation):
    activation: str

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(None)
        owner = f"ops.{type(self).__name__}"
        refuse_arguments(_Activation.__init__, locals(), ("cache_quantized_input",), owner=owner)
        self._shape = activation_shape(self.activation)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape of the activation."""
        return (self._shape,)


class GELU(_Activation):
    """GELU, tanh approximation."""

    activation = "gelu"


class GEGLU(_Activation):
    """``gelu(a) * b`` of the two halves of each row."""

    activation = "geglu"


class GLU(_Activation):
    """``sigmoid(a) * b``."""

    activation = "glu"


class QGELU(_Activation):
    """``x sigmoid(1.702 x)``."""

    activation = "qgelu"


class QGEGLU(_Activation):
    """``qgelu(a) * b``."""

    activation = "qgeglu"


class ReLU(_Activation):
    """``max(x, 0)``."""

    activation = "relu"


class ReGLU(_Activation):
    """``relu(a) * b``."""

    activation = "reglu"


class SReLU(_Activation):
    """``max(x, 0)^2``."""

    activation = "srelu"


class SReGLU(_Activation):
    """``srelu(a) * b``."""

    activation = "sreglu"


class SiLU(_Activation):
    """``x sigmoid(x)``."""

    activation = "silu"


class SwiGLU(_Activation):
    """``silu(a) * b``."""

    activation = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        given = ("glu_interleave_size",)
        refuse_arguments(SwiGLU.__init__, locals(), given, owner="ops.SwiGLU")


class ClampedSwiGLU(_Activation):
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
        given = ("glu_interleave_size",)
        refuse_arguments(ClampedSwiGLU.__init__, locals(), given, owner="ops.ClampedSwiGLU")
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self._shape = activation_shape(self.activation, params)
