"""The flat view of a QuantizedTensor whose blocks it cuts, as torch's wrappers take it to send it.

``DistributedDataParallel`` sends each parameter as ``p.view(-1)``: joined with others, or by itself
where it is large.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.pieces import broadcast
from fp8core.tensors.values import Values
from fp8core.torch_ops.private import make_wrapper, refuse_address

_aten = torch.ops.aten


class FlatView(Values):
    """The values of ``whole`` as one dimension, for reading. ``copy_`` writes all of them to
    ``whole``, and a broadcast sends its operands; other writes are refused."""

    _whole: OperandTensor

    @staticmethod
    def __new__(cls, whole: OperandTensor) -> FlatView:
        """Take a tensor; its values are decoded when they are read."""
        self: FlatView = make_wrapper(cls, (whole.numel(),), dtype=whole.dtype, device=whole.device)
        refuse_address(self)
        self._whole = whole
        return self

    @property
    def whole(self) -> OperandTensor:
        """The tensor of which it is a view."""
        return self._whole

    @property
    def _plain(self) -> torch.Tensor:  # type: ignore[override]  # read from the whole each time
        return self._whole.decoded().view(-1)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_whole"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: None, outer_size: Any, outer_stride: Any
    ) -> FlatView:
        return FlatView(inner["_whole"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.c10d.broadcast_.default:
            return broadcast(func, args, kwargs)
        view = args[0] if args else None
        if isinstance(view, FlatView):
            whole = view.whole
            if func.overloadpacket is _aten.copy_:
                source = args[1].whole if isinstance(args[1], FlatView) else args[1]
                whole.copy_(source.view(whole.shape), *args[2:], **kwargs)
                return view
            if func.overloadpacket is _aten.detach:
                return FlatView(whole)
            if func.overloadpacket is _aten.view and [*args[1]] == [*whole.shape]:
                return whole.detach()
        return super().__torch_dispatch__(func, types, args, kwargs)
