"""torch.Tensor's methods of shapes and of memory, for a tensor whose memory is its operands'."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.flat_view import FlatView
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.views import say_dequantized

__all__ = ["TorchMethods"]

_Self = TypeVar("_Self", bound="TorchMethods")


class TorchMethods(OperandTensor):
    """A tensor whose methods answer for its operands, where torch's would read memory of its own.

    A change of shape is a view where blocks allow it, as in torch where strides do.
    """

    def reshape(self, *shape: Any) -> torch.Tensor:
        """Return the tensor as ``[shape]``: a view where blocks allow it, else a plain copy of the
        values, which is logged once."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            view = self.view(tuple(sizes))
        except RuntimeError:  # UnsupportedError, and torch's where a view has gaps
            view = None
        if view is not None and not isinstance(view, FlatView):
            return view
        say_dequantized(torch.ops.aten.view.default, self)
        return self.dequantize().reshape(*sizes)

    def reshape_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the shape of ``other``, as :meth:`reshape` does."""
        return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
        """Return the tensor with some dimensions as one, as :meth:`reshape` does."""
        if not self.dim():
            return self.reshape(1)
        first, last = start_dim % self.dim(), end_dim % self.dim()
        if first > last:
            raise OperandError(f"flatten({start_dim}, {end_dim}) of {self}: no such dimensions.")
        count = math.prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], count, *self.shape[last + 1 :])

    def ravel(self) -> torch.Tensor:
        """Return the tensor in one dimension, as :meth:`reshape` does."""
        return self.reshape(self.numel())

    def contiguous(self, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        """Return the tensor itself, or a copy of a view with gaps, as every second row."""
        return self if self.is_contiguous() else self.clone()

    def share_memory_(self: _Self) -> _Self:
        """Move the operands to shared memory, as torch does a tensor's storage."""
        for part in self.tensors():
            part.share_memory_()  # type: ignore[no-untyped-call]  # torch's
        return self

    def is_shared(self) -> bool:
        """Say whether all operands are in shared memory."""
        return all(part.is_shared() for part in self.tensors())  # type: ignore[no-untyped-call]  # torch's

    def pin_memory(self: _Self, device: Any = None) -> _Self:
        """Return this tensor if its operands are in pinned memory, else a copy that is."""
        return self if self.is_pinned() else self.pinned()

    def is_pinned(self, device: Any = None) -> bool:
        """Say whether all operands are in pinned memory."""
        return all(part.is_pinned() for part in self.tensors())

    def data_ptr(self) -> int:
        """Return 0: it has no memory of its own. That of its :meth:`tensors` has addresses."""
        return 0

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the codes alone are no array of the values.

        Raises:
            UnsupportedError: always; without it, torch would hand out an address that is not there.
        """
        raise UnsupportedError(
            f"DLPack of {self}: its values are codes and scales. Use dequantize(), or to_torch() "
            f"for the codes and the scales as tensors."
        )
