"""Transformer Engine's names of low-precision tensors, for questions by ``isinstance``.

Every such tensor is a :class:`QuantizedTensor`; ``isinstance(weight, MXFP8Tensor)`` asks how it is
stored. A name has no other use.
"""

from __future__ import annotations

from typing import Any

from fp8core.backend_api import OperandSpec
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import TensorMeta


class _Name(TensorMeta):
    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, QuantizedTensor):
            return False
        plan = instance.plan
        spec = plan.rowwise or plan.columnwise
        asks_both: Any = getattr(cls, "describes_both", None)
        if asks_both is not None:
            return bool(asks_both(plan))
        describes: Any = cls.describes  # type: ignore[attr-defined]  # each other name defines it
        return spec is not None and bool(describes(spec))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{cls.__name__} names a way to store a QuantizedTensor and has no constructor. Use "
            f"quantized_model_init, or QuantizedTensor.quantize(value, plan)."
        )


class Float8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with one float32 scale: delayed and current scaling."""

    @staticmethod
    def describes(spec: OperandSpec) -> bool:
        """Return whether tensors stored as ``spec`` go by this name."""
        return spec.block == (0, 0)


class MXFP8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e8m0 scales: OCP microscaling."""

    @staticmethod
    def describes(spec: OperandSpec) -> bool:
        """Return whether tensors stored as ``spec`` go by this name."""
        return spec.scale_format == "e8m0"


class Float8BlockwiseQTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with a float32 scale for every 1 x 128 or 128 x 128 elements."""

    @staticmethod
    def describes(spec: OperandSpec) -> bool:
        """Return whether tensors stored as ``spec`` go by this name."""
        return spec.scale_format == "float32" and spec.block[1] == 128


class NVFP4Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e4m3 scales under a float32 scale: NVIDIA's FP4."""

    @staticmethod
    def describes(spec: OperandSpec) -> bool:
        """Return whether tensors stored as ``spec`` go by this name."""
        return spec.scale_format == "e4m3"


class HybridQuantizedTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor whose two operands have different formats."""

    @staticmethod
    def describes_both(plan: TensorPlan) -> bool:
        """Return whether a tensor stored by ``plan`` goes by this name."""
        row, column = plan
        return row is not None and column is not None and _format(row) != _format(column)


def _format(spec: OperandSpec) -> tuple[object, ...]:
    return spec.format, spec.block[1], spec.scale_format


# Transformer Engine's bases of these classes, of which every such tensor is an instance.
QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage = Float8Tensor
MXFP8TensorStorage = MXFP8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
NVFP4TensorStorage = NVFP4Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor
